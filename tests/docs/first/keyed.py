"""A decode node with keys, until it is interrupted."""

import signal

import numpy as np

from pdstage import DecodeNode, Pool, Topology
from pdstage.tensors import build, paged_nhd

k, v = np.zeros((2, 1, 8, 16, 2, 64), np.float32)
pool = Pool.of(build(paged_nhd(k, v, total_heads=2, tp=(1, 0))))
with DecodeNode(pool, Topology(), transport="local", progress="thread", keys="cluster.key") as node:
    print("at", node.socket.endpoint, flush=True)
    signal.sigwait({signal.SIGINT})

import time

import numpy as np
import torch

from pdstage import DecodeNode, MetadataBuffers, Pool, PrefillNode, Topology
from pdstage.metadata import usual_columns
from pdstage.tensors import build, paged_nhd


kept = []  # an engine's memory is the engine's to keep


def made():
    kept.append(np.zeros((2, 1, 8, 16, 2, 64), np.float32))
    k, v = kept[-1]
    return Pool.of(build(paged_nhd(k, v, total_heads=2, tp=(1, 0))))


def until(done):
    deadline_at = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline_at
        node.poll_many([sender])
        decode.poll_many([receiver])


pool, topology = made(), Topology()
sender = PrefillNode(made(), topology).send("another")

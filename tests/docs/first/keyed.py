"""A decode node with keys, until it is interrupted."""

import signal

from pdstage import DecodeNode
from tests.docs.first.pool import pool, topology

with DecodeNode(pool, topology, transport="local", progress="thread", keys="cluster.key") as node:
    print("at", node.socket.endpoint, flush=True)
    signal.sigwait({signal.SIGINT})

"""A decode node whose metrics are served until it is interrupted."""

import signal

from pdstage import DecodeNode
from pdstage.watch import expose
from tests.docs.first.pool import pool, topology

with DecodeNode(pool, topology, transport="local", progress="thread") as node:
    print("at", expose(node, port=0).port, flush=True)
    signal.sigwait({signal.SIGINT})

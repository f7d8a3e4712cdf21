"""pdstage moves a request's KV cache from the ranks that prefilled it to the ranks that will decode it.

The two sides may differ in tensor- and context-parallel size, page size and memory order. Kernels gather the scattered
pieces of a request into contiguous staging memory, one write carries them, and kernels scatter them into place.

To use it, read `manager`: `PrefillNode` and `DecodeNode` are what an engine holds. To understand it, read on in this
order:

    layout, tensors     where an engine keeps a request's state, and which shards of it a rank holds
    plan                who sends which bytes to whom, and how they are staged
    kernels             gather and scatter; kernels/reference.py is the definition of correct
    protocol            the two cores, without sockets or clock; its docstring gives the reading order
    transport, control  NIXL, Mooncake, MORI and shared memory; sockets and directories
    stager              staging memory and the kernels' queue
    columns, metadata   a request's aux row: first token and so on, and the memory that holds it
    manager             the nodes: threads, the clock and the lock
    integrations        vLLM's and SGLang's sides; `probe` checks a layout against the engine's own code
    watch               metrics for Prometheus, from nodes in any process
    tools, cli          the commands: demo, doctor, calibrate, trace

Used throughout: errors, arguments, environment, native, shared, closing, metrics, log_limit.

Importing this package imports neither torch nor zmq nor a transport: each comes with the first node that needs it.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from pdstage.errors import Aborted, DeadlineExceeded, PdstageError, PeerError, TransportError, UsageError
from pdstage.layout import Component, Key, Layout, Region, RowLevel, TokenShard, View
from pdstage.layout.states import StateType
from pdstage.layout.topology import Axis, Topology

if TYPE_CHECKING:
    from pdstage.columns import Column
    from pdstage.control.keys import Keys
    from pdstage.kernels import Pool
    from pdstage.manager import DecodeNode, Items, PrefillNode, Receiver, Sender
    from pdstage.metadata import AuxRow, MetadataBuffers
    from pdstage.protocol.config import Config
    from pdstage.protocol.state import State

__version__ = "0.2.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # the application chooses what to show

__all__ = [
    "Aborted",
    "AuxRow",
    "Axis",
    "Column",
    "Component",
    "Config",
    "DeadlineExceeded",
    "DecodeNode",
    "Items",
    "Key",
    "Keys",
    "Layout",
    "MetadataBuffers",
    "PdstageError",
    "PeerError",
    "Pool",
    "PrefillNode",
    "Receiver",
    "Region",
    "RowLevel",
    "Sender",
    "State",
    "StateType",
    "TokenShard",
    "Topology",
    "TransportError",
    "UsageError",
    "View",
]

_LAZY = {
    "AuxRow": "pdstage.metadata",
    "Column": "pdstage.columns",
    "Config": "pdstage.protocol.config",
    "DecodeNode": "pdstage.manager",
    "Items": "pdstage.manager",
    "Keys": "pdstage.control.keys",
    "MetadataBuffers": "pdstage.metadata",
    "Pool": "pdstage.kernels",
    "PrefillNode": "pdstage.manager",
    "Receiver": "pdstage.manager",
    "Sender": "pdstage.manager",
    "State": "pdstage.protocol.state",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'pdstage' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

"""Describes one side of a conversation between two hosts: its releases and what is installed there.

Imports no transport: a broken one must not end the process that answers.
"""

from __future__ import annotations

import platform
import socket
from functools import cache
from importlib.metadata import PathDistribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import zmq
from msgspec import Meta

import pdstage
from pdstage import native
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.transport import names, plugins

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_Word = Annotated[str, Meta(max_length=256)]


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """`wire` and `oldest_wire`: versions of the protocol. `host_code`: "c++" or "numpy".

    `transports` maps installed transports to the version of what they need, or of the distribution that provides one by
    an entry point. `features` are those that this release can offer at Hello, and "curve" if the control plane can be
    encrypted.
    """

    host: _Word
    pdstage: _Word
    wire: Annotated[int, Meta(ge=0, le=255)]
    oldest_wire: Annotated[int, Meta(ge=0, le=255)]
    python: _Word
    transports: Annotated[dict[_Word, _Word], Meta(max_length=64)]
    features: Annotated[list[_Word], Meta(max_length=64)]
    host_code: _Word


@cache
def this_side() -> Side:
    others = {name: point.dist.version if point.dist else "" for name, point in plugins().items()}
    found = {name: find_spec(name) for name in names() if name != "local" and name not in others}
    needed = {name: _version_at(name, spec) for name, spec in found.items() if spec is not None}
    transports = others | {"local": pdstage.__version__} | needed
    curve = ["curve"] if zmq.has("curve") else []
    return Side(
        host=socket.gethostname(), pdstage=pdstage.__version__, wire=wire.VERSION, oldest_wire=wire.OLDEST,
        python=platform.python_version(), transports=transports, features=[*m.FEATURES, *curve],
        host_code=native.active(),
    )  # fmt: skip


def _version_at(name: str, spec: ModuleSpec) -> str:
    """The version of the distribution with the package's name: asking which files belong to which takes a second."""
    folders = [Path(place).parent for place in spec.submodule_search_locations or ()]
    found = sorted(path for folder in folders for path in folder.glob(f"{name}*.dist-info"))
    return PathDistribution(found[0]).version if found else ""

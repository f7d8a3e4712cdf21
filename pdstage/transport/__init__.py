"""Finds transports by name: the modules of this package, and the entry points `pdstage.transports` of others.

Layer 4. Must not know any backend: a module `x` here that defines a class `TRANSPORT` is the transport "x".
"""

from __future__ import annotations

import inspect
import pkgutil
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, cast

from pdstage.errors import UsageError
from pdstage.spans import Spans
from pdstage.transport.base import Done, Event, Figures, Inbound, PostFailed, Traits, Transport

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Done",
    "Event",
    "Figures",
    "Inbound",
    "PostFailed",
    "Spans",
    "Traits",
    "Transport",
    "available",
    "names",
    "open_transport",
]

ENTRY_POINTS = "pdstage.transports"


def open_transport(name: str, **options: object) -> Transport:
    """A new transport of that name; "auto" takes the most preferred that imports.

    `options` go to its constructor. Raises `UsageError` for an unknown name or option or a missing dependency, and what
    the constructor raises.
    """
    kind = _preferred() if name == "auto" else _load(name)
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise UsageError(f"transport {name!r}: {error}", remedy=f"see {kind.__module__}.{kind.__name__}") from error
    return kind(**options)


def available() -> dict[str, str]:
    """Every known transport: empty if it imports here, else why not, in words."""
    reasons = {}
    for name in names():
        try:
            _load(name)
            reasons[name] = ""
        except UsageError as error:
            reasons[name] = str(error)
    return reasons


def names() -> list[str]:
    """The names of all known transports, installed or not, without importing one."""
    return sorted(_loaders())


def _loaders() -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {point.name: point.load for point in entry_points(group=ENTRY_POINTS)}
    for module in pkgutil.iter_modules(__path__):
        if module.name != "base" and not module.name.startswith("_"):
            found[module.name] = partial(_transport_of, f"{__name__}.{module.name}")
    return found


def _transport_of(path: str) -> object:
    return import_module(path).TRANSPORT


def _load(name: str) -> type[Transport]:
    loaders = _loaders()
    if name not in loaders:
        raise UsageError(f"no transport {name!r}", remedy=f"choose of auto, {', '.join(sorted(loaders))}", name=name)
    try:
        return cast("type[Transport]", loaders[name]())
    except ImportError as error:
        if (error.name or "").startswith("pdstage"):  # our own fault, which must not pass for a missing package
            raise
        raise UsageError(
            f"transport {name!r} does not import here: {error}", remedy=f'pip install "pdstage[{name}]"', name=name
        ) from error


def _preferred() -> type[Transport]:
    kinds = []
    for name in names():
        try:
            kinds.append(_load(name))
        except UsageError:
            continue
    best = max(kinds, key=lambda kind: kind.preference)
    if best.preference < 1:
        raise UsageError("no transport imports here", remedy=f"name one of {', '.join(names())} to learn why")
    return best

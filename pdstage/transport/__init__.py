"""Finds transports by name: modules of this package, and entry points `pdstage.transports` of other distributions.

A module `x` of this package that defines a class `TRANSPORT` is the transport "x". Read in this order:

    base                        the verbs, traits and events of every transport; registered ranges and their checks
    _backend                    the base class of the transports here: registrations, peers, tickets, events
    local                       copies within one host, which has:
        _peer                       processes of this host: their identity, their end, and writes into their memory
        _datagrams                  tags between processes
        _device, _cuda_ipc          device memory: exported, mapped and copied
    nixl, _nixl_agent           NIXL over UCX
        _sockets                    whether a dead peer's bytes are still in this process's sockets
    mooncake, _transfer_engine  Mooncake's Transfer Engine
    mori                        AMD's MORI-IO
    _auto                       several transports as one
    _fabric                     network devices
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
from collections.abc import Collection, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import cast

from pdstage.errors import PdstageError, UsageError
from pdstage.plan.spans import Spans
from pdstage.transport._auto import AutoTransport
from pdstage.transport._backend import Backend, Description, Link, Post
from pdstage.transport.base import Done, Event, Figures, Inbound, Mapped, PostFailed, Traits, Transport

__all__ = [
    "Backend",
    "Description",
    "Done",
    "Event",
    "Figures",
    "Inbound",
    "Link",
    "Mapped",
    "Post",
    "PostFailed",
    "Spans",
    "Traits",
    "Transport",
    "available",
    "load",
    "names",
    "open_from_config",
    "open_transport",
    "plugins",
    "supporting",
]

ENTRY_POINTS = "pdstage.transports"

log = logging.getLogger(__name__)


def open_transport(name: str, **options: object) -> Transport:
    """Opens the transport of that name. "auto" opens all that start here, and picks the most preferred one for each
    peer.

    `options` go to its constructor; auto has none. Raises `UsageError` for an unknown name or option or a missing
    dependency, and what the constructor raises.
    """
    if name == "auto" and not options:
        return _auto()
    kind = load(name)
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise UsageError(f"transport {name!r}: {error}", remedy=f"see {kind.__module__}.{kind.__name__}") from error
    if kind.caveat:
        log.warning("transport %r: %s", name, kind.caveat)
    return kind(**options)


def open_from_config(config: str | Mapping[str, object], device: str, host: str = "") -> Transport:
    """Opens the transport that a setting names: a name, or `{"name": name, option: value, ...}`.

    A value that is a mapping holds one value per device of a host ("cuda:0", or "cpu"), so that its ranks can share the
    setting; the value for `device` is used. `host` is where the control plane listens; transports with an option `host`
    get it unless one is given. Empty means every interface.
    Raises `UsageError` if the setting names no transport, and what `open_transport` raises.
    """
    options: dict[str, object] = dict(config) if isinstance(config, Mapping) else {"name": config}
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise UsageError(
            f"transport {config!r} names no transport", remedy='give "nixl", or {"name": "nixl", "devices": ["mlx5_0"]}'
        )
    for option, value in options.items():
        if isinstance(value, Mapping):
            if device not in value:
                known = ", ".join(map(str, value)) or "no device"
                raise UsageError(
                    f"transport {name!r} has {option} for {known}, not for {device}",
                    remedy=f"add {device}, as this process numbers it",
                )
            options[option] = value[device]
    if name == "auto" and not options:
        return _auto(host)
    if host and "host" in inspect.signature(load(name)).parameters:
        options.setdefault("host", host)
    return open_transport(name, **options)


def available() -> dict[str, str]:
    """Every known transport: empty if it imports here, else the reason why not."""
    reasons = {}
    for name in names():
        try:
            load(name)
            reasons[name] = ""
        except UsageError as error:
            reasons[name] = str(error)
    return reasons


def supporting(kinds: Collection[str]) -> list[str]:
    """The names of the transports that import here and move memory of all these kinds, most preferred first."""
    return [name for name, kind in _importable() if kind.traits.kinds >= set(kinds)]


def names() -> list[str]:
    """The names of all known transports, installed or not, without importing any."""
    return sorted([*_own(), *plugins()])


def plugins() -> dict[str, EntryPoint]:
    """The transports of other distributions, by name. A transport of this package keeps its name against any entry
    point.
    """
    own = _own()
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in own}


def _own() -> list[str]:
    found = (module.name for module in pkgutil.iter_modules(__path__))
    return [name for name in found if name != "base" and not name.startswith("_")]


def _foreign(point: EntryPoint) -> object:
    """The class that an entry point of another distribution names. Every fault becomes a `UsageError`: a broken package
    must not stop nodes that do not use it.
    """
    whose = f"transport {point.name!r} of {point.dist.name if point.dist else 'a distribution'} ({point.value})"
    remedy = "repair that distribution, or uninstall it"
    try:
        kind = point.load()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"{whose} does not import here: {why}", remedy=remedy, name=point.name) from error
    is_one = (
        isinstance(kind, type) and issubclass(kind, Transport) and isinstance(getattr(kind, "traits", None), Traits)
    )
    lacks = ", ".join(sorted(getattr(kind, "__abstractmethods__", ())))
    if not is_one or lacks:
        what = f"lacks {lacks}" if lacks else "is not a Transport class with traits"
        raise UsageError(f"{whose} {what}", remedy=remedy, name=point.name)
    return kind


def load(name: str) -> type[Transport]:
    """The class of that name. Raises `UsageError` if it is unknown, does not load, or is not a transport."""
    if name not in names():
        raise UsageError(f"no transport {name!r}", remedy=f"choose of auto, {', '.join(names())}", name=name)
    try:
        kind = _foreign(plugins()[name]) if name not in _own() else import_module(f"{__name__}.{name}").TRANSPORT
        return cast("type[Transport]", kind)
    except ImportError as error:
        package, *_ = (error.name or "").split(".")
        if package == "pdstage":  # our own fault, not a missing package
            raise
        raise UsageError(
            f"transport {name!r} does not import here: {error}", remedy=f'pip install "pdstage[{name}]"', name=name
        ) from error


def _importable() -> list[tuple[str, type[Transport]]]:
    """The transports that import here, by name, most preferred first."""
    found = [(name, load(name)) for name, reason in available().items() if not reason]
    return sorted(found, key=lambda one: -one[1].preference)


def _auto(host: str = "") -> Transport:
    """The transports that "auto" may choose, as one transport. Those that do not start are left out."""
    ways = []
    for name, kind in _importable():
        if kind.preference < 1:
            break
        if not kind.traits.notifies:  # both sides must know before connecting whether tags travel as messages
            continue
        try:
            ways.append(open_from_config(name, "", host))
        except PdstageError as error:
            log.warning("auto leaves out transport %s: %s", kind.traits.name, error)
    if not ways:
        raise UsageError("no transport starts here", remedy=f"name one of {', '.join(names())} to learn why")
    return AutoTransport(ways) if len(ways) > 1 else ways[0]

"""A conversation of two nodes, step by step: connect, compare releases, open a session, and write by both paths.

It is that of `pdstage calibrate`. Every byte is compared. Without a peer, one is started on this host: that shows
whether a transport works here at all.
"""

from __future__ import annotations

import socket
import statistics
import time
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

import msgspec

from pdstage.control.address import Address
from pdstage.control.keys import Keys
from pdstage.errors import PdstageError, PeerError, TransportError, UsageError
from pdstage.manager.sessions import label
from pdstage.protocol.wire import talks_with
from pdstage.tools.calibrate import pool as pools
from pdstage.tools.calibrate.about import Side, this_side
from pdstage.tools.calibrate.caller import Caller, own_peer
from pdstage.tools.calibrate.peer import Find, Meet
from pdstage.transport import load, open_transport

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdstage.manager import PrefillNode
    from pdstage.tools.doctor.probe import Say

PATHS = ("direct", "staged")
_RUN, _SMALL_RUN = 16 << 10, pools.RUNS[0]
_NBYTES, _REPEATS = 16 << 20, 5
_CONNECT_S = 5.0


def talk(
    say: Say,
    *,
    transport: str,
    device: str,
    wait_s: float,
    peer: str = "",
    bind: str = "",
    keys: str = "",
    allow: str = "",
    insecure: bool = False,
) -> None:
    """Reports a "stage NAME" for each step, "here" and "there", "over", "round_trip_s" and a "path NAME" for each path.

    Without a peer also whether the transport is "installed" and its "caveat"; a path that fails is then only reported.
    """
    with ExitStack() as stack:
        is_own = not peer
        if is_own:
            _start(say, transport)
            peer = stack.enter_context(own_peer(device))
        address = Address.parse(peer, "tcp")
        with _step(say, "connect") as words:
            own = _reach(address)
            words.append(f"{address} takes connections, from {own}")
        with _step(say, "control") as words:
            held = Keys.load(keys, allow or None) if keys else None
            bind = bind or f"tcp://{Address(own, 0)}"
            caller = stack.enter_context(
                Caller(f"tcp://{address.keyed}", bind=bind, device=device, keys=held, insecure=insecure)
            )
            there = caller.about(wait_s)
            trip_s = statistics.median(_timed(caller, wait_s) for _ in range(_REPEATS))
            say.found(round_trip_s=trip_s, here=msgspec.to_builtins(this_side()), there=msgspec.to_builtins(there))
            words.append(f"a round trip takes {trip_s * 1e6:.0f} us")
        with _step(say, "versions") as words:
            words.append(_agree(this_side(), there, transport))
        pools.fill(caller.pool, int.from_bytes(time.time_ns().to_bytes(8)) & 0xFFFF_FFFF)
        with _step(say, "transport") as words:
            node = stack.enter_context(caller.started(transport, wait_s=wait_s))
            words.append(f"{transport} starts on both sides")
        with _step(say, "bootstrap") as words:
            caller.ask(Find(node.directory_address), node, wait_s=wait_s)
            words.append(f"the peer finds this side at {node.directory_address}")
        with _step(say, "hello") as words:
            caller.ask(Meet(caller.next_room(), node.directory_address, wait_s), node, wait_s=wait_s + 5)
            session = next(iter(node.core.sessions.values()), None)
            if session is None:
                raise PeerError("the session ended as soon as it began", remedy="see the peer's log")
            over = node.transport.traits_of(label(session)).name
            say.found(over=over)
            tags = "as messages" if session.tags_as_messages else "with the data"
            in_place = "pages may be written in place" if session.exposes_pool else "staged only"
            words.append(f"over {over}, {in_place}, tags travel {tags}")
        for path in PATHS:
            try:
                with _step(say, path) as words:
                    words.append(_move(say, caller, node, path, wait_s))
            except PdstageError:
                if not is_own:
                    raise
        say.step("close")
    say.step("exit")


def _start(say: Say, transport: str) -> None:
    """Loads and starts a transport in this process alone, which it may crash."""
    say.step("import")
    try:
        say.found(installed=True, caveat=load(transport).caveat)
    except UsageError as error:
        missing = error.__cause__
        say.found(installed=not (isinstance(missing, ModuleNotFoundError) and missing.name == transport))
        raise
    say.step("start")
    with closing(open_transport(transport)):
        pass


@contextmanager
def _step(say: Say, name: str) -> Iterator[list[str]]:
    """Reports a step's beginning and end, its duration, and the sentence that the caller puts into the list."""
    say.step(name)
    begun, words, level = time.monotonic(), list[str](), "ok"
    try:
        yield words
    except PdstageError as error:
        level, words = "fail", [error.what]
        raise
    finally:
        took_s, says = time.monotonic() - begun, "; ".join(words)
        say.found(**{f"stage {name}": {"name": name, "level": level, "seconds": took_s, "says": says}})


def _reach(address: Address) -> str:
    """Only connects, and returns this side's own address of the connection."""
    try:
        with socket.create_connection((address.host, address.port), _CONNECT_S) as probe:
            return str(probe.getsockname()[0])
    except socket.gaierror as error:
        raise TransportError(f"{address.host!r} does not resolve ({error})", remedy="name an address") from error
    except ConnectionRefusedError as error:
        raise TransportError(
            f"nobody listens at {address}", remedy=f"run `pdstage doctor --serve {address}` there"
        ) from error
    except OSError as error:
        raise TransportError(
            f"{address} cannot be reached ({error})", remedy="look at routes and firewalls between the two"
        ) from error


def _timed(caller: Caller, wait_s: float) -> float:
    begun = time.perf_counter()
    caller.about(wait_s)
    return time.perf_counter() - begun


def _agree(here: Side, there: Side, transport: str) -> str:
    """A sentence on both releases. Raises `PeerError` if they are incompatible, or lack the transport."""
    if not (talks_with(there.wire, there.oldest_wire) and there.oldest_wire <= here.wire):
        raise PeerError(
            f"pdstage {there.pdstage} there speaks wire version {there.wire} and talks with {there.oldest_wire} and "
            f"later; pdstage {here.pdstage} here speaks {here.wire} and talks with {here.oldest_wire} and later",
            remedy="run releases on both sides whose wire versions talk with each other",
        )
    for side, where in ((here, "here"), (there, "there")):
        if transport not in ("auto", *side.transports):
            raise PeerError(
                f"transport {transport!r} is not installed {where}",
                remedy=f'pip install "pdstage[{transport}]" there, or choose another with --transport',
            )
    releases = f"pdstage {here.pdstage} here, {there.pdstage} there, wire {here.wire} and {there.wire}"
    differ = [
        f"{name} {version} here, {there.transports[name]} there"
        for name, version in here.transports.items()
        if name != "local" and there.transports.get(name, version) != version
    ]
    return "; ".join([releases, *differ])


def _move(say: Say, caller: Caller, node: PrefillNode, path: str, wait_s: float) -> str:
    """Rooms of one token and large ones by one path; the peer checks the first of each size."""
    tokens = pools.tokens(_RUN, _NBYTES)
    nbytes = tokens * pools.N_VIEWS * _RUN
    took: dict[str, list[float]] = {"small": [], "large": []}
    before = node.stats()[f"chunks_{path}"]
    for number in range(_REPEATS + 1):
        for kind, run, n in (("small", _SMALL_RUN, 1), ("large", _RUN, tokens)):
            seconds = caller.room(node, path, run, n, wait_s=wait_s, look=number < 2).seconds
            took[kind] += seconds if number else []  # the first round warms up
    if node.stats()[f"chunks_{path}"] == before:
        raise TransportError("its chunks went by the other path", remedy="see what the log says of it")
    latency_s, large_s = statistics.median(took["small"]), statistics.median(took["large"])
    say.found(**{f"path {path}": {"nbytes": nbytes, "bytes_per_s": nbytes / large_s, "latency_s": latency_s}})
    return f"every byte compared; {nbytes / large_s / 1e9:.2f} GB/s, a small room in {latency_s * 1e6:.0f} us"

"""The check with a peer, step by step: connect, compare releases, open a session, and write by both paths, compared
byte for byte.

A probe runs it in another process, which the transport may crash. It uses the conversation of `pdstage calibrate`.
"""

from __future__ import annotations

import socket
import statistics
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import msgspec

from pdstage.control.address import Address
from pdstage.control.keys import Keys
from pdstage.errors import PdstageError, PeerError, TransportError
from pdstage.manager.sessions import label
from pdstage.protocol.wire import talks_with
from pdstage.tools.calibrate import pool as pools
from pdstage.tools.calibrate.about import Side, this_side
from pdstage.tools.calibrate.caller import Caller
from pdstage.tools.calibrate.peer import Find, Meet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdstage.manager import PrefillNode
    from pdstage.tools.doctor.probes import Say

PATHS = ("direct", "staged")
_RUN, _SMALL_RUN = 16 << 10, pools.RUNS[0]
_NBYTES, _REPEATS = 16 << 20, 5
_CONNECT_S = 5.0


class Steps:
    """Reports each step's beginning and end, its duration, and a sentence on its result."""

    def __init__(self, say: Say) -> None:
        self._say = say

    @contextmanager
    def step(self, name: str) -> Iterator[list[str]]:
        """The sentence is what the caller puts into the list."""
        self._say.step(name)
        begun, words, level = time.monotonic(), list[str](), "ok"
        try:
            yield words
        except PdstageError as error:
            level, words = "fail", [error.what]
            raise
        finally:
            took_s = time.monotonic() - begun
            says = "; ".join(words)
            self._say.found(**{f"stage {name}": {"name": name, "level": level, "seconds": took_s, "says": says}})


def caller(
    say: Say,
    *,
    peer: str,
    bind: str,
    transport: str,
    device: str,
    keys: str,
    allow: str,
    insecure: bool,
    wait_s: float,
) -> None:
    """Reports a "stage NAME" for each, "here" and "there", "over", "round_trip_s" and a "path NAME" for each path."""
    steps, address = Steps(say), Address.parse(peer, "tcp")
    with ExitStack() as stack:
        with steps.step("connect") as words:
            own = _reach(address)
            words.append(f"{address} takes connections, from {own}")
        with steps.step("control") as words:
            held = Keys.load(keys, allow or None) if keys else None
            bind = bind or f"tcp://{Address(own, 0)}"
            talk = stack.enter_context(
                Caller(f"tcp://{address.keyed}", bind=bind, device=device, keys=held, insecure=insecure)
            )
            there = talk.about(wait_s)
            trips = [_timed(talk, wait_s) for _ in range(_REPEATS)]
            say.found(round_trip_s=statistics.median(trips), here=_plain(this_side()), there=_plain(there))
            words.append(f"a round trip takes {statistics.median(trips) * 1e6:.0f} us")
        with steps.step("versions") as words:
            words.append(_agree(this_side(), there, transport))
        pools.fill(talk.pool, int.from_bytes(time.time_ns().to_bytes(8)) & 0xFFFF_FFFF)
        with steps.step("transport") as words:
            node = stack.enter_context(talk.started(transport, wait_s=wait_s))
            words.append(f"{transport} starts on both sides")
        with steps.step("bootstrap") as words:
            talk.ask(Find(node.bootstrap_address), node, wait_s=wait_s)
            words.append(f"the peer finds this side at {node.bootstrap_address}")
        with steps.step("hello") as words:
            talk.ask(Meet(talk.next_room(), node.bootstrap_address, wait_s), node, wait_s=wait_s + 5)
            words.append(_met(say, node))
        for path in PATHS:
            with steps.step(path) as words:
                words.append(_move(say, talk, node, path, wait_s))
        say.step("close")


def _plain(side: Side) -> object:
    return msgspec.to_builtins(side)


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


def _timed(talk: Caller, wait_s: float) -> float:
    begun = time.perf_counter()
    talk.about(wait_s)
    return time.perf_counter() - begun


def _agree(here: Side, there: Side, transport: str) -> str:
    """A sentence on both releases. Raises `PeerError` if they are incompatible, or lack the transport."""
    if not (talks_with(there.wire, there.oldest_wire) and there.oldest_wire <= here.wire):
        raise PeerError(
            f"pdstage {there.pdstage} there speaks wire version {there.wire} and talks with {there.oldest_wire} and "
            f"later; pdstage {here.pdstage} here speaks {here.wire} and talks with {here.oldest_wire} and later",
            remedy="run releases on both sides whose wire versions talk with each other",
        )
    if transport != "auto":
        for side, where in ((here, "here"), (there, "there")):
            if transport not in side.transports:
                raise PeerError(
                    f"transport {transport!r} is not installed {where}",
                    remedy=f'pip install "pdstage[{transport}]" there, or choose another with --transport',
                )
    releases = f"pdstage {here.pdstage} here, {there.pdstage} there, wire {here.wire} and {there.wire}"
    differ = [
        f"{name} {version} here, {there.transports[name]} there"
        for name, version in here.transports.items()
        if name not in ("local",) and there.transports.get(name, version) != version
    ]
    return "; ".join([releases, *differ])


def _met(say: Say, node: PrefillNode) -> str:
    session = next(iter(node.core.sessions.values()), None)
    if session is None:
        raise PeerError("the session ended as soon as it began", remedy="see the peer's log")
    over = node.transport.traits_of(label(session)).name
    say.found(over=over)
    direct = "pages may be written in place" if session.exposes_pool else "staged only"
    tags = "as messages" if session.tags_as_messages else "with the data"
    return f"over {over}, {direct}, tags travel {tags}"


def _move(say: Say, talk: Caller, node: PrefillNode, path: str, wait_s: float) -> str:
    """Rooms of one token and large ones by one path; the peer checks the first of each size."""
    tokens = pools.tokens(_RUN, _NBYTES)
    nbytes = tokens * pools.N_VIEWS * _RUN
    took: dict[str, list[float]] = {"small": [], "large": []}
    for number in range(_REPEATS + 1):
        for kind, run, n in (("small", _SMALL_RUN, 1), ("large", _RUN, tokens)):
            seconds = talk.room(node, path, run, n, wait_s=wait_s, look=number < 2).seconds
            took[kind] += seconds if number else []  # the first round warms up
    latency_s, large_s = statistics.median(took["small"]), statistics.median(took["large"])
    say.found(**{f"path {path}": {"nbytes": nbytes, "bytes_per_s": nbytes / large_s, "latency_s": latency_s}})
    return f"every byte compared; {nbytes / large_s / 1e9:.2f} GB/s, a small room in {latency_s * 1e6:.0f} us"

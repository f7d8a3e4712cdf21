"""One core with the engine's handles on it, frozen into bytes, thawed, and named by a digest of all that matters.

For `explore`. A core is brought into a *canonical form* first: what cannot change what it does from here on is made
equal. Those are moments (the explorer decides which timer fires, see `Armed`), seq (a link keeps its order), ticket
and buffer numbers (names only), the words of errors, counters and caches. Everything else that can be reached from the
core counts, whatever its name: a field added to a core later is part of the digest without a line here.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType
from typing import TYPE_CHECKING

from pdstage.columns import Shared
from pdstage.errors import Aborted, PdstageError
from pdstage.layout import Layout
from pdstage.layout.topology import Topology
from pdstage.plan.ownership import Common, CommonTokens
from pdstage.protocol import messages as m
from pdstage.protocol.config import Config
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.decode_chunks import ChunkReceiver
from pdstage.protocol.decode_rooms import DecodeRoom, DecodeRooms, Writer
from pdstage.protocol.destinations import Chunk, Destination, PrefillRoom
from pdstage.protocol.handshake import HandshakeClient, HandshakeServer
from pdstage.protocol.leases import LeaseTable, Lender, RequestQueue
from pdstage.protocol.prefill import PrefillCore
from pdstage.protocol.prefill_chunks import ChunkSender, Windows
from pdstage.protocol.prefill_rooms import PrefillRooms
from pdstage.protocol.session import Endpoint, Session
from pdstage.protocol.timers import Timers

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

Core = PrefillCore | DecodeCore
Handle = DecodeRoom | PrefillRoom

_PARTS = (
    PrefillCore, DecodeCore, Endpoint, HandshakeServer, HandshakeClient, LeaseTable, Lender, PrefillRooms,
    DecodeRooms, ChunkSender, ChunkReceiver, Windows,
)  # fmt: skip
"""What a core is made of, itself among them: one of each."""
_CONSTANT = frozenset(
    {
        "config", "counters", "layout", "topology", "_stagings", "_buffer_nbytes", "_choose", "_components", "_dealt",
        "_direct", "effects", "hello", "_ticked_at", "_limit", "_rows", "_said", "_tickets", "welcome", "_row_tokens",
    }
)  # fmt: skip
"""Fields of the parts that never change, or of which nothing follows."""
_SILENT = {
    "Session": {
        "received_at", "used_at", "sent_at", "n_sent", "last_seq", "layout", "topology", "lanes", "silence_s", "shares",
        "common", "aux", "rows", "staged", "stagings", "largest_lane",
    },
    "DecodeRoom": {"shared"},
    "Peer": {"n_hellos"},
    "Lease": {"granted_at"},
    "Chunk": {"waits_since"},
    "_Need": {"numbers"},
    "Lane": {"_gaps", "_largest"},  # computed from the leases when asked for
    "Writer": {"reason"},
    "Destination": {"reason", "asked", "shares", "_exposed", "open"},  # session and epoch name the Open
    "Ended": {"reason"},
}  # fmt: skip
"""Fields without influence, by class."""
GIVEN_UP = Aborted("what was said is left out")
SOON, LATER = 0.3, 1e6
"""When a timer fires, before any other waiting time has passed or after all have; everything else happens at 0."""


class Armed(Timers):
    """Which moments are awaited, without when: the explorer chooses the one that comes."""

    __slots__ = ("chosen",)

    def __init__(self) -> None:
        super().__init__()
        self.chosen: Hashable | None = None

    @property
    def keys(self) -> Iterable[Hashable]:
        return self._at.keys()

    def set(self, key: Hashable, at: float) -> None:
        self._at[key] = [0.0, 0, key]

    def cancel(self, key: Hashable) -> None:
        self._at.pop(key, None)

    def next_at(self) -> float | None:
        return None

    def due(self, now: float) -> Iterator[Hashable]:
        key, self.chosen = self.chosen, None
        if self._at.pop(key, None) is not None:
            yield key


@dataclass(eq=False)
class Node:
    """A process: its core, the handles its engine got, by (room, how many before), and the sessions to be fenced."""

    core: Core
    name: bytes = b""
    handles: dict[tuple[int, int], Handle] = field(default_factory=dict)
    fencing: dict[m.SessionId, Session] = field(default_factory=dict)
    orphans: dict[tuple[object, ...], int] = field(default_factory=dict)
    """Tickets of posts that a disconnect overtook, by the name of their flight: they end all the same."""


def flight_name(core: Core, ticket: int) -> tuple[object, ...]:
    """What is under way, by a name that survives renumbering."""
    flight = core.chunks.flights[ticket]
    if isinstance(flight, tuple):
        destination = flight[0].destination
        return (*destination.session.id, destination.epoch, flight[0].number)
    return (flight.lease.lane, flight.lease.cursor)


def key_name(core: Core, key: Hashable) -> tuple[object, ...]:
    """A timer's name: its kind, the room it is about if any, and whose it is."""
    kind, *about = key  # type: ignore[misc]
    match about:
        case []:
            return (kind, b"")
        case [DecodeRoom() as room]:
            return (kind, room.key, room.epoch)
        case [PrefillRoom() as room]:
            return (kind, room.key)
        case [Writer() as writer]:
            return (kind, writer.room.key, writer.room.epoch, *writer.session.id)
        case [Destination() as destination]:
            return (kind, destination.open.room, *destination.session.id, destination.epoch)
        case [Chunk() as chunk]:
            destination = chunk.destination
            return (kind, destination.open.room, *destination.session.id, destination.epoch, chunk.number)
        case [Session() as session]:
            return (kind, b"", *session.id)
        case [int() as ticket]:
            return (kind, b"", *flight_name(core, ticket))
        case [bytes() as room]:
            return (kind, room)
        case [peer]:
            return (kind, b"", peer.route, peer.nonce)
    raise AssertionError(key)


def canonical(node: Node) -> None:
    """Brings the core into its canonical form. It behaves as before."""
    core = node.core
    for session in core.sessions.values():
        session.last_seq = session.n_sent = 0
        session.received_at = session.sent_at = 0.0
    for handle in node.handles.values():
        if handle.error is not None:
            handle.error = GIVEN_UP
    names = sorted((flight_name(core, ticket), ticket) for ticket in core.chunks.flights)
    for destination in getattr(core.rooms, "destinations", {}).values():
        for chunk in destination.chunks.values():
            chunk.waits_since = 0.0
    fresh = {ticket: n for n, (_, ticket) in enumerate(names)}
    core.endpoint._tickets = 1000
    core.chunks.flights = {fresh[ticket]: core.chunks.flights[ticket] for _, ticket in names}
    if isinstance(core, PrefillCore):
        core.endpoint.timers._at = {
            (("write", fresh[key[1]]) if key[0] == "write" else key): at  # type: ignore[index]
            for key, at in core.endpoint.timers._at.items()
        }
        _canonical_buffers(core)
        node.orphans = {name: ticket for name, ticket in node.orphans.items() if ticket in core.chunks.orphans}
        names = sorted(node.orphans)
        core.chunks.orphans = {n: core.chunks.orphans[node.orphans[name]] for n, name in enumerate(names, 500)}
        node.orphans = {name: n for n, name in enumerate(names, 500)}
    else:
        _canonical_leases(core)


def _canonical_buffers(core: PrefillCore) -> None:
    n_buffers = len(core.chunks.buffers.free) + sum(buffer >= 0 for _, buffer in core.chunks.flights.values())
    numbers = iter(range(n_buffers))
    core.chunks.flights = {t: (chunk, next(numbers) if b >= 0 else b) for t, (chunk, b) in core.chunks.flights.items()}
    core.chunks.buffers.free = list(numbers)


def _canonical_leases(core: DecodeCore) -> None:
    held = core.leases
    held._moved_at = [0.0 for _ in held.lanes]
    if held.contended_at is not None:
        held.contended_at = 0.0
    for lease in held._at.values():
        lease.granted_at = 0.0
    _renumber(held)


def _renumber(held: LeaseTable) -> None:
    """Who waits stays in its order, numbered from 1."""
    waiting = sorted(held.queue.entries(), key=lambda entry: entry[1])
    held.queue = RequestQueue()
    for _, _, request in waiting:
        held.queue.add(request)


# Frozen and thawed. What never changes is kept, and named by its number.

_KEPT = (
    Common, CommonTokens, Config, FunctionType, Layout, PdstageError, Shared, Topology, m.Open, memoryview,
)  # fmt: skip
_things: list[object] = []
_numbers: dict[int, int] = {}


def _thing(number: int) -> object:
    return _things[number]


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: object) -> object:
        if not isinstance(thing, _KEPT) or thing is _thing:
            return NotImplemented
        if id(thing) not in _numbers:
            _numbers[id(thing)] = len(_things)
            _things.append(thing)
        return _thing, (_numbers[id(thing)],)


def freeze(node: Node) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, 5).dump(node)
    return buffer.getvalue()


def thaw(frozen: bytes) -> Node:
    node: Node = pickle.loads(frozen)
    return node


# Named.


def digest(node: Node) -> bytes:
    """The name of a node in canonical form: equal for two that will do the same.

    It is made of all that can be reached, in a fixed order; an object met again is a number.
    """
    out: list[str] = []
    met: dict[int, int] = {}

    def walk(x: object) -> None:
        silent = _SILENT.get(type(x).__name__, set())
        match x:
            case None | int() | float() | str() | bytes() | Enum():
                out.append(repr(x))
            case PdstageError():
                out.append("failed")
            case memoryview():
                out.append(repr(bytes(x)))
            case set() | frozenset():
                out.append(repr(sorted(x)))
            case tuple() if silent:
                walk([getattr(x, name) for name in x._fields if name not in silent])  # type: ignore[attr-defined]
            case list() | tuple() | deque():
                out.append(str(len(x)))
                for one in x:
                    walk(one)
            case dict():
                out.append(str(len(x)))
                for pair in x.items():
                    walk(pair)
            case Armed():
                walk(sorted(key_name(node.core, key) for key in x.keys))
            case _ if id(x) in met:
                out.append(f"#{met[id(x)]}")
            case _:
                met[id(x)] = len(met)
                out.append(type(x).__name__)
                for name in sorted(_fields(x) - silent):
                    walk(getattr(x, name, None))

    walk(node)
    return hashlib.blake2b("|".join(out).encode(), digest_size=16).digest()


def _fields(x: object) -> set[str]:
    fields = {name for base in type(x).__mro__ for name in getattr(base, "__slots__", ())} | getattr(
        x, "__dict__", {}
    ).keys()
    return fields - _CONSTANT if isinstance(x, _PARTS) else fields

"""One core with the engine's handles on it, frozen into bytes, thawed, and named by a digest of all that matters.

For `explore`. A core is brought into a *canonical form* first: what cannot change what it does from here on is made
equal. Those are moments (the explorer decides which timer fires, see `Armed`), seq (a link keeps its order), ticket
and buffer numbers (names only), the words of errors, counters and caches. Everything else that can be reached from the
core counts, whatever its name: a field added to a core later is part of the digest without a line here.
"""

from __future__ import annotations

import hashlib
import io
import marshal
import pickle
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from pdstage.columns import Shared
from pdstage.errors import Aborted, DeadlineExceeded, PeerError, TransportError, UsageError
from pdstage.layout import Layout
from pdstage.layout.topology import Topology
from pdstage.plan import Rect, Share
from pdstage.plan.ownership import Common, CommonTokens
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.decode_chunks import ChunkReceiver
from pdstage.protocol.decode_rooms import DecodeRoom, DecodeRooms, Writer
from pdstage.protocol.destinations import Chunk, Destination, PrefillRoom
from pdstage.protocol.handshake import Farewells, HandshakeClient, HandshakeServer
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
    PrefillCore, DecodeCore, Endpoint, HandshakeServer, HandshakeClient, Farewells, LeaseTable, Lender, PrefillRooms,
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
_ERRORS = (Aborted, DeadlineExceeded, PeerError, TransportError, UsageError)
_ATOMS = frozenset({int, str, bytes, bool, float, type(None)})
_FLAT = frozenset({m.SessionId, m.Advance, m.Asked, m.Written, m.LaneSpan, Rect, Share})
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
    for key, heap in core.chunks.windows.closed.items():
        core.chunks.windows.closed[key] = [
            (end, n, chunk) for n, (end, _, chunk) in enumerate(sorted(heap, key=lambda e: e[:2]))
        ]


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


class _Shared:
    """Immutable things that frozen nodes refer to by number."""

    def __init__(self) -> None:
        self.things: list[object] = [GIVEN_UP]
        self._numbers: dict[int, int] = {}
        self._equal: dict[object, int] = {}

    def number(self, thing: object) -> int:
        number = self._numbers.get(id(thing))
        if number is None:
            same = wire.encode(m.SessionId(0, 0), 0, thing) if isinstance(thing, m.Open) else thing
            number = self._equal.setdefault(same, len(self.things))
            self.things.append(thing)  # kept, so that its id stays its own
            if number < len(self.things) - 1:
                self._numbers[id(thing)] = number
                return number
            self._numbers[id(thing)] = number
        return number


_shared = _Shared()


def _thing(number: int) -> object:
    return _shared.things[number]


_SHARED = (Common, Layout, CommonTokens, Shared, Topology, m.Open)
_dispatch = {kind: lambda thing: (_thing, (_shared.number(thing),)) for kind in _SHARED}
_dispatch[memoryview] = lambda view: (memoryview, (bytes(view),))
_dispatch |= {kind: lambda _: (_thing, (0,)) for kind in _ERRORS}


def _empty(kind: type) -> object:
    return object.__new__(kind)


def _part(part: object) -> tuple[object, ...]:
    return _empty, (type(part),), {name: value for name, value in vars(part).items() if name not in _CONSTANT}


_dispatch |= dict.fromkeys(_PARTS, _part)


def freeze(node: Node) -> bytes:
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 5)
    pickler.dispatch_table = _dispatch  # type: ignore[assignment]
    pickler.dump((node.core, node.handles, node.fencing, node.orphans))
    return buffer.getvalue()


def thaw(frozen: bytes, template: Core) -> Node:
    """`template` is any core of the same process life: what never changes is its."""
    core, handles, fencing, orphans = pickle.loads(frozen)
    constants = {type(part): part for part in _parts(template)}
    for part in _parts(core):
        told = vars(constants[type(part)])
        vars(part).update((name, told[name]) for name in told.keys() & _CONSTANT)
    core.endpoint.effects, core.endpoint._tickets = [], 1000
    return Node(core, b"", handles, fencing, orphans)


def _parts(core: Core) -> list[object]:
    found: list[object] = [core]
    for part in found:
        found += [one for one in vars(part).values() if isinstance(one, _PARTS) and one not in found]
    return found


class _Digest:
    """All that can be reached, flat and in a fixed order; an object met again is a number."""

    _fields: ClassVar[dict[type, tuple[str, ...]]] = {}

    def __init__(self, core: Core) -> None:
        self.core = core
        self.out: list[object] = []
        self.met: dict[int, int] = {}

    def walk(self, x: object) -> None:
        kind = type(x)
        if kind in _ATOMS:
            self.out.append(x)
        elif kind in _FLAT:
            self.out.extend(one if type(one) is not tuple else repr(one) for one in x)  # type: ignore[attr-defined]
        elif kind in (list, tuple, deque):
            self.out.append(len(x))  # type: ignore[arg-type]
            for one in x:  # type: ignore[attr-defined]
                self.walk(one)
        elif kind in (dict, OrderedDict):
            self.out.append(len(x))  # type: ignore[arg-type]
            for key, value in x.items():  # type: ignore[attr-defined]
                self.walk(key)
                self.walk(value)
        elif kind in (set, frozenset):
            self.out.append(repr(sorted(x)))  # type: ignore[call-overload]
        elif isinstance(x, Enum):
            self.out.append(x.name)
        elif kind is memoryview:
            self.out.append(bytes(x))  # type: ignore[arg-type]
        else:
            self.object(x)

    def object(self, x: object) -> None:
        if isinstance(x, Armed):
            self.out.append(repr(sorted(key_name(self.core, key) for key in x.keys)))
            return
        number = self.met.get(id(x))
        if number is not None:
            self.out.append(f"#{number}")
            return
        self.met[id(x)] = len(self.met)
        if x is GIVEN_UP:
            return
        kind = type(x)
        self.out.append(kind.__name__)
        if hasattr(x, "__dict__"):
            silent = _CONSTANT if kind in _PARTS else _SILENT.get(kind.__name__, set())
            for name in sorted(vars(x).keys() - silent):
                self.walk(vars(x)[name])
            return
        for name in self._fields.get(kind) or self.fields(kind):
            self.walk(getattr(x, name, None))

    def fields(self, kind: type) -> tuple[str, ...]:
        slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ()) or ()]
        slots += list(getattr(kind, "__struct_fields__", ())) or list(getattr(kind, "_fields", ()))
        names = tuple(name for name in slots if name not in _SILENT.get(kind.__name__, ()))
        assert names, f"{kind} has no slots to look at"
        self._fields[kind] = names
        return names


def digest(node: Node) -> bytes:
    """The name of a node in canonical form: equal for two that will do the same."""
    walk = _Digest(node.core)
    walk.walk(node.handles)
    walk.walk(node.fencing)
    walk.walk(node.orphans)
    walk.walk(node.core)
    return hashlib.blake2b(marshal.dumps(walk.out, 2), digest_size=16).digest()

"""What the rest of the world needs to know of one state of one core, and what must hold in it.

For `explore`. Here are I3, I8, I13, I15 and I16, and I2 for decode's own scatters.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

from pdstage.protocol import messages as m
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.decode_rooms import DecodeRoom
from pdstage.protocol.destinations import PrefillRoom
from pdstage.protocol.prefill import PrefillCore
from pdstage.protocol.state import ChunkPhase, WriterPhase
from tests.pair import assert_flat
from tests.sim.frozen import Core, Node, flight_name, key_name

Name = tuple[object, ...]
N_BUFFERS = 2


class Violation(AssertionError):
    """An invariant does not hold; `path` is the shortest way there, in words."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.path: list[str] = []

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"  {n}. {step}" for n, step in enumerate(self.path, 1))])


def must(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Who is there and what they do: rooms `numbers`, each of `chunks` chunks a writer."""

    writers: int = 1
    instances: bool = True
    """Each writer sends rooms of its own (room r is writer r % writers'); else every room has all of them, by TP."""
    rooms: int = 1
    chunks: int = 2
    tokens: int = 4
    """Tokens of a chunk; 16 and fewer make leases of 256 bytes, 32 of 512."""
    late: int = 0
    """The last so many chunks of a room are computed at any moment after they were announced."""
    lane_nbytes: int = 512
    n_lanes: int = 1
    path: str = "staged"
    """"staged"; "direct"; or "auto": staged, and direct where that comes to nothing."""
    notifies: bool = True
    """Tags come with the data; else their writers say them."""
    rows: bool = False
    """Aux is a row that is written in place; else bytes."""
    advance: bool = False
    """Decode lends memory with Open."""

    @property
    def numbers(self) -> range:
        return range(1, 1 + self.rooms)

    def writers_of(self, room: int) -> list[int]:
        return [room % self.writers] if self.instances else list(range(self.writers))


class Facts(NamedTuple):
    """What the rest of the world needs to know of one state of one core."""

    sessions: frozenset[m.SessionId]
    timers: tuple[Name, ...]
    rooms: tuple[tuple[tuple[int, int], int], ...]
    """(room, how many before) and status of each handle."""
    flights: tuple[Name, ...]
    """Gathers or scatters under way."""
    late: tuple[tuple[tuple[int, int], int], ...] = ()
    released: frozenset[tuple[int, int]] = frozenset()
    marks: tuple[tuple[Name, int], ...] = ()
    leases: dict[tuple[int, int], tuple[m.SessionId, str]] = {}  # noqa: RUF012
    writable: frozenset[tuple[m.SessionId, int, int]] = frozenset()
    """What a write may be under way into: (session, lane, cursor), or (session, DIRECT or AUX, epoch)."""
    landed: dict[Name, tuple[tuple[int, int], m.SessionId, int, int]] = {}  # noqa: RUF012
    """Of each scatter under way: the room, whose chunk, and its tokens."""
    epochs: dict[int, tuple[int, int]] = {}  # noqa: RUF012
    flat: str = ""
    """What is left of any room; empty if nothing."""


def decode_facts(node: Node) -> Facts:
    core = node.core
    assert isinstance(core, DecodeCore)
    held, leases, writable = core.leases, {}, set()
    for number, lane in enumerate(held.lanes):
        live = list(lane.leases())
        mine = {(g.cursor, g.phase) for (at, _), g in held._at.items() if at == number}
        must(mine == {(cursor, state) for cursor, _, state in live}, f"I15: ledger {mine} is not the ring's {live}")
        end = 0
        for cursor, nbytes, state in live:
            must(cursor >= end and cursor % 256 == 0, f"I3: leases overlap: {live}")
            must(cursor % lane.capacity + nbytes <= lane.capacity, f"I3: the lease at {cursor} leaves its lane")
            end = cursor + nbytes
            session_id = held._at[number, cursor].request.session.id
            leases[number, cursor] = (session_id, state)
            under = any(
                other < cursor and _share_bytes(other, theirs, cursor, nbytes, lane.capacity)
                for other, theirs, _ in live
            )
            if state != "landed" and not under:
                writable.add((session_id, number, cursor))
        idle = lane.head == lane.watermark and lane.largest() == lane.capacity
        must(bool(live) or idle, f"I13: an idle lane has head {lane.head}, watermark {lane.watermark}")
    for room in core.rooms.by_epoch.values():
        for writer in room.writers.values():
            if writer.direct and writer.phase is not WriterPhase.QUIET:
                writable.add((writer.session.id, m.DIRECT, room.epoch))
            if writer.has_aux and room.row is not None and writer.phase is not WriterPhase.QUIET:
                writable.add((writer.session.id, m.AUX, room.epoch))
    for landing in core.chunks.flights.values():
        must(not landing.writer.room.released, "I2: a scatter runs into released pages")
        must(held._at.get((landing.lease.lane, landing.lease.cursor)) is landing.lease, "I2: it reads a freed lease")
    epochs = {room.epoch: name for name, room in node.handles.items() if isinstance(room, DecodeRoom)}
    return Facts(
        sessions=frozenset(core.sessions),
        timers=_timers(core),
        rooms=_rooms(node),
        flights=tuple(flight_name(core, ticket) for ticket in core.chunks.flights),
        marks=tuple((("lane", n), lane.watermark) for n, lane in enumerate(held.lanes)),
        leases=leases,
        writable=frozenset(writable),
        landed={
            flight_name(core, ticket): (
                epochs[landing.writer.room.epoch],
                landing.writer.session.id,
                landing.rects[0].start,
                landing.rects[0].stop,
            )
            for ticket, landing in core.chunks.flights.items()
        },
        epochs=epochs,
        flat=_left(node),
    )


def _share_bytes(a: int, a_nbytes: int, b: int, b_nbytes: int, capacity: int) -> bool:
    a, b = a % capacity, b % capacity
    return a < b + b_nbytes and b < a + a_nbytes


def prefill_facts(node: Node) -> Facts:
    core = node.core
    assert isinstance(core, PrefillCore)
    for chunk, _ in core.chunks.flights.values():
        room = chunk.destination.room
        must(room is None or not room.released, "I8: source memory given back with a gather or write under way")
    for destination in core.rooms.destinations.values():
        for chunk in destination.chunks.values():
            must(chunk.source.ready or chunk.attempt <= 1, "I16: recalled twice before its data exists")
    buffers = [buffer for _, buffer in core.chunks.flights.values() if buffer >= 0] + core.chunks.buffers.free
    must(sorted(buffers) == list(range(N_BUFFERS)), f"send buffers {buffers}")
    rooms = {name: room for name, room in node.handles.items() if isinstance(room, PrefillRoom)}
    return Facts(
        sessions=frozenset(core.sessions),
        timers=_timers(core),
        rooms=_rooms(node),
        flights=tuple(
            flight_name(core, ticket)
            for ticket, (chunk, _) in core.chunks.flights.items()
            if chunk.phase is not ChunkPhase.WRITING
        ),
        late=tuple(
            (name, n) for name, room in rooms.items() for n, source in enumerate(room.sources) if not source.ready
        ),
        released=frozenset(name for name, room in rooms.items() if room.released),
        marks=tuple(((*session.id, lane), mark) for (session, lane), mark in core.chunks.windows.marks.items()),
        flat=_left(node),
    )


def _timers(core: Core) -> tuple[Name, ...]:
    return tuple(sorted(key_name(core, key) for key in core.endpoint.timers.keys))


def _rooms(node: Node) -> tuple[tuple[tuple[int, int], int], ...]:
    return tuple((name, room.status) for name, room in node.handles.items())


def _left(node: Node) -> str:
    """What is left of any room (I13, I14), or why a room is not over; empty if nothing is."""
    try:
        assert_flat(SimpleNamespace(nodes=lambda: [node], n_buffers=N_BUFFERS))  # type: ignore[arg-type]
    except AssertionError as error:
        return f"left over: {error}"
    open_rooms = [name for name, room in node.handles.items() if not room.ended or not room.released]
    return f"rooms {open_rooms} have not ended or are not released" if open_rooms else ""

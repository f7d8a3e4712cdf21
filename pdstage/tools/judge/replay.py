"""Replays one node's lines in order: each move against its state table, and the invariants within one node.

If a journal lost its beginning, what it does not say is not judged: an object first seen in the middle of its life is
taken as it is, and a room without its beginning needs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdstage.protocol import state as states
from pdstage.protocol.lane import ALIGNMENT
from pdstage.protocol.state import ChunkPhase, LeasePhase, State, WriterPhase
from pdstage.tools.judge.arrivals import Arrivals
from pdstage.tools.judge.lane import Lane, Span

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.manager.journal import Line
    from pdstage.tools.judge.read import Node, Place

TABLES: dict[str, dict[tuple[str, str], str]] = {
    machine.name: {
        (before.name, event.name): after.name
        for before, row in machine.rows.items()
        for event, after in row.items()
        if after is not None
    }
    for machine in (states.ROOM, states.DESTINATION, states.CHUNK, states.WRITER, states.LEASE)
}
"""For each machine, the state that follows an event in a state."""
BEGINS = {
    "room": "BOOTSTRAPPING", "destination": "WAITING", "chunk": "RESERVING", "writer": "UNOPENED", "lease": "GRANTED",
}  # fmt: skip
FLYING = {ChunkPhase.GATHERING.name, ChunkPhase.WRITING.name}
"""A gather counts as a write: it may write directly into its lease."""
ENDED = {State.SUCCESS.name, State.FAILED.name}
LANDED, RELEASED = LeasePhase.LANDED.name, LeasePhase.RELEASED.name
QUIET = WriterPhase.QUIET.name

Key = tuple[object, ...]
Claim = tuple[str, int]
"""Session and epoch."""


@dataclass(slots=True)
class RoomSeen:
    """A room of the node. `begun`: the journal has its beginning."""

    name: str
    begun: bool
    state: str
    released: bool = False
    claims: set[Claim] = field(default_factory=set)


@dataclass(slots=True)
class Flight:
    """A chunk's gather or write at prefill, from the line of its start to that of its end."""

    began: Line
    place: Place
    ended: Line | None = None

    @property
    def where(self) -> tuple[int, int] | None:
        """Lane and cursor; None without staging memory."""
        return None if self.began.direct else (self.began.lane, self.began.cursor)


class Replay:
    """One node's journal; `run` adds violations to `wrong`. Afterwards `across` uses `flights`.

    `nbytes` arrived at decode: scattered, or written in place.
    """

    def __init__(self, node: Node, wrong: Callable[[Place, str, str], None]) -> None:
        self.node = node
        self.rooms: dict[int, RoomSeen] = {}
        self.flights: dict[Claim, list[Flight]] = {}
        self.leases = self.moves = self.nbytes = 0
        self._wrong = wrong
        self._at: Place = None  # type: ignore[assignment]
        self._states: dict[Key, str] = {}
        self._writers: dict[Claim, Arrivals] = {}
        self._writer_of: dict[Claim, tuple[int, bool]] = {}
        """The room of each writer, and whether the room's aux comes from it."""
        self._room_of: dict[int, int] = {}
        self._heard: set[tuple[str, int, int]] = set()
        self._landing: dict[tuple[int, int], Line] = {}
        """Leases that landed and wait for their scatter."""
        self._lanes: dict[int, Lane] = {}
        self._flying: dict[tuple[str, int, int], Flight] = {}
        """By session, epoch and chunk."""
        self._used: dict[tuple[str, int, int], tuple[int, int]] = {}
        """Which chunk started to write a lease."""
        self._over: set[str] = set()
        """Sessions for which this node reported that nothing is in flight."""

    def run(self) -> Replay:
        on = {
            "room": self._room, "chunk": self._chunk, "writer": self._writer, "lease": self._lease, "tag": self._tag,
            "said": self._said, "closed": self._closed,
        }  # fmt: skip
        before = self.node.first - 1
        for place, line in self.node.lines:
            self._at = place
            if line.n != before + 1:
                self._say("order", f"line {line.n} follows line {before}")
            before = line.n
            if line.what in TABLES:
                self._move(line)
            if line.what in on:
                on[line.what](line)
        return self

    def _say(self, rule: str, what: str) -> None:
        self._wrong(self._at, rule, f"{self.node.name}: {what}")

    # The tables.

    def _move(self, line: Line) -> None:
        if line.event in ("OPENED", "RELEASED"):  # of a room; they are in no table
            return
        self.moves += 1
        key = _key(line)
        begins = "HELD" if line.row and line.what == "chunk" else BEGINS[line.what]
        known = self._states.get(key, begins if self.node.whole else line.before)
        if line.before != known:
            self._say("table", f"{_named(line)} is {line.before} where it was {known}")
        if not line.after or TABLES[line.what].get((line.before, line.event)) != line.after:
            became = f"to {line.after}" if line.after else "stays"
            self._say("table", f"{_named(line)}: {line.event} in {line.before} {became}, which no table has")
        if line.what == "room" and line.before in ENDED and line.after != line.before:
            self._say("I1", f"{_named(line)} ended as {line.before} and is {line.after or '?'} now")
        if line.what == "lease" and line.after == RELEASED:
            self._states.pop(key, None)  # its cursor never returns: `_lease` checks that
        else:
            self._states[key] = line.after or line.before

    # Rooms.

    def _room(self, line: Line) -> None:
        if line.event == "OPENED":
            self.rooms[line.room] = RoomSeen(line.name, True, line.after)
            return
        seen = self.rooms.setdefault(line.room, RoomSeen(line.name, False, line.before))
        if line.event == "RELEASED":
            self._released(line, seen)
            return
        seen.state = line.after or line.before
        if line.after == State.SUCCESS.name and self.node.head.role == "decode" and seen.begun:
            self._delivered(line, seen)

    def _delivered(self, line: Line, seen: RoomSeen) -> None:
        if not seen.claims:
            self._say("I5", f"{_named(line)} succeeded and was never opened")
        for claim in seen.claims:
            missing = self._writers[claim].missing()
            if missing:
                self._say("I5", f"{_named(line)} succeeded without {missing}, of session {claim[0]}")
            if self._writer_of[claim][1] and self._states[("writer", *claim)] != QUIET:
                self._say("I5", f"{_named(line)} succeeded before its aux came, of session {claim[0]}")

    def _released(self, line: Line, seen: RoomSeen) -> None:
        if seen.state not in ENDED:
            self._say("I2", f"{_named(line)} is released in {seen.state}")
        for claim in seen.claims:
            if (state := self._states[("writer", *claim)]) != QUIET:
                self._say("I2", f"{_named(line)} is released while its writer of session {claim[0]} is {state}")
        if self.node.head.role == "decode":
            for lease in self._landing.values():
                if self._room_of.get(lease.epoch) == line.room:
                    self._say("I2", f"{_named(line)} is released before {_named(lease)} is scattered")
        for flight in self._flying.values():
            if flight.began.room == line.room:
                self._say("I8", f"{_named(line)} is released while {_named(flight.began)} reads its memory")
        seen.released = True

    # Prefill.

    def _chunk(self, line: Line) -> None:
        flying, flew = line.after in FLYING, line.before in FLYING
        chunk = (line.session, line.epoch, line.chunk)
        if flying and not flew:
            self._begins(line)
            flight = self._flying[chunk] = Flight(line, self._at)
            self.flights.setdefault((line.session, line.epoch), []).append(flight)
        elif flew and not flying and line.after and chunk in self._flying:
            self._flying.pop(chunk).ended = line

    def _begins(self, line: Line) -> None:
        if line.session in self._over:
            self._say("I2", f"{_named(line)} begins after this node said that the session is quiet")
        if line.room in self.rooms and self.rooms[line.room].released:
            self._say("I8", f"{_named(line)} reads memory of room {self.rooms[line.room].name!r}, which is released")
        if not line.direct:
            chunk = (line.epoch, line.chunk)
            other = self._used.setdefault((line.session, line.lane, line.cursor), chunk)
            if other != chunk:
                self._say("I15", f"{_named(line)} writes lease {line.lane}:{line.cursor}, which chunk {other[1]} had")

    def _said(self, line: Line) -> None:
        if self.node.head.role != "prefill" or not line.proved or line.event in ("CloseFailed", "Abort"):
            return
        all_of_it = line.event in ("Bye", "NoSession")
        if all_of_it:
            self._over.add(line.session)
        for began in (flight.began for flight in self._flying.values()):
            if began.session == line.session and (all_of_it or began.epoch == line.epoch):
                self._say("I2", f"it says {line.event} while {_named(began)} is in flight")

    # Decode.

    def _writer(self, line: Line) -> None:
        claim = (line.session, line.epoch)
        self._room_of[line.epoch] = line.room
        self._writer_of[claim] = (line.room, line.row)
        arrivals = self._writers.setdefault(claim, Arrivals())
        arrivals.needs = line.needs or arrivals.needs
        arrivals.counts |= line.counts
        if line.room in self.rooms:
            self.rooms[line.room].claims.add(claim)

    def _tag(self, line: Line) -> None:
        if (chunk := (line.session, line.epoch, line.chunk)) in self._heard:
            self._say("I7", f"the tag of {_named(line)} counts twice")
        self._heard.add(chunk)
        self._came(line)

    def _came(self, line: Line) -> None:
        self.nbytes += line.nbytes
        self._writers.setdefault((line.session, line.epoch), Arrivals()).add(line.pieces)

    def _lease(self, line: Line) -> None:
        """Leases of a lane are granted in cursor order. One is written only after the earlier leases on its bytes are
        released (I3).
        """
        if not 0 <= line.lane < len(self.node.head.lanes):
            self._say("I3", f"{_named(line)} lies in no lane")
            return
        lane = self._lanes.setdefault(line.lane, Lane(self.node.head.lanes[line.lane]))
        lease = Span(line.cursor, line.cursor + -(-line.nbytes // ALIGNMENT) * ALIGNMENT)
        if lease.start not in lane.live:
            self.leases += 1
            if lease.start in lane.landed:
                self._say("I15", f"{_named(line)} lives again")
            if lease.start % lane.capacity + line.nbytes > lane.capacity:
                self._say("I3", f"{_named(line)} lies outside its lane of {lane.capacity} bytes")
            for later in lane.after(lease):
                self._say("I3", f"{_named(line)} was not released when lease {line.lane}:{later} was written over it")
            lane.live[lease.start] = lease
        if line.after == LANDED:
            self._landing[line.lane, line.cursor] = line
            for other in lane.before(lease):
                self._say("I3", f"{_named(line)} was written over lease {line.lane}:{other}, which is not released")
            lane.land(lease)
        elif line.after == RELEASED:
            del lane.live[lease.start]
            if (landed := self._landing.pop((line.lane, line.cursor), None)) is not None:
                self._came(landed)

    # The end.

    def _closed(self, line: Line) -> None:
        for number, seen in self.rooms.items():
            name = f"room {seen.name!r} (number {number})"
            if seen.state not in ENDED:
                self._say("I10", f"{name} is {seen.state} though the node has closed")
            elif line.proved and not seen.released:
                self._say("I10", f"{name} is not released though nothing touches this node's memory any more")


def _key(line: Line) -> Key:
    if line.what == "room":
        return ("room", line.room)
    if line.what == "lease":
        return ("lease", line.lane, line.cursor)
    claim = (line.what, line.session, line.epoch)
    return (*claim, line.chunk) if line.what == "chunk" else claim


def _named(line: Line) -> str:
    if line.what == "room":
        return f"room {line.name!r} (number {line.room})"
    if line.what == "lease":
        return f"lease {line.lane}:{line.cursor} of chunk {line.chunk} (epoch {line.epoch} of session {line.session})"
    chunk = f"chunk {line.chunk}, " if line.what in ("chunk", "tag") else ""
    return f"{line.what} ({chunk}epoch {line.epoch} of session {line.session}, room number {line.room})"

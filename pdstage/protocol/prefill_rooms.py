"""The rooms of a prefill rank and each destination's claim on them: attached, closed, failed, drained.

A room serves all of its destinations and fails with the first that fails. Nothing of a destination begins after Abort,
and Drained is said only when nothing is in flight (I2, I8).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from pdstage.errors import DeadlineExceeded, PeerError, UsageError
from pdstage.protocol import messages as m
from pdstage.protocol.compat import Slots, lacking
from pdstage.protocol.destinations import Chunk, Destination, GivenRow, PrefillRoom, SubmittedChunk
from pdstage.protocol.room import room_id
from pdstage.protocol.session import Changed
from pdstage.protocol.state import DESTINATION, ChunkPhase, DestinationEvent, DestinationPhase, RoomEvent

if TYPE_CHECKING:
    from pdstage.errors import PdstageError
    from pdstage.protocol.prefill_chunks import ChunkSender
    from pdstage.protocol.room import OwnRows
    from pdstage.protocol.session import Endpoint, Session

_MAX_ENDED = 4096
MAX_PARKED_NBYTES = 64 << 20
"""Of Opens of one session for rooms that are not submitted yet: any peer may name any room."""
_OPEN_NBYTES = 4096
"""What an Open takes here beside its items."""


class Ended(NamedTuple):
    """A room that failed: each destination that opens it late is refused once."""

    reason: str
    known: dict[int, tuple[m.SessionId, int]]
    """The (session, epoch) of each rank that was served or refused, or that gave it up. Another epoch means a new room
    of that name.
    """
    begun: bool = True
    """False if a destination gave it up before it was submitted: to submit it before `until` then fails at once."""
    until: float = math.inf

    def refuses(self, rank: int, session_id: m.SessionId, epoch: int) -> bool:
        return self.known.setdefault(rank, (session_id, epoch)) == (session_id, epoch)


class PrefillRooms:
    """The room table: rooms in `by_key` until they end, destinations until they are closed or drained, or their session
    is lost with nothing in flight.
    """

    def __init__(self, endpoint: Endpoint, chunks: ChunkSender, welcome: m.Welcome, rows: OwnRows) -> None:
        self.endpoint = endpoint
        self.chunks = chunks
        chunks.rooms = self
        self.by_key: dict[bytes, PrefillRoom] = {}
        self.destinations: dict[tuple[m.SessionId, int], Destination] = {}
        self.pending: dict[bytes, dict[Destination, None]] = {}
        """Destinations that wait for their room, by its key."""
        self.ended: OrderedDict[bytes, Ended] = OrderedDict()
        self.slots = Slots(welcome.layout)
        self.layout = welcome.layout
        self._rows = rows
        self._fitting: set[frozenset[m.SessionId]] = set()

    def attach(self, room: PrefillRoom, destination: Destination) -> None:
        destination.room = room
        DESTINATION.move(destination, DestinationEvent.ATTACHED)
        older = room.destinations.get(destination.open.rank)
        room.destinations[destination.open.rank] = destination
        room.n_destinations = destination.open.destinations
        if older is not None:
            self.drain(older)
        room.deadline_s = min(destination.open.deadline_s, self.endpoint.config.max_deadline_s)
        self.endpoint.after(room.deadline_s, self.late, room)
        if len(room.destinations) >= room.n_destinations:
            self.endpoint.cancel(self.unopened, room)
            problem = self._unwanted(room)
            if problem:
                self.fail(room, PeerError(problem, remedy="serve the same model with the same caches"))
                return
            if room.on(RoomEvent.CONNECTED):
                self.endpoint.effects.append(Changed(room))
        for source in room.sources:
            self.chunks.add(destination, source)
        if room.finished:
            self.add_row(destination)
        self.maybe_close(destination)

    def _unwanted(self, room: PrefillRoom) -> str:
        """Which part of this rank's state no destination takes, in words; asked where decode has pipeline stages."""
        sessions = [destination.session for destination in room.destinations.values()]
        if max([session.topology.pp_size for session in sessions]) == 1:
            return ""
        ids = frozenset(session.id for session in sessions)
        if ids in self._fitting:
            return ""
        offered, taken, _ = zip(*(session.staged for session in sessions), strict=True)
        problem = lacking("decode", offered, taken)
        if not problem:
            if len(self._fitting) >= _MAX_ENDED:
                self._fitting.clear()
            self._fitting.add(ids)
        return problem

    def maybe_close(self, destination: Destination) -> None:
        room = destination.room
        needs_nothing = not destination.shares and not destination.open.aux
        if destination.phase is not DestinationPhase.LIVE or room is None or destination.unwritten:
            return
        if not room.finished and not needs_nothing:
            return
        for given in self._given(destination) if self.slots.names else ():
            problem = self.slots.compare(
                self.endpoint, destination.session, *given, destination.asked[given.component][1]
            )
            if problem:
                self.fail(room, UsageError(problem, remedy="give as many as decode does", room=room.id))
                return
        self._set_aux(destination, room)
        DESTINATION.move(destination, DestinationEvent.WRITTEN)
        self._close(destination)
        self.maybe_complete(room)

    def _given(self, destination: Destination) -> tuple[m.Given, ...]:
        """How many slots there are of each component without positions that `destination` asks of this rank.

        Nothing is said of one that the engine never named although slots were asked for: it was forgotten.
        """
        if not self.slots.names:
            return ()
        named = destination.room.slots if destination.room is not None else {}
        owed = {share.component for share in destination.shares if share.component in self.slots.names}
        asked = sorted((name, stop) for name, (_, stop) in destination.asked.items() if name in owed)
        return tuple(m.Given(name, named.get(name, 0)) for name, stop in asked if name in named or not stop)

    def maybe_complete(self, room: PrefillRoom) -> None:
        if room.complete and room.on(RoomEvent.COMPLETED):
            self.endpoint.counters.rooms_succeeded += 1
            self._end(room)

    def _close(self, destination: Destination) -> None:
        written = tuple(destination.written)
        close = m.CloseOk(destination.epoch, written, destination.aux, self._given(destination), destination.packed)
        self.endpoint.send(destination.session, close)
        self.endpoint.repeat(self.close_again, destination)

    def close_again(self, destination: Destination) -> None:
        """Its end is unanswered. A tag that was sent as a message may be lost too, so tags are sent again."""
        if destination.phase is DestinationPhase.FAILING:
            self.close_failed(destination)
        if destination.phase is not DestinationPhase.CLOSING:
            return
        for chunk in destination.chunks.values():
            self.chunks.tell_tag(chunk)
        self._close(destination)

    # The aux row.

    def add_row(self, destination: Destination) -> None:
        """Puts the room's aux row on its way into the row that `destination` named, where that is within reach."""
        room, session = destination.room, destination.session
        if destination.phase is not DestinationPhase.LIVE or room is None:
            return
        if not isinstance(room.aux, GivenRow) or not destination.open.aux or not session.aux.spans:
            return
        why = self._no_row(destination)
        if why:
            self.row_failed(destination, why)
            return
        nbytes = sum(span.nbytes for span in session.aux.spans)
        chunk = Chunk(
            destination,
            len(destination.chunks),
            SubmittedChunk((), {}, ready=True),
            (),
            nbytes,
            ChunkPhase.HELD,
            direct=True,
            row=True,
        )
        destination.chunks[chunk.number] = chunk
        destination.unwritten += 1
        self.chunks.advance(chunk)

    def _no_row(self, destination: Destination) -> str:
        if not self._rows.within_reach:
            return "aux rows are not within the data transport's reach, or not to be, at prefill"
        if destination.session.rows is None:
            return "aux rows are not within the data transport's reach, or not to be, at decode"
        return "a receiver was bound without an aux row" if destination.open.row is None else ""

    def row_failed(self, destination: Destination, why: str) -> None:
        if self._rows.wanted and destination.phase is DestinationPhase.LIVE:
            self.endpoint.counters.aux_fallbacks += 1
            self.endpoint.warn_once(
                destination.session.route, f"{why}: it goes by control message", "see aux_fallbacks"
            )

    def _set_aux(self, destination: Destination, room: PrefillRoom) -> None:
        """Sets the aux that CloseOk carries. Reads the row now, since it may soon belong to another room."""
        aux, shared = room.aux, destination.session.aux
        if isinstance(aux, GivenRow):
            by_write = any(written.lane == m.AUX for written in destination.written)
            destination.packed = destination.open.aux and bool(shared.src) and not by_write
            aux = shared.pack(aux.read()) if destination.packed else None
        destination.aux = aux if destination.open.aux else None

    def fail_destination(self, destination: Destination, error: PdstageError) -> None:
        if destination.room is not None:
            self.fail(destination.room, error)

    def fail(self, room: PrefillRoom, error: PdstageError) -> None:
        if not room.on(RoomEvent.FAILED, error):
            return
        self.endpoint.counters.rooms_failed += 1
        served = {rank: (destination.session.id, destination.epoch) for rank, destination in room.destinations.items()}
        self.note_ended(room.key, Ended(str(error), served))
        for destination in list(room.destinations.values()):
            if destination.phase is DestinationPhase.LIVE:
                DESTINATION.move(destination, DestinationEvent.FAILED)
                destination.reason = str(error)
                self.chunks.drop(destination)
                self.close_failed(destination)
        self._end(room)

    def how_ended(self, key: bytes) -> Ended | None:
        """What is known of the last room of this name, if it failed and that still counts."""
        ended = self.ended.get(key)
        if ended is not None and ended.until <= self.endpoint.now:
            del self.ended[key]
            return None
        return ended

    def note_ended(self, key: bytes, ended: Ended) -> None:
        self.ended[key] = ended
        if len(self.ended) > _MAX_ENDED:
            self.ended.popitem(last=False)

    def close_failed(self, destination: Destination) -> None:
        self.endpoint.send(destination.session, m.CloseFailed(destination.epoch, m.brief(destination.reason)))
        self.endpoint.repeat(self.close_again, destination)

    def _end(self, room: PrefillRoom) -> None:
        self.endpoint.cancel(self.unopened, room)
        self.endpoint.cancel(self.late, room)
        if self.by_key.get(room.key) is room:
            del self.by_key[room.key]
        for source in room.sources:
            source.chunks.clear()
        room.sources.clear()
        self.endpoint.effects.append(Changed(room))
        self._maybe_release(room)

    def _maybe_release(self, room: PrefillRoom) -> None:
        if room.ended and room.in_flight == 0 and room.release():
            self.endpoint.effects.append(Changed(room))

    def drain(self, destination: Destination) -> None:
        self.chunks.drop(destination)
        self.endpoint.cancel(self.close_again, destination)
        self.unpark(destination)
        DESTINATION.move(destination, DestinationEvent.ABORTED)
        self._maybe_drained(destination)

    def _maybe_drained(self, destination: Destination) -> None:
        if destination.phase is DestinationPhase.DRAINING and destination.in_flight == 0:
            if destination.session.id in self.endpoint.sessions:
                self.endpoint.send(destination.session, m.Drained(destination.epoch))
            self.forget(destination)

    def flight_ended(self, destination: Destination) -> None:
        if destination.room is not None:
            destination.room.in_flight -= 1
            self._maybe_release(destination.room)
        if destination.session.id in self.endpoint.sessions:
            self._maybe_drained(destination)
        elif destination.in_flight == 0:
            self.forget(destination)

    def forget(self, destination: Destination) -> None:
        self.chunks.drop(destination)
        self.unpark(destination)
        self.endpoint.cancel(self.close_again, destination)
        self.destinations.pop((destination.session.id, destination.epoch), None)
        destination.session.claims.pop(destination.epoch, None)
        # Chunks name their destination, and that its room: without this only the collector could free any of them.
        destination.chunks.clear()
        destination.room = None

    def note(self, destination: Destination) -> None:
        self.destinations[destination.session.id, destination.epoch] = destination
        destination.session.claims[destination.epoch] = destination

    def park(self, destination: Destination) -> bool:
        """Holds a destination of a room that is not here yet; False if there is no place for it."""
        session, opened = destination.session, destination.open
        nbytes = _OPEN_NBYTES + sum(len(items.data) for items in opened.items)
        if session.parked_nbytes + nbytes > MAX_PARKED_NBYTES:
            return False
        session.parked_nbytes += nbytes
        destination.parked_nbytes = nbytes
        self.pending.setdefault(opened.room, {})[destination] = None
        self.note(destination)
        self.endpoint.after(min(opened.deadline_s, self.endpoint.config.send_wait_s), self.never_begun, destination)
        return True

    def unpark(self, destination: Destination) -> None:
        """Its room is here, or it has agreed that it will not be: until then it counts."""
        destination.session.parked_nbytes -= destination.parked_nbytes
        destination.parked_nbytes = 0
        self._wait_no_more(destination)

    def _wait_no_more(self, destination: Destination) -> None:
        self.endpoint.cancel(self.never_begun, destination)
        waiting = self.pending.get(destination.open.room, {})
        waiting.pop(destination, None)
        if not waiting:
            self.pending.pop(destination.open.room, None)

    def turn_all_away(self, reason: str) -> None:
        for destination in list(chain.from_iterable(self.pending.values())):
            self.turn_away(destination, reason)

    def turn_away(self, destination: Destination, reason: str) -> None:
        """The room of a pending destination will not be sent."""
        self._wait_no_more(destination)
        DESTINATION.move(destination, DestinationEvent.FAILED)
        destination.reason = reason
        self.close_failed(destination)

    def lose(self, session: Session, error: PdstageError) -> None:
        """The session is over: rooms that its destinations still need fail, nothing further is sent under it."""
        for destination in list(session.claims.values()):
            if destination.phase in (DestinationPhase.LIVE, DestinationPhase.FAILING):
                DESTINATION.move(destination, DestinationEvent.ABORTED)
                self.chunks.drop(destination)
                self.fail_destination(destination, error)
            if destination.in_flight == 0:
                self.forget(destination)

    # What came too late.

    def unopened(self, room: PrefillRoom) -> None:
        self.fail(room, DeadlineExceeded(f"no decode rank opened room {room.id!r} in {room.open_wait_s} s"))

    def late(self, room: PrefillRoom) -> None:
        what = f"room {room.id!r} was not sent in its {room.deadline_s} s"
        remedy = "raise deadline_s at decode, or look at the slower side"
        self.fail(room, DeadlineExceeded(what, remedy=remedy, room=room.id))

    def never_begun(self, destination: Destination) -> None:
        self.turn_away(destination, f"prefill never began room {room_id(destination.open.room)!r}")

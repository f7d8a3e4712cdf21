"""The rooms of a prefill rank and each destination's claim on them: attached, closed, failed, drained.

Layer 2, pure. Must not know how frames arrive: `prefill` hears them and calls here.

A *record* is one destination rank's claim on one room, keyed by (session, epoch); a room serves all of its records and
fails with the first that fails. Nothing of a record begins after Abort, and Drained is said only when nothing is in
flight (I2, I8).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from pdstage.errors import PeerError, UsageError
from pdstage.protocol import messages as m
from pdstage.protocol.borrower import Borrower
from pdstage.protocol.effects import Changed, Detach, PeerWarning
from pdstage.protocol.fit import lacking
from pdstage.protocol.outbox import (
    Chunk,
    Destination,
    DestinationPhase,
    Ended,
    GivenRow,
    Phase,
    PrefillRoom,
    SubmittedChunk,
)
from pdstage.protocol.parked import Askers, Parked
from pdstage.protocol.room import Event
from pdstage.protocol.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdstage.errors import PdstageError
    from pdstage.protocol.config import Config
    from pdstage.protocol.room import OwnRows
    from pdstage.protocol.session import Session

_MAX_ENDED = 4096


class Sending(Borrower):
    """The prefill core's room table: rooms until they end, what destinations claim of them until it is settled."""

    def __init__(
        self,
        incarnation: int,
        config: Config,
        welcome: m.Welcome,
        *,
        n_buffers: int,
        buffer_nbytes: int,
        choose: Callable[[Chunk], bool],
        rows: OwnRows,
    ) -> None:
        super().__init__(
            incarnation, config, welcome, n_buffers=n_buffers, buffer_nbytes=buffer_nbytes, choose=choose
        )  # fmt: skip
        self._rows = rows
        self.rooms: dict[bytes, PrefillRoom] = {}
        self._slots = Slots(welcome.layout)
        self._fitting: set[frozenset[m.SessionId]] = set()
        self._parked = Parked(config.max_parked, config.max_parked_nbytes)
        self._ended: OrderedDict[bytes, Ended] = OrderedDict()
        self._askers = Askers(config.max_parked)

    def _attach(self, room: PrefillRoom, destination: Destination, now: float) -> None:
        destination.room, destination.phase = room, DestinationPhase.LIVE
        older = room.destinations.get(destination.open.rank)
        room.destinations[destination.open.rank] = destination
        room.n_destinations = destination.open.destinations
        if older is not None:
            self._drain(older, now)
        room.deadline_s = min(destination.open.deadline_s, self.config.max_deadline_s)
        self.timers.set(("room", room), now + room.deadline_s)
        if len(room.destinations) >= room.n_destinations:
            self.timers.cancel(("open_wait", room))
            problem = self._unwanted(room)
            if problem:
                self._fail(room, PeerError(problem, remedy="serve the same model with the same caches"), now)
                return
            if room.on(Event.CONNECTED):
                self.emit(Changed(room))
        for source in room.sources:
            self._add(destination, source, now)
        if room.finished:
            self._add_row(destination)
        self._maybe_close(destination, now)

    def _unwanted(self, room: PrefillRoom) -> str:
        """What of this rank's state no destination has a place for, where each is one of a pipeline's stages."""
        sessions = [destination.session for destination in room.destinations.values()]
        if all(session.topology.pp_size == 1 for session in sessions):
            return ""
        ids = frozenset(session.id for session in sessions)
        if ids in self._fitting:
            return ""
        ours = [session.converted.offered if session.converted else self.layout for session in sessions]
        theirs = [session.converted.taken if session.converted else session.layout for session in sessions]
        problem = lacking("decode", ours, theirs)
        if not problem:
            if len(self._fitting) >= _MAX_ENDED:
                self._fitting.clear()
            self._fitting.add(ids)
        return problem

    def _maybe_close(self, destination: Destination, now: float) -> None:
        room = destination.room
        needs_nothing = not destination.shares and not destination.open.aux
        if destination.phase is not DestinationPhase.LIVE or room is None or destination.unwritten:
            return
        if not room.finished and not needs_nothing:
            return
        for given in self._given(destination):
            problem = self._slots.compare(self, destination.session, *given, destination.asked[given.component][1])
            if problem:
                self._fail(room, UsageError(problem, remedy="give as many as decode does", room=room.id), now)
                return
        self._set_aux(destination, room)
        destination.phase = DestinationPhase.CLOSING
        self._close(destination, now)
        self._maybe_complete(room)

    def _given(self, destination: Destination) -> tuple[m.Given, ...]:
        """How many slots there are of each component without positions that `destination` asks of this rank.

        Nothing is said of one that the engine never named although slots were asked for: it was forgotten.
        """
        if not self._slots:
            return ()
        named = destination.room.slots if destination.room is not None else {}
        owed = {share.component for share in destination.shares if share.component in self._slots}
        asked = sorted((name, stop) for name, (_, stop) in destination.asked.items() if name in owed)
        return tuple(m.Given(name, named.get(name, 0)) for name, stop in asked if name in named or not stop)

    def _maybe_complete(self, room: PrefillRoom) -> None:
        if room.complete and room.on(Event.COMPLETED):
            self.counters.rooms_succeeded += 1
            self._end(room)

    def _close(self, destination: Destination, now: float) -> None:
        written = tuple(destination.written)
        close = m.CloseOk(destination.epoch, written, destination.aux, self._given(destination), destination.packed)
        self.send(destination.session, close, now)
        self.repeat(("close", destination), now)

    def _close_again(self, destination: Destination, now: float) -> None:
        """Unanswered: what was lost may be a tag that was said, and decode waits for all that are listed."""
        for chunk in destination.chunks.values():
            self._tell_tag(chunk, now)
        self._close(destination, now)

    # The aux row.

    def _add_row(self, destination: Destination) -> None:
        """Puts the room's aux row on its way into the row that `destination` named, where that is within reach."""
        room, session = destination.room, destination.session
        if room is None or not isinstance(room.aux, GivenRow) or not destination.open.aux or not session.aux.spans:
            return
        why = self._no_row(destination)
        if why:
            self._row_failed(destination, why)
            return
        nbytes = sum(span.nbytes for span in session.aux.spans)
        chunk = Chunk(
            destination,
            len(destination.chunks),
            SubmittedChunk((), {}, ready=True),
            (),
            nbytes,
            Phase.HELD,
            direct=True,
            row=True,
        )
        destination.chunks[chunk.number] = chunk
        destination.unwritten += 1
        self._advance(chunk)

    def _no_row(self, destination: Destination) -> str:
        if not self._rows.within_reach:
            return "aux rows are not within the data transport's reach, or not to be, at prefill"
        if destination.session.rows is None:
            return "aux rows are not within the data transport's reach, or not to be, at decode"
        return "a receiver was bound without an aux row" if destination.open.row is None else ""

    def _row_failed(self, destination: Destination, why: str) -> None:
        if self._rows.wanted and destination.phase is DestinationPhase.LIVE:
            self.counters.aux_fallbacks += 1
            self.warn_once(destination.session.route, f"{why}: it goes by control message", "see aux_fallbacks")

    def _set_aux(self, destination: Destination, room: PrefillRoom) -> None:
        """What Close carries, as of now: soon the row may be another room's."""
        aux, shared = room.aux, destination.session.aux
        if isinstance(aux, GivenRow):
            by_write = any(written.lane == m.AUX for written in destination.written)
            destination.packed = destination.open.aux and bool(shared.src) and not by_write
            aux = shared.pack(aux.read()) if destination.packed else None
        destination.aux = aux if destination.open.aux else None

    def _fail_destination(self, destination: Destination, error: PdstageError, now: float) -> None:
        if destination.room is not None:
            self._fail(destination.room, error, now)

    def _fail(self, room: PrefillRoom, error: PdstageError, now: float) -> None:
        if not room.on(Event.FAILED, error):
            return
        self.counters.rooms_failed += 1
        served = {rank: (destination.session.id, destination.epoch) for rank, destination in room.destinations.items()}
        self._note_ended(room.key, Ended(str(error), served))
        for destination in list(room.destinations.values()):
            if destination.phase is DestinationPhase.LIVE:
                destination.phase, destination.reason = DestinationPhase.FAILING, str(error)
                self._drop(destination)
                self._close_failed(destination, now)
        self._end(room)

    def _how_ended(self, key: bytes, now: float) -> Ended | None:
        """What is known of the last room of this name, if it failed and that still counts."""
        ended = self._ended.get(key)
        if ended is not None and ended.until <= now:
            del self._ended[key]
            return None
        return ended

    def _note_ended(self, key: bytes, ended: Ended) -> None:
        self._ended[key] = ended
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def _close_failed(self, destination: Destination, now: float) -> None:
        self.send(destination.session, m.CloseFailed(destination.epoch, m.brief(destination.reason)), now)
        self.repeat(("close", destination), now)

    def _end(self, room: PrefillRoom) -> None:
        self.timers.cancel(("open_wait", room))
        self.timers.cancel(("room", room))
        self._forget_askers(room.key)
        if self.rooms.get(room.key) is room:
            del self.rooms[room.key]
        for source in room.sources:
            source.chunks.clear()
        room.sources.clear()
        self.emit(Changed(room))
        self._maybe_release(room)

    def _maybe_release(self, room: PrefillRoom) -> None:
        if room.ended and room.in_flight == 0 and room.release():
            self.emit(Changed(room))

    def _drop(self, destination: Destination) -> None:
        """Nothing more of this record begins."""
        for chunk in destination.chunks.values():
            if chunk.phase is not Phase.WRITTEN:
                self.timers.cancel(("ask", chunk))
                if chunk.phase not in (Phase.GATHERING, Phase.WRITING, Phase.BROKEN):
                    chunk.phase = Phase.DROPPED

    def _drain(self, destination: Destination, now: float) -> None:
        self._drop(destination)
        self.timers.cancel(("close", destination))
        self._unpark(destination)
        destination.phase = DestinationPhase.DRAINING
        self._maybe_drained(destination, now)

    def _maybe_drained(self, destination: Destination, now: float) -> None:
        if destination.phase is DestinationPhase.DRAINING and destination.in_flight == 0:
            if destination.session.id in self.sessions:
                self.send(destination.session, m.Drained(destination.epoch), now)
            self._forget(destination)

    def _landed(self, destination: Destination, now: float) -> None:
        if destination.room is not None:
            destination.room.in_flight -= 1
            self._maybe_release(destination.room)
        if destination.session.id in self.sessions:
            self._maybe_drained(destination, now)
        elif destination.in_flight == 0:
            self._forget(destination)

    def _forget(self, destination: Destination) -> None:
        self._drop(destination)
        self._unpark(destination)
        self.timers.cancel(("close", destination))
        self.destinations.pop((destination.session.id, destination.epoch), None)
        destination.session.destinations.pop(destination.epoch, None)
        # Chunks name their record and records their room: without this only the collector could free any of them.
        destination.chunks.clear()
        destination.room = None

    def _note(self, destination: Destination) -> None:
        self.destinations[destination.session.id, destination.epoch] = destination.session.destinations[
            destination.epoch
        ] = destination

    def _park(self, destination: Destination, now: float) -> bool:
        """Holds a record of a room that is not here yet; False if there is no place for it."""
        held, others = self._parked.add(destination)
        for other in others:
            self.send(other.session, m.CloseFailed(other.epoch, "too many of its rooms wait for prefill"), now)
            self._forget(other)
        if held:
            self._note(destination)
            self.timers.set(("parked", destination), now + min(destination.open.deadline_s, self.config.open_wait_s))
        return held

    def _turn_away(self, destination: Destination, reason: str, now: float) -> None:
        """A parked record's room will not be sent."""
        self._parked.turn_away(destination)
        self.timers.cancel(("parked", destination))
        destination.phase, destination.reason = DestinationPhase.FAILING, reason
        self._close_failed(destination, now)

    def _unpark(self, destination: Destination) -> None:
        self._parked.remove(destination)
        self.timers.cancel(("parked", destination))

    def _forget_askers(self, key: bytes) -> Iterable[tuple[Session, int]]:
        self.timers.cancel(("asked", key))
        return self._askers.take(key)

    def lose(self, session: Session, error: PdstageError, now: float) -> None:
        """The session is over: its rooms fail, nothing further is sent under it."""
        if not self._unlink(session):
            return
        for destination in list(session.destinations.values()):
            if destination.phase in (DestinationPhase.LIVE, DestinationPhase.FAILING):
                destination.phase = DestinationPhase.DRAINING
                self._drop(destination)
                self._fail_destination(destination, error, now)
            if destination.in_flight == 0:
                self._forget(destination)
        for key in self._askers.drop(session):
            self.timers.cancel(("asked", key))
        self._forget_marks(session)
        if not session.said_bye:
            self.emit(PeerWarning(session.route, error))
        self.emit(Detach(session))

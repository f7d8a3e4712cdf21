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
from pdstage.protocol.outbox import Chunk, Ended, GivenRow, Phase, PrefillRoom, Record, RecordPhase, SubmittedChunk
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
    """The prefill core's room table. A room is in `rooms` until it ends; a record in `records` until it is settled."""

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

    def _attach(self, room: PrefillRoom, record: Record, now: float) -> None:
        record.room, record.phase = room, RecordPhase.LIVE
        older = room.destinations.get(record.open.rank)
        room.destinations[record.open.rank] = record
        room.n_destinations = record.open.destinations
        if older is not None:
            self._drain(older, now)
        room.deadline_s = min(record.open.deadline_s, self.config.max_deadline_s)
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
            self._add(record, source, now)
        if room.finished:
            self._add_row(record)
        self._maybe_close(record, now)

    def _unwanted(self, room: PrefillRoom) -> str:
        """What of this rank's state no destination has a place for, where each is one of a pipeline's stages."""
        sessions = [record.session for record in room.destinations.values()]
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

    def _maybe_close(self, record: Record, now: float) -> None:
        room = record.room
        needs_nothing = not record.shares and not record.open.aux
        if record.phase is not RecordPhase.LIVE or room is None or record.unwritten:
            return
        if not room.finished and not needs_nothing:
            return
        for given in self._given(record):
            problem = self._slots.compare(self, record.session, *given, record.asked[given.component][1])
            if problem:
                self._fail(room, UsageError(problem, remedy="give as many as decode does", room=room.id), now)
                return
        self._set_aux(record, room)
        record.phase = RecordPhase.CLOSING
        self._close(record, now)
        self._maybe_complete(room)

    def _given(self, record: Record) -> tuple[m.Given, ...]:
        """How many slots there are of each component without positions that `record` asks of this rank.

        Nothing is said of one that the engine never named although slots were asked for: it was forgotten.
        """
        if not self._slots:
            return ()
        named = record.room.slots if record.room is not None else {}
        owed = {share.component for share in record.shares if share.component in self._slots}
        asked = sorted((name, stop) for name, (_, stop) in record.asked.items() if name in owed)
        return tuple(m.Given(name, named.get(name, 0)) for name, stop in asked if name in named or not stop)

    def _maybe_complete(self, room: PrefillRoom) -> None:
        if room.complete and room.on(Event.COMPLETED):
            self.counters.rooms_succeeded += 1
            self._end(room)

    def _close(self, record: Record, now: float) -> None:
        written = tuple(record.written)
        close = m.CloseOk(record.epoch, written, record.aux, self._given(record), record.packed)
        self.send(record.session, close, now)
        self.repeat(("close", record), now)

    def _close_again(self, record: Record, now: float) -> None:
        """Unanswered: what was lost may be a tag that was said, and decode waits for all that are listed."""
        for chunk in record.chunks.values():
            self._tell_tag(chunk, now)
        self._close(record, now)

    # The aux row.

    def _add_row(self, record: Record) -> None:
        """Puts the room's aux row on its way into the row that `record` named, where that is within reach."""
        room, session = record.room, record.session
        if room is None or not isinstance(room.aux, GivenRow) or not record.open.aux or not session.aux.spans:
            return
        why = self._no_row(record)
        if why:
            self._row_failed(record, why)
            return
        nbytes = sum(span.nbytes for span in session.aux.spans)
        chunk = Chunk(
            record,
            len(record.chunks),
            SubmittedChunk((), {}, ready=True),
            (),
            nbytes,
            Phase.HELD,
            direct=True,
            row=True,
        )
        record.chunks[chunk.number] = chunk
        record.unwritten += 1
        self._advance(chunk)

    def _no_row(self, record: Record) -> str:
        if not self._rows.within_reach:
            return "aux rows are not within the data transport's reach, or not to be, at prefill"
        if record.session.rows is None:
            return "aux rows are not within the data transport's reach, or not to be, at decode"
        return "a receiver was bound without an aux row" if record.open.row is None else ""

    def _row_failed(self, record: Record, why: str) -> None:
        if self._rows.wanted and record.phase is RecordPhase.LIVE:
            self.counters.aux_fallbacks += 1
            self.warn_once(record.session.route, f"{why}: it goes by control message", "see aux_fallbacks")

    def _set_aux(self, record: Record, room: PrefillRoom) -> None:
        """What Close carries, as of now: soon the row may be another room's."""
        aux, shared = room.aux, record.session.aux
        if isinstance(aux, GivenRow):
            by_write = any(written.lane == m.AUX for written in record.written)
            record.packed = record.open.aux and bool(shared.src) and not by_write
            aux = shared.pack(aux.read()) if record.packed else None
        record.aux = aux if record.open.aux else None

    def _fail_record(self, record: Record, error: PdstageError, now: float) -> None:
        if record.room is not None:
            self._fail(record.room, error, now)

    def _fail(self, room: PrefillRoom, error: PdstageError, now: float) -> None:
        if not room.on(Event.FAILED, error):
            return
        self.counters.rooms_failed += 1
        served = {rank: (record.session.id, record.epoch) for rank, record in room.destinations.items()}
        self._note_ended(room.key, Ended(str(error), served))
        for record in list(room.destinations.values()):
            if record.phase is RecordPhase.LIVE:
                record.phase, record.reason = RecordPhase.FAILING, str(error)
                self._drop(record)
                self._close_failed(record, now)
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

    def _close_failed(self, record: Record, now: float) -> None:
        self.send(record.session, m.CloseFailed(record.epoch, m.brief(record.reason)), now)
        self.repeat(("close", record), now)

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

    def _drop(self, record: Record) -> None:
        """Nothing more of this record begins."""
        for chunk in record.chunks.values():
            if chunk.phase is not Phase.WRITTEN:
                self.timers.cancel(("ask", chunk))
                if chunk.phase not in (Phase.GATHERING, Phase.WRITING, Phase.BROKEN):
                    chunk.phase = Phase.DROPPED

    def _drain(self, record: Record, now: float) -> None:
        self._drop(record)
        self.timers.cancel(("close", record))
        self._unpark(record)
        record.phase = RecordPhase.DRAINING
        self._maybe_drained(record, now)

    def _maybe_drained(self, record: Record, now: float) -> None:
        if record.phase is RecordPhase.DRAINING and record.in_flight == 0:
            if record.session.id in self.sessions:
                self.send(record.session, m.Drained(record.epoch), now)
            self._forget(record)

    def _landed(self, record: Record, now: float) -> None:
        if record.room is not None:
            record.room.in_flight -= 1
            self._maybe_release(record.room)
        if record.session.id in self.sessions:
            self._maybe_drained(record, now)
        elif record.in_flight == 0:
            self._forget(record)

    def _forget(self, record: Record) -> None:
        self._drop(record)
        self._unpark(record)
        self.timers.cancel(("close", record))
        self.records.pop((record.session.id, record.epoch), None)
        record.session.records.pop(record.epoch, None)
        # Chunks name their record and records their room: without this only the collector could free any of them.
        record.chunks.clear()
        record.room = None

    def _note(self, record: Record) -> None:
        self.records[record.session.id, record.epoch] = record.session.records[record.epoch] = record

    def _park(self, record: Record, now: float) -> bool:
        """Holds a record of a room that is not here yet; False if there is no place for it."""
        held, others = self._parked.add(record)
        for other in others:
            self.send(other.session, m.CloseFailed(other.epoch, "too many of its rooms wait for prefill"), now)
            self._forget(other)
        if held:
            self._note(record)
            self.timers.set(("parked", record), now + min(record.open.deadline_s, self.config.open_wait_s))
        return held

    def _turn_away(self, record: Record, reason: str, now: float) -> None:
        """A parked record's room will not be sent."""
        self._parked.turn_away(record)
        self.timers.cancel(("parked", record))
        record.phase, record.reason = RecordPhase.FAILING, reason
        self._close_failed(record, now)

    def _unpark(self, record: Record) -> None:
        self._parked.remove(record)
        self.timers.cancel(("parked", record))

    def _forget_askers(self, key: bytes) -> Iterable[tuple[Session, int]]:
        self.timers.cancel(("asked", key))
        return self._askers.take(key)

    def lose(self, session: Session, error: PdstageError, now: float) -> None:
        """The session is over: its rooms fail, nothing further is sent under it."""
        if not self._unlink(session):
            return
        for record in list(session.records.values()):
            if record.phase in (RecordPhase.LIVE, RecordPhase.FAILING):
                record.phase = RecordPhase.DRAINING
                self._drop(record)
                self._fail_record(record, error, now)
            if record.in_flight == 0:
                self._forget(record)
        for key in self._askers.drop(session):
            self.timers.cancel(("asked", key))
        self._forget_marks(session)
        if not session.said_bye:
            self.emit(PeerWarning(session.route, error))
        self.emit(Detach(session))

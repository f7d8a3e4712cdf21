"""Prefill borrows staging memory: asks for leases, gathers and writes into them, or gives them back.

Layer 2, pure. Must not know the room table: a `Borrower` tells its heir when a record has nothing left to write.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from pdstage.columns import Span
from pdstage.errors import DeadlineExceeded, PdstageError, PeerError, TransportError, UsageError
from pdstage.plan import Stagings
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.effects import Changed, Gather, Write, WriteDirect, WriteRow
from pdstage.protocol.outbox import (
    Chunk,
    Destination,
    DestinationPhase,
    GivenRow,
    Phase,
    SendBuffers,
    SubmittedChunk,
    clip,
    split,
)
from pdstage.protocol.room import Event
from pdstage.protocol.windows import Windowed

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.plan import Rect
    from pdstage.protocol.config import Config
    from pdstage.protocol.session import Session

_MAX_PIECES = 1024
"""A chunk that would fall into more fits no span worth having: it waits for a larger one, or goes direct."""
_MAX_UNSETTLED = 4096


class Borrower(Windowed):
    """The prefill core's chunks, from the first Reserve to the last completion."""

    def __init__(
        self,
        incarnation: int,
        config: Config,
        welcome: m.Welcome,
        *,
        n_buffers: int,
        buffer_nbytes: int,
        choose: Callable[[Chunk], bool],
    ) -> None:
        super().__init__(incarnation, config, welcome)
        self.layout = welcome.layout
        self.destinations: dict[tuple[m.SessionId, int], Destination] = {}
        self.buffers = SendBuffers(n_buffers)
        self.stagings = Stagings(self.layout)
        self._buffer_nbytes = buffer_nbytes
        self._choose = choose
        self._flights: dict[int, tuple[Chunk, int]] = {}
        self._orphans: dict[int, m.SessionId] = {}
        self._unsettled: OrderedDict[m.SessionId, None] = OrderedDict()

    @abstractmethod
    def _maybe_close(self, destination: Destination, now: float) -> None:
        """A chunk of `destination` needs no write any more."""

    @abstractmethod
    def _row_failed(self, destination: Destination, why: str) -> None:
        """The aux row of `destination` cannot be written in place: it goes by message."""

    @abstractmethod
    def _landed(self, destination: Destination, now: float) -> None:
        """A gather or write of `destination` ended, whatever became of it."""

    @abstractmethod
    def _fail_destination(self, destination: Destination, error: PdstageError, now: float) -> None: ...

    # What peers say, in the order of DESIGN's table.

    def _on_lease(self, session: Session, lease: m.Lease, now: float) -> None:
        if not 0 <= lease.lane < len(session.lanes):
            raise PeerError(f"a lease in lane {lease.lane}", remedy=f"Hello named {len(session.lanes)} lanes")
        self._raise_mark(session, lease.lane, lease.watermark)
        chunk = self._chunk(session, lease.epoch, lease.chunk)
        where = (lease.lane, lease.cursor)
        if chunk is not None and chunk.attempt == lease.attempt and not chunk.direct:
            if chunk.phase is Phase.ASKING:
                self._take(chunk, lease)
                return
            if chunk.phase not in (Phase.PARKED, Phase.DROPPED) and (chunk.lane, chunk.cursor) == where:
                return
        self._give_back(session, lease, now)

    def _take(self, chunk: Chunk, lease: m.Lease) -> None:
        nbytes = chunk.destination.session.lanes[lease.lane].nbytes
        if lease.nbytes < chunk.nbytes or lease.cursor < 0 or lease.cursor % nbytes + chunk.nbytes > nbytes:
            raise PeerError(
                f"a lease of {lease.nbytes} bytes at {lease.cursor} for {chunk.nbytes}", remedy="check the peer"
            )
        chunk.lane, chunk.cursor, chunk.phase = lease.lane, lease.cursor, Phase.HELD
        if self._window_open(chunk):
            self.timers.cancel(("ask", chunk))
            self._advance(chunk)
        else:
            self._await_window(chunk)

    def _on_refused(self, session: Session, refused: m.Refused, now: float) -> None:
        chunk = self._chunk(session, refused.epoch, refused.chunk)
        if chunk is None or chunk.phase is not Phase.ASKING or chunk.attempt != refused.attempt:
            return
        self.timers.cancel(("ask", chunk))
        destination = chunk.destination
        if refused.why != "too_big":
            chunk.phase = Phase.DROPPED
            destination.unwritten -= 1
            if refused.why == "covered":
                self._maybe_close(destination, now)
            return
        most = refused.max_nbytes
        stagings = destination.staged_by(self.stagings)
        cut = split(chunk.rects, destination, stagings, most) if most > 0 else iter(())
        pieces = list(islice(cut, _MAX_PIECES + 1))
        if 1 < len(pieces) <= _MAX_PIECES:
            chunk.phase = Phase.DROPPED
            destination.unwritten -= 1
            for rects in pieces:
                self._add_piece(destination, chunk.source, rects, now)
        elif destination.may_direct(chunk.rects):
            self._go_direct(chunk, now)
        elif chunk.nbytes <= max(lane.nbytes for lane in session.lanes):
            # Carved out for now: the span comes back, or a deadline comes.
            self.repeat(("ask", chunk), now)
        else:
            error = PeerError(f"a chunk of {chunk.nbytes} bytes fits no lane", remedy="raise staging_nbytes at decode")
            self._fail_destination(destination, error, now)

    def _on_recall(self, session: Session, recall: m.Recall, now: float) -> None:
        self._raise_mark(session, recall.lane, recall.watermark)
        chunk = self._chunk(session, recall.epoch, recall.chunk)
        if chunk is not None and chunk.attempt == recall.attempt and not chunk.direct:
            if chunk.begun or chunk.phase is Phase.READY:
                self._tell_tag(chunk, now)
                return
            if chunk.phase in (Phase.ASKING, Phase.HELD):
                self._recalled(chunk, now)
        self._give_back(session, recall, now)

    def _recalled(self, chunk: Chunk, now: float) -> None:
        """Returned is final: the attempt rises first, and the old one is never accepted again."""
        chunk.attempt += 1
        self.timers.cancel(("ask", chunk))
        if chunk.source.ready:
            self._ask(chunk, now)
        else:
            chunk.phase = Phase.PARKED

    # Chunks.

    def _add(self, destination: Destination, source: SubmittedChunk, now: float) -> None:
        if destination.phase is not DestinationPhase.LIVE:
            return
        largest = max(lane.nbytes for lane in destination.session.lanes)
        limit = min(self._buffer_nbytes, largest, self.config.chunk_nbytes)
        stagings = destination.staged_by(self.stagings)
        for rects in split(clip(source.rects, destination, stagings), destination, stagings, limit):
            self._add_piece(destination, source, rects, now)

    def _add_piece(self, destination: Destination, source: SubmittedChunk, rects: tuple[Rect, ...], now: float) -> None:
        nbytes = (
            destination.staged_by(self.stagings)
            .of(destination.shares, rects)
            .nbytes(destination.session.common.tokens(rects))
        )
        chunk = Chunk(destination, len(destination.chunks), source, rects, nbytes)
        destination.chunks[chunk.number] = chunk
        source.chunks.append(chunk)
        destination.unwritten += 1
        if destination.may_direct(rects) and (nbytes > self._buffer_nbytes or self._choose(chunk)):
            chunk.direct, chunk.phase = True, Phase.HELD
            self._advance(chunk)
        elif nbytes > self._buffer_nbytes:
            error = UsageError(
                f"one row of {rects[0].component!r} does not fit a send buffer of {self._buffer_nbytes} bytes",
                remedy="raise staging_nbytes at prefill",
            )
            self._fail_destination(destination, error, now)
        else:
            self._ask(chunk, now)

    def _chunk(self, session: Session, epoch: int, number: int) -> Chunk | None:
        destination = self.destinations.get((session.id, epoch))
        return destination.chunks.get(number) if destination is not None else None

    def _ask(self, chunk: Chunk, now: float) -> None:
        chunk.phase, chunk.waits_since = Phase.ASKING, now
        self._reserve(chunk, now)

    def _ask_again(self, chunk: Chunk, now: float) -> None:
        if chunk.phase is not Phase.ASKING and (chunk.phase is not Phase.HELD or self._window_open(chunk)):
            return
        waited_s = now - chunk.waits_since
        if (
            chunk.source.ready
            and waited_s >= self.config.fall_back_after_s
            and chunk.destination.may_direct(chunk.rects)
        ):
            self._go_direct(chunk, now)
        else:
            self._reserve(chunk, now)

    def _reserve(self, chunk: Chunk, now: float) -> None:
        destination = chunk.destination
        self.send(
            destination.session,
            m.Reserve(destination.epoch, chunk.number, chunk.attempt, chunk.nbytes, chunk.rects),
            now,
        )
        self.repeat(("ask", chunk), now)

    def _go_direct(self, chunk: Chunk, now: float) -> None:
        """Falls back staged -> direct: gives its lease back, and one on its way is given back by its attempt."""
        if chunk.phase is not Phase.ASKING:
            destination = chunk.destination
            told = m.Returned(destination.epoch, chunk.number, chunk.attempt, chunk.lane, chunk.cursor)
            self.counters.leases_returned += 1
            self.send(destination.session, told, now)
        self.timers.cancel(("ask", chunk))
        chunk.attempt += 1
        chunk.direct, chunk.phase = True, Phase.HELD
        self.counters.chunks_fallen_back += 1
        self._advance(chunk)

    def _give_back(self, session: Session, told: m.Lease | m.Recall, now: float) -> None:
        self.counters.leases_returned += 1
        self.send(session, m.Returned(told.epoch, told.chunk, told.attempt, told.lane, told.cursor), now)

    def _advance(self, chunk: Chunk) -> None:
        """Queues a held chunk once its data exists and, unless direct, its window is open."""
        if chunk.phase is Phase.HELD and chunk.source.ready and (chunk.direct or self._window_open(chunk)):
            chunk.phase = Phase.READY
            self.buffers.queue(chunk)

    def _settle(self, now: float) -> None:
        for chunk, buffer in self.buffers.pop():
            destination = chunk.destination
            ticket = self.ticket()
            self._flights[ticket] = (chunk, buffer)
            destination.in_flight += 1
            if destination.room is not None:
                destination.room.in_flight += 1
                if destination.room.on(Event.MOVED):
                    self.emit(Changed(destination.room))
            if chunk.direct:
                chunk.phase = Phase.WRITING
                self.timers.set(("write", ticket), now + self.config.write_s)
                self.emit(self._row_write(ticket, chunk) if chunk.row else WriteDirect(ticket, chunk, self._tag(chunk)))
            else:
                chunk.phase = Phase.GATHERING
                self.emit(Gather(ticket, buffer, chunk, self._address(chunk)))

    def _row_write(self, ticket: int, chunk: Chunk) -> WriteRow:
        """All that a room's aux row has in common with the one that its destination named."""
        destination, rows = chunk.destination, chunk.destination.session.rows
        assert destination.room is not None and isinstance(destination.room.aux, GivenRow)
        assert rows is not None and destination.open.row is not None
        src, dst = destination.room.aux.address, rows.base + destination.open.row * rows.row_nbytes
        spans = tuple(
            Span(src + span.src_offset, dst + span.dst_offset, span.nbytes) for span in destination.session.aux.spans
        )
        return WriteRow(ticket, chunk, spans, self._tag(chunk))

    # What the driver reports.

    def gathered(self, ticket: int, now: float, error: PdstageError | None = None, checksum: int = 0) -> None:
        """The gather's kernel ended. Comes for every `Gather`, of lost sessions too: its buffer was busy.

        `checksum` is of the bytes gathered, where the session has checksums.
        """
        chunk, buffer = self._flights[ticket]
        if error is not None or chunk.destination.phase is not DestinationPhase.LIVE:
            self._land(ticket, now, error)
            return
        chunk.phase, chunk.checksum = Phase.WRITING, checksum
        self.timers.set(("write", ticket), now + self.config.write_s)
        self.emit(Write(ticket, buffer, chunk, self._address(chunk), self._tag(chunk)))

    def completed(self, ticket: int, now: float, error: PdstageError | None = None, *, settled: bool = True) -> None:
        """A post ended. With `error` its outcome is unknown: it is never repeated, and the room fails.

        Not `settled`: its bytes may land even now. Then Drained would be a lie, and so would NoSession of this process:
        the session is lost, and nothing but its end at decode makes the memory safe.
        """
        orphan = self._orphans.pop(ticket, None)
        if orphan is not None and not settled:
            self._doubt(orphan)
        if ticket not in self._flights:
            return
        session = self._flights[ticket][0].destination.session
        if error is not None and not settled:
            self._doubt(session.id)
            self.lose(session, error, now)
        self._land(ticket, now, error)

    def _doubt(self, session_id: m.SessionId) -> None:
        self._unsettled[session_id] = None
        if len(self._unsettled) > _MAX_UNSETTLED:
            self._unsettled.popitem(last=False)

    def fenced(self, session: Session, now: float) -> None:
        """After `Detach`: posts of that session no longer read our memory. Gathers under way report themselves.

        What such posts wrote may still be on its way: until their tickets end, the session is not quiet.
        """
        error = TransportError("the session was lost while a write was in flight", remedy="see the session's error")
        for ticket, (chunk, _) in list(self._flights.items()):
            if chunk.destination.session is session and chunk.phase is Phase.WRITING:
                self._orphans[ticket] = session.id
                self._land(ticket, now, error)

    def _address(self, chunk: Chunk) -> int:
        """Where its lease lies in the destination's memory."""
        lane = chunk.destination.session.lanes[chunk.lane]
        return lane.base + chunk.cursor % lane.nbytes

    def _tag(self, chunk: Chunk) -> bytes:
        session = chunk.destination.session
        tag = wire.Tag(session.id, chunk.destination.epoch, chunk.number, *chunk.where, chunk.rects, chunk.checksum)
        return wire.encode_tag(tag, tuple(component.name for component in session.layout.components))

    def _tell_tag(self, chunk: Chunk, now: float) -> None:
        """Where the transport carries no tags: says of a write that is done what its tag would."""
        session = chunk.destination.session
        if session.tells_tags and chunk.phase is Phase.WRITTEN and session.id in self.sessions:
            self.send(session, m.Tagged(self._tag(chunk)), now)

    def _land(self, ticket: int, now: float, error: PdstageError | None) -> None:
        """A gather or write ended: gives back what it held and moves its record on."""
        chunk, buffer = self._flights.pop(ticket)
        self.timers.cancel(("write", ticket))
        self.buffers.done(chunk, buffer)
        destination = chunk.destination
        destination.in_flight -= 1
        if chunk.phase is Phase.WRITING:
            self._written(chunk, now, error)
        elif error is None or destination.phase is not DestinationPhase.LIVE:
            chunk.phase = Phase.DROPPED
        elif destination.may_direct(chunk.rects):
            self._go_direct(chunk, now)
        else:
            chunk.phase = Phase.DROPPED
            self._fail_destination(destination, error, now)
        self._landed(destination, now)
        self._settle(now)

    def _written(self, chunk: Chunk, now: float, error: PdstageError | None) -> None:
        destination = chunk.destination
        if error is not None and chunk.row:  # nothing of it can land any more, else the session were lost by now
            chunk.phase = Phase.BROKEN
            destination.unwritten -= 1
            self._row_failed(destination, f"the write of an aux row failed: {error.what}")
            self._maybe_close(destination, now)
            return
        if error is not None:  # what landed is unknown: not repeated, and its lease is not given back as if unused
            chunk.phase = Phase.BROKEN
            self._fail_destination(destination, error, now)
            return
        chunk.phase = Phase.WRITTEN
        self.counters.bytes_written += chunk.nbytes
        if chunk.row:
            self.counters.aux_rows += 1
        elif chunk.direct:
            self.counters.chunks_direct += 1
        else:
            self.counters.chunks_staged += 1
        destination.written.append(m.Written(chunk.number, *chunk.where))
        destination.unwritten -= 1
        self._tell_tag(chunk, now)
        self._maybe_close(destination, now)

    def _on_write_timer(self, ticket: int, now: float) -> None:
        chunk = self._flights[ticket][0]
        late = DeadlineExceeded(f"a write of {chunk.nbytes} bytes took over {self.config.write_s} s")
        self.lose(chunk.destination.session, late, now)

    def _in_flight(self, session_id: m.SessionId) -> bool:
        under_way = any(chunk.destination.session.id == session_id for chunk, _ in self._flights.values())
        return under_way or session_id in self._orphans.values()

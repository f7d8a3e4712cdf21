"""The chunks of a prefill rank: leases asked for, gathered and written into, or given back; or written in place.

Four things decide when a chunk goes: its data exists, its lease lies in an open *window*, a send buffer is free, and it
is its session's turn. A lane's window ends one capacity beyond its watermark, which decode tells and which only rises.
A lease may end beyond the window: it is held, but not written yet, since what was lent one lap before lies in the same
memory.

When a write fails, the question is what may still land:

    it failed, and nothing of it can land any more     the room fails, but for an aux row, which goes by message
    it failed, and its bytes may land even now         the session is lost, and *in doubt*: this process does not
                                                       answer for it any more that nothing can land (NoSession)
    its session was fenced while it was under way      it is an *orphan* until the transport tells how it ended
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pdstage.columns import Span
from pdstage.errors import Aborted, DeadlineExceeded, PdstageError, PeerError, TransportError, UsageError
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.destinations import Chunk, Destination, GivenRow, PieceLength, SubmittedChunk, clip, split
from pdstage.protocol.state import CHUNK, ChunkEvent, ChunkPhase, DestinationPhase, RoomEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.plan import Rects
    from pdstage.protocol.prefill import PrefillCore
    from pdstage.protocol.session import Session

_MAX_PIECES = 1024
"""The most pieces that a chunk too big for any lease is split into. With more it goes direct, waits, or fails."""
_MAX_DIRECT = 4
"""Direct chunks of one session under way; they need no send buffer."""
_MAX_IN_DOUBT = 4096
"""Sessions in doubt that are remembered by name. With more, every session that is over counts as one in doubt."""
_UNLEASED = ChunkPhase.PARKED, ChunkPhase.DROPPED
"""A chunk in these has given its lease back, or does."""


class Gather(NamedTuple):
    """Gather a chunk into send buffer `buffer`; answer `gathered(ticket)`.

    Or straight into its lease, at `address` in the destination's memory, where that is mapped here. So a gather counts
    as a write from when it is asked for: its lease is not given back, and Drained is not said, before it ended.
    """

    ticket: int
    buffer: int
    chunk: Chunk
    address: int


class Write(NamedTuple):
    """Write send buffer `buffer` to the chunk's lease as one post; answer `completed(ticket)`.

    Only the tag is left to be sent if the gather went straight there.
    """

    ticket: int
    buffer: int
    chunk: Chunk
    address: int
    tag: bytes


class WriteDirect(NamedTuple):
    """Write the chunk's source runs straight into the destination's pages; answer `completed(ticket)`."""

    ticket: int
    chunk: Chunk
    tag: bytes


class WriteRow(NamedTuple):
    """Write the room's aux row straight into the destination's as one post; answer `completed(ticket)`.

    `spans` are addresses here, there, and bytes.
    """

    ticket: int
    chunk: Chunk
    spans: tuple[Span, ...]
    tag: bytes


ChunkEffect: TypeAlias = Gather | Write | WriteDirect | WriteRow


class _Turns:
    """Chunks that wait, by session: sessions in turn, none with more than `most` under way.

    Only sessions whose turn may come are in line, so that the others cost nothing however many they are.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._queues: dict[Session, deque[Chunk]] = {}
        self._busy: dict[Session, int] = {}
        self.line: OrderedDict[Session, None] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._queues or self._busy)

    def queue(self, chunk: Chunk) -> None:
        session = chunk.destination.session
        self._queues.setdefault(session, deque()).append(chunk)
        self._line_up(session)

    def begin(self) -> Chunk | None:
        """The chunk whose turn it is; `done` must follow."""
        while self.line:
            session, _ = self.line.popitem(last=False)
            queue = self._queues[session]
            chunk = queue.popleft()
            while chunk.phase is not ChunkPhase.READY and queue:
                chunk = queue.popleft()
            if not queue:
                del self._queues[session]
            if chunk.phase is ChunkPhase.READY:
                self._busy[session] = self._busy.get(session, 0) + 1
                self._line_up(session)
                return chunk
        return None

    def done(self, session: Session) -> None:
        self._busy[session] -= 1
        if not self._busy[session]:
            del self._busy[session]
        self._line_up(session)

    def _line_up(self, session: Session) -> None:
        if session in self._queues and self._busy.get(session, 0) < self._most:
            self.line.setdefault(session)


class ChunkSender:
    """Chunks, from the first Reserve to the last completion.

    `choose(chunk)` says whether a chunk that may be written straight into pages should be. `piece` says how long chunks
    are to be; None: as long as they may.
    """

    def __init__(
        self,
        core: PrefillCore,
        n_buffers: int,
        buffer_nbytes: int,
        choose: Callable[[Chunk], bool],
        piece: PieceLength | None,
    ) -> None:
        self.endpoint = core.endpoint
        self.free = list(range(n_buffers))
        """Send buffers. A chunk queues only while its window is open, so none waits for a destination."""
        self.staged = _Turns(max(1, n_buffers - 1))
        self.direct = _Turns(_MAX_DIRECT)
        self.flights: dict[int, tuple[Chunk, int]] = {}
        """Gathers and writes under way, by ticket: the chunk, and its buffer or -1."""
        self.orphans: dict[int, m.SessionId] = {}
        """Writes whose session was fenced before they ended, by ticket."""
        self.core = core
        self._buffer_nbytes = buffer_nbytes
        self._limit = min(buffer_nbytes, core.endpoint.config.chunk_nbytes)
        self._choose, self._piece = choose, piece
        self._in_doubt: set[m.SessionId] = set()

    # What peers say.

    def on_lease(self, session: Session, destination: Destination | None, lease: m.Lease) -> None:
        self.on_watermark(session, lease)
        chunk = destination.chunks.get(lease.chunk) if destination is not None else None
        if chunk is not None and chunk.attempt == lease.attempt and not chunk.direct:
            if chunk.phase is ChunkPhase.RESERVING:
                nbytes = session.lanes[lease.lane].nbytes
                if lease.nbytes < chunk.nbytes or lease.cursor % nbytes + chunk.nbytes > nbytes:
                    raise PeerError(
                        f"a lease of {lease.nbytes} bytes at {lease.cursor} for {chunk.nbytes}", remedy="check the peer"
                    )
                chunk.lane, chunk.cursor = lease.lane, lease.cursor
                CHUNK.move(chunk, ChunkEvent.LEASED)
                self._hold(chunk)
                return
            if chunk.phase not in _UNLEASED and chunk.where == (lease.lane, lease.cursor):
                return
        self._give_back(session, lease)

    def on_refused(self, session: Session, destination: Destination | None, refused: m.Refused) -> None:
        chunk = destination.chunks.get(refused.chunk) if destination is not None else None
        if chunk is None or chunk.phase is not ChunkPhase.RESERVING or chunk.attempt != refused.attempt:
            return
        self.endpoint.cancel(self.reserve_again, chunk)
        destination = chunk.destination
        if refused.why != "too_big":
            CHUNK.move(chunk, ChunkEvent.REFUSED)
            if refused.why == "gone":
                self.core.fail_destination(destination, Aborted("decode has ended the room"))
            else:
                destination.unwritten -= 1
                self.core.maybe_close(destination)
            return
        most = refused.max_nbytes
        cut = split(chunk.rects, destination, most) if most > 0 else iter(())
        pieces = list(islice(cut, _MAX_PIECES + 1))
        if 1 < len(pieces) <= _MAX_PIECES:
            CHUNK.move(chunk, ChunkEvent.REFUSED)
            destination.unwritten -= 1
            for rects, nbytes in pieces:
                self._add_piece(destination, chunk.source, rects, nbytes)
        elif destination.may_direct(chunk.rects):
            self._go_direct(chunk)
        elif chunk.nbytes <= session.largest_lane:
            # Carved out for now: the span comes back, or a deadline comes.
            self.endpoint.repeat(self.reserve_again, chunk)
        else:
            error = PeerError(f"a chunk of {chunk.nbytes} bytes fits no lane", remedy="raise staging_nbytes at decode")
            self.core.fail_destination(destination, error)

    def on_recall(self, session: Session, destination: Destination | None, recall: m.Recall) -> None:
        """A lease that is not used goes back. Its chunk's attempt is raised first, so that no answer to the old one is
        accepted, and the time until it falls back to direct counts anew. If Returned is lost, decode treats the next
        Reserve, of a higher attempt, as the return of the old lease.
        """
        self.on_watermark(session, recall)
        chunk = destination.chunks.get(recall.chunk) if destination is not None else None
        if chunk is not None and chunk.attempt == recall.attempt and not chunk.direct:
            if chunk.phase in (ChunkPhase.RESERVING, ChunkPhase.HELD):
                chunk.attempt += 1
                self.endpoint.cancel(self.reserve_again, chunk)
                if chunk.source.ready:
                    self.reserve(chunk)
                else:
                    CHUNK.move(chunk, ChunkEvent.RECALLED)
            elif chunk.phase not in _UNLEASED:  # it is used, or about to be
                self.tell_tag(chunk)
                return
        if destination is not None and recall.chunk in destination.advances:
            destination.advances[recall.chunk] = None
        self._give_back(session, recall)

    def on_watermark(self, session: Session, said: m.Watermark | m.Lease | m.Recall) -> None:
        """A lane's watermark, which only rises: held chunks whose window it opens go on."""
        lane = said.lane
        if lane >= len(session.lanes):
            raise PeerError(f"a watermark of lane {lane}", remedy=f"Hello named {len(session.lanes)} lanes")
        if said.watermark <= session.marks.get(lane, 0):
            return
        session.marks[lane] = said.watermark
        for chunk in sorted(session.closed.pop(lane, ()), key=lambda chunk: chunk.cursor):
            if chunk.phase is ChunkPhase.HELD and chunk.lane == lane:
                self._hold(chunk)

    def _hold(self, chunk: Chunk) -> None:
        """It has a lease: it goes on once its window is open."""
        if self.is_open(chunk):
            self.endpoint.cancel(self.reserve_again, chunk)
            self.advance(chunk)
        else:
            chunk.destination.session.closed.setdefault(chunk.lane, []).append(chunk)

    def is_open(self, chunk: Chunk) -> bool:
        """Whether its lease lies in its lane's window, as far as decode has told."""
        session = chunk.destination.session
        return chunk.cursor + chunk.nbytes <= session.marks.get(chunk.lane, 0) + session.lanes[chunk.lane].nbytes

    # Chunks.

    def add(self, destination: Destination, source: SubmittedChunk) -> None:
        if destination.phase is not DestinationPhase.LIVE:
            return
        limit = min(self._limit, destination.session.largest_lane)
        for rects, nbytes in split(clip(source.rects, destination), destination, limit, self._piece):
            self._add_piece(destination, source, rects, nbytes)

    def _add_piece(self, destination: Destination, source: SubmittedChunk, rects: Rects, nbytes: int) -> None:
        if destination.phase is not DestinationPhase.LIVE:  # the piece before failed the room
            return
        chunk = Chunk(destination, len(destination.chunks), source, rects, nbytes)
        destination.chunks[chunk.number] = chunk
        source.chunks.append(chunk)
        destination.unwritten += 1
        chunk.attempt = int(chunk.number in destination.advances)  # nothing more of the first is accepted
        advance = destination.advances.pop(chunk.number, None)
        if destination.may_direct(rects) and (nbytes > self._buffer_nbytes or self._choose(chunk)):
            chunk.direct = True
            CHUNK.move(chunk, ChunkEvent.GO_DIRECT)
            if advance is not None:
                self._give_back(destination.session, advance)
            self.advance(chunk)
        elif nbytes > self._buffer_nbytes:
            error = UsageError(
                f"one row of {rects[0].component!r} does not fit a send buffer of {self._buffer_nbytes} bytes",
                remedy="raise staging_nbytes at prefill",
            )
            self.core.fail_destination(destination, error)
        elif advance is not None and nbytes <= advance.nbytes:
            chunk.attempt, chunk.waits_since = 0, self.endpoint.now
            self.endpoint.repeat(self.reserve_again, chunk)  # while its window is closed
            self.on_lease(destination.session, destination, advance)
        elif chunk.attempt and not source.ready:
            CHUNK.move(chunk, ChunkEvent.RECALLED)
        else:
            self.reserve(chunk)

    def reserve(self, chunk: Chunk) -> None:
        CHUNK.move(chunk, ChunkEvent.RESERVE)
        chunk.waits_since = self.endpoint.now
        self._send_reserve(chunk)

    def reserve_again(self, chunk: Chunk) -> None:
        waits_for_window = chunk.phase is ChunkPhase.HELD and not self.is_open(chunk)
        if chunk.phase is not ChunkPhase.RESERVING and not waits_for_window:
            return
        waited_s = self.endpoint.now - chunk.waits_since
        if (
            chunk.source.ready
            and waited_s >= self.endpoint.config.fall_back_after_s
            and chunk.destination.may_direct(chunk.rects)
        ):
            self._go_direct(chunk)
        else:
            self._send_reserve(chunk)

    def _send_reserve(self, chunk: Chunk) -> None:
        destination = chunk.destination
        self.endpoint.send(
            destination.session, m.Reserve(destination.epoch, chunk.number, chunk.attempt, chunk.nbytes, chunk.rects)
        )
        self.endpoint.repeat(self.reserve_again, chunk)

    def _go_direct(self, chunk: Chunk) -> None:
        """The chunk goes direct and returns its lease. One that comes later is of an old attempt, and is returned."""
        if chunk.phase is not ChunkPhase.RESERVING:
            destination = chunk.destination
            returned = m.Returned(destination.epoch, chunk.number, chunk.attempt, chunk.lane, chunk.cursor)
            self._give_back(destination.session, returned)
        self.endpoint.cancel(self.reserve_again, chunk)
        chunk.attempt += 1
        chunk.direct = True
        CHUNK.move(chunk, ChunkEvent.GO_DIRECT)
        self.endpoint.counters.chunks_fallen_back += 1
        self.advance(chunk)

    def _give_back(self, session: Session, lease: m.OfLease) -> None:
        self.endpoint.counters.leases_returned += 1
        self.endpoint.send(session, m.Returned(lease.epoch, lease.chunk, lease.attempt, lease.lane, lease.cursor))

    def advance(self, chunk: Chunk) -> None:
        """Queues a held chunk once its data exists and, unless direct, its window is open."""
        if chunk.phase is ChunkPhase.HELD and chunk.source.ready and (chunk.direct or self.is_open(chunk)):
            CHUNK.move(chunk, ChunkEvent.QUEUED)
            (self.direct if chunk.direct else self.staged).queue(chunk)

    def start_ready(self) -> None:
        """Begins every chunk whose turn it is: sessions in turn."""
        while self.direct.line and (chunk := self.direct.begin()) is not None:
            self._start(chunk, -1)
        while self.staged.line and self.free and (chunk := self.staged.begin()) is not None:
            self._start(chunk, self.free.pop())

    def _start(self, chunk: Chunk, buffer: int) -> None:
        room, endpoint = chunk.destination.room, self.endpoint
        ticket = endpoint.ticket()
        self.flights[ticket] = (chunk, buffer)
        chunk.destination.in_flight += 1
        if room is not None:
            room.in_flight += 1
            if room.on(RoomEvent.MOVED):
                endpoint.changed(room)
        if not chunk.direct:
            CHUNK.move(chunk, ChunkEvent.GATHER)
            endpoint.effects.append(Gather(ticket, buffer, chunk, self._address(chunk)))
            return
        CHUNK.move(chunk, ChunkEvent.WRITE)
        endpoint.after(endpoint.config.write_s, self.on_write_timer, ticket)
        write = self._row_write(ticket, chunk) if chunk.row else WriteDirect(ticket, chunk, self._tag(chunk))
        endpoint.effects.append(write)

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

    def gathered(self, ticket: int, error: PdstageError | None = None, checksum: int = 0) -> None:
        """The gather's kernel ended. Comes for every `Gather`, of lost sessions too: its buffer was busy.

        `checksum` is of the bytes gathered, where the session has checksums.
        """
        chunk, buffer = self.flights[ticket]
        if error is not None or chunk.destination.phase is not DestinationPhase.LIVE:
            self._end_flight(ticket, error)
            return
        CHUNK.move(chunk, ChunkEvent.WRITE)
        chunk.checksum = checksum
        self.endpoint.after(self.endpoint.config.write_s, self.on_write_timer, ticket)
        self.endpoint.effects.append(Write(ticket, buffer, chunk, self._address(chunk), self._tag(chunk)))

    def completed(self, ticket: int, error: PdstageError | None = None, *, settled: bool = True) -> None:
        """A post ended. With `error` it is unknown what landed: it is not repeated, and its room fails. A failed aux
        row goes by message instead.

        `settled=False`: its bytes may land even after this call. So the session is lost without a Drained, and this
        process later answers for it with NoSession(0) in place of its incarnation: it proves nothing.
        """
        orphan = self.orphans.pop(ticket, None)
        if orphan is not None and not settled:
            self._doubt(orphan)
        if ticket not in self.flights:
            return
        session = self.flights[ticket][0].destination.session
        if error is not None and not settled:
            self._doubt(session.id)
            self.core.lose(session, error)
        self._end_flight(ticket, error)

    def _doubt(self, session_id: m.SessionId) -> None:
        if len(self._in_doubt) <= _MAX_IN_DOUBT:  # one more tells that there are more
            self._in_doubt.add(session_id)

    def fenced(self, session: Session) -> None:
        """After `Detach`: posts of that session no longer read our memory. The driver still calls `gathered` for each
        gather under way.

        What such posts wrote may still be on its way: until their tickets end, the session is not quiet.
        """
        error = TransportError("the session was lost while a write was in flight", remedy="see the session's error")
        for ticket, (chunk, _) in list(self.flights.items()):
            if chunk.destination.session is session and chunk.phase is ChunkPhase.WRITING:
                self.orphans[ticket] = session.id
                self._end_flight(ticket, error)

    def _address(self, chunk: Chunk) -> int:
        """Where its lease lies in the destination's memory."""
        lane = chunk.destination.session.lanes[chunk.lane]
        return lane.base + chunk.cursor % lane.nbytes

    def _tag(self, chunk: Chunk) -> bytes:
        session = chunk.destination.session
        tag = wire.Tag(session.id, chunk.destination.epoch, chunk.number, *chunk.where, chunk.rects, chunk.checksum)
        return wire.encode_tag(tag, session.layout.names)

    def tell_tag(self, chunk: Chunk) -> None:
        """Where the transport carries no tags: says of a write that is done what its tag would."""
        session = chunk.destination.session
        if session.tags_as_messages and chunk.phase is ChunkPhase.WRITTEN and session.id in self.endpoint.sessions:
            self.endpoint.send(session, m.Tagged(self._tag(chunk)))

    def _end_flight(self, ticket: int, error: PdstageError | None) -> None:
        """A gather or write ended: gives back what it held and moves its destination on."""
        chunk, buffer = self.flights.pop(ticket)
        self.endpoint.cancel(self.on_write_timer, ticket)
        (self.direct if buffer < 0 else self.staged).done(chunk.destination.session)
        if buffer >= 0:
            self.free.append(buffer)
        destination = chunk.destination
        destination.in_flight -= 1
        if chunk.phase is ChunkPhase.WRITING:
            self._written(chunk, error)
        elif error is None or destination.phase is not DestinationPhase.LIVE:
            CHUNK.move(chunk, ChunkEvent.UNUSED)
        elif destination.may_direct(chunk.rects):
            self._go_direct(chunk)
        else:
            CHUNK.move(chunk, ChunkEvent.UNUSED)
            self.core.fail_destination(destination, error)
        self.core.flight_ended(destination)
        self.start_ready()

    def _written(self, chunk: Chunk, error: PdstageError | None) -> None:
        destination, counters = chunk.destination, self.endpoint.counters
        if error is None:
            CHUNK.move(chunk, ChunkEvent.WRITTEN)
            destination.written.append(m.Written(chunk.number, *chunk.where))
            counters.bytes_written += chunk.nbytes
            if chunk.row:
                counters.aux_rows += 1
            elif chunk.direct:
                counters.chunks_direct += 1
            else:
                counters.chunks_staged += 1
        else:  # what landed is unknown: not repeated, and its lease is not given back as if unused
            CHUNK.move(chunk, ChunkEvent.BROKEN)
            if not chunk.row:
                self.core.fail_destination(destination, error)
                return
            # Nothing of a row can land any more, else the session were lost by now.
            self.core.row_failed(destination, f"the write of an aux row failed: {error.what}")
        destination.unwritten -= 1
        self.tell_tag(chunk)
        self.core.maybe_close(destination)

    def on_write_timer(self, ticket: int) -> None:
        chunk = self.flights[ticket][0]
        late = DeadlineExceeded(f"a write of {chunk.nbytes} bytes took over {self.endpoint.config.write_s} s")
        self.core.lose(chunk.destination.session, late)

    def in_flight(self, session_id: m.SessionId) -> bool:
        under_way = any(chunk.destination.session.id == session_id for chunk, _ in self.flights.values())
        return under_way or session_id in self.orphans.values()

    def is_in_doubt(self, session_id: m.SessionId) -> bool:
        """Whether a post of that session ended without proof that its bytes have landed or never will."""
        return len(self._in_doubt) > _MAX_IN_DOUBT or session_id in self._in_doubt

    def drop(self, destination: Destination) -> None:
        """Nothing more of this destination begins."""
        for chunk in destination.chunks.values():
            if chunk.phase is not ChunkPhase.WRITTEN:
                self.endpoint.cancel(self.reserve_again, chunk)
                CHUNK.move(chunk, ChunkEvent.DROP)

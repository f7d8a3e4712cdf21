"""The chunks of a decode rank: asked for, granted, arrived, copied out, and counted at their writer's CloseOk.

A chunk has arrived when its tag says so, and is done when its scatter has ended too (I5). A CloseOk that lists a
chunk whose tag has not come yet waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pdstage.errors import PdstageError, PeerError, TransportError
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.lane import Lease
from pdstage.protocol.state import LEASE, LeaseEvent, LeasePhase, RoomEvent, WriterPhase

if TYPE_CHECKING:
    from pdstage.protocol.decode import DecodeCore
    from pdstage.protocol.decode_rooms import DecodeRoom, Writer
    from pdstage.protocol.room import OwnRows
    from pdstage.protocol.session import Session

_MAX_LEASES = 4096
"""Leases and waiting requests of one writer for one room. Further Reserves are dropped; the writer repeats them."""
_MAX_REPEATS = 65_536
"""Chunks noted of one writer of a room. Beyond it, a direct chunk that adds no coverage is ignored."""


class Scatter(NamedTuple):
    """Scatter a chunk, which lies in staging memory, into its room's items; answer `scattered(ticket)`."""

    ticket: int
    writer: Writer
    lease: Lease
    address: int
    nbytes: int
    checksum: int


class ChunkReceiver:
    """Chunks, from a writer's Reserve to its CloseOk."""

    def __init__(self, core: DecodeCore, rows: OwnRows) -> None:
        self.endpoint = core.endpoint
        self.flights: dict[int, Scatter] = {}
        """Scatters under way, by ticket."""
        self._leases = core.leases
        self._core = core
        self._rows = rows

    # Asked for.

    def on_reserve(self, session: Session, writer: Writer | None, reserve: m.Reserve) -> None:
        asked = reserve.epoch, reserve.chunk, reserve.attempt
        if writer is None or writer.room.ended or not writer.room.bound or writer.phase is WriterPhase.QUIET:
            self.endpoint.send(session, m.Refused(*asked, "gone", 0))
            return
        self._core.open_answered(writer)
        of_epoch = self._leases.held(session, reserve.epoch)
        held = of_epoch.get(reserve.chunk)
        if held is not None and held.phase is not LeasePhase.WAITING:
            # Of an advance that is too small the writer has not heard: it was recalled before an Open came.
            if held.attempt == reserve.attempt and (held.rects or reserve.nbytes <= held.nbytes):
                self._leases.send_lease(held)
                return
            if held.attempt > reserve.attempt or held.phase is not LeasePhase.GRANTED:
                return
            self._leases.release(held)
            held = None
        problem = writer.coverage.problem(reserve.rects) or self._size_problem(writer, reserve)
        if problem:
            self._core.fail_room(writer.room, PeerError(f"prefill rank {writer.number} asks for a lease: {problem}"))
        elif writer.coverage.covers(reserve.rects):
            self.endpoint.send(session, m.Refused(*asked, "covered", 0))
        elif held is None:
            if len(of_epoch) < _MAX_LEASES:  # else it asks again
                self._leases.enqueue(Lease(session, *asked, reserve.nbytes, reserve.rects, writer.room.priority))
        elif held.attempt <= reserve.attempt:  # it keeps its place in line
            held.attempt, held.nbytes, held.rects = reserve.attempt, reserve.nbytes, reserve.rects

    def _size_problem(self, writer: Writer, reserve: m.Reserve) -> str:
        nbytes = writer.staged_nbytes(reserve.rects)
        if not nbytes:
            return "its rectangles repeat a component, or are none"
        return "" if nbytes == reserve.nbytes else f"{reserve.nbytes} bytes for what has {nbytes} here"

    # Arrived.

    def tag(self, data: bytes) -> None:
        """One notification of the data plane."""
        self.endpoint.counters.tags_received += 1
        try:
            session = self.endpoint.sessions.get(wire.tag_session(data))
            known = session is not None and self._on_tag(session, wire.decode_tag(data, self._core.layout.names))
            self.endpoint.counters.tags_stale += not known
        except PeerError as error:
            self.endpoint.counters.tags_malformed += 1
            self.endpoint.warn(b"", error)
        self._core.settle()

    def on_tagged(self, session: Session, tagged: m.Tagged) -> None:
        """A tag sent as a message. A repeated one is dropped, as any known tag is (I7)."""
        tag = wire.decode_tag(tagged.tag, self._core.layout.names)
        if not session.tags_as_messages or tag.session != session.id:
            raise PeerError("a tag as a message, which is not for this session to say", remedy="check the peer")
        self.endpoint.counters.tags_received += 1
        self.endpoint.counters.tags_stale += not self._on_tag(session, tag)

    def _on_tag(self, session: Session, tag: wire.Tag) -> bool:
        """False if it changes nothing."""
        writer: Writer | None = session.claims.get(tag.epoch)
        if writer is None or writer.room.ended or not writer.room.bound:
            return False
        room = writer.room
        if tag.lane in (m.DIRECT, m.AUX):
            if not self._is_news(writer, tag):
                return False
        else:
            lease = self._leases.at(tag.lane, tag.cursor)
            if lease is None or lease.phase is not LeasePhase.GRANTED or lease.session is not session:
                return False
            nbytes = _nbytes_in(lease, writer, tag)
            if not nbytes:
                return False
            self._leases.advances.discard(lease)
            lease.rects = tag.rects
            writer.most_nbytes = max(writer.most_nbytes, nbytes)
            LEASE.move(lease, LeaseEvent.LAND)
            span = self._leases.spans[lease.lane]
            address = span.base + lease.cursor % span.nbytes
            scatter = Scatter(self.endpoint.ticket(), writer, lease, address, nbytes, tag.checksum)
            self.flights[scatter.ticket] = scatter
            room.pending += 1
            self.endpoint.effects.append(scatter)
        fresh = tag.lane == m.AUX or not writer.coverage.covers(tag.rects)
        writer.coverage.add(tag.rects)
        writer.arrived.add(tag.chunk)
        writer.row_arrived |= tag.lane == m.AUX
        self._core.open_answered(writer)
        if room.on(RoomEvent.MOVED):
            self.endpoint.changed(room)
        self._begun(room, anew=fresh)
        if writer.closing is not None:
            self.on_close_ok(session, writer, writer.closing)
        self._core.maybe_complete(room)
        return True

    def _is_news(self, writer: Writer, tag: wire.Tag) -> bool:
        """Whether the tag of a direct write is allowed and new (I6, I7)."""
        if tag.lane == m.AUX:
            return writer.has_aux and writer.room.row is not None and not writer.row_arrived and not tag.rects
        if not writer.direct or not tag.rects or writer.coverage.problem(tag.rects) or tag.chunk in writer.arrived:
            return False
        return len(writer.arrived) < _MAX_REPEATS or not writer.coverage.covers(tag.rects)

    def _begun(self, room: DecodeRoom, *, anew: bool = False) -> None:
        """Its first chunk has come, or was written and its tag may be lost."""
        self.endpoint.cancel(self._core.late, room, "wait")
        self.endpoint.after(self.endpoint.config.transfer_s, self._core.late, room, "transfer", anew=anew)

    # Copied out.

    def scattered(self, ticket: int, error: PdstageError | None = None, checksum: int = 0) -> None:
        """The scatter's kernel ended; `checksum` is of the bytes it found, where the session has checksums."""
        chunk = self.flights.pop(ticket)
        if error is None and chunk.writer.session.checksums and checksum != chunk.checksum:
            self.endpoint.counters.chunks_altered += 1
            error = TransportError(
                f"a chunk of {chunk.nbytes} bytes from prefill rank {chunk.writer.number} was altered on its way",
                remedy="send the room again; if it recurs, suspect the fabric or memory",
            )
        room = chunk.writer.room
        room.pending -= 1
        self._leases.release(chunk.lease)
        if error is not None:
            self._core.fail_room(room, error)
        self._core.maybe_complete(room)
        self._core.maybe_release(room)
        self._core.settle()

    # Counted.

    def on_close_ok(self, session: Session, writer: Writer | None, close: m.CloseOk) -> None:
        if writer is None:
            self.endpoint.send(session, m.Closed(close.epoch))
            return
        room = writer.room
        if not room.ended and writer.phase is not WriterPhase.QUIET:
            if not room.bound:
                raise PeerError("CloseOk for a room that was never opened", remedy="check the peer")
            nbytes, most = len(close.aux or b""), self.endpoint.config.max_aux_nbytes
            if nbytes > most:
                raise PeerError(f"{nbytes} aux bytes", remedy=f"at most {most}, see Config")
            if close.packed and nbytes != session.aux.nbytes:
                raise PeerError(f"an aux row packed in {nbytes} bytes", remedy="check the peer")
            writer.closing = close
            written = {(w.lane, w.cursor) for w in close.written}
            for lease in self._leases.of(session, close.epoch):
                lease.said_written = (lease.lane, lease.cursor) in written
            if not writer.arrived.issuperset([w.chunk for w in close.written]):
                self._begun(room)
                return
            if writer.owed_nbytes:
                n_staged = writer.most_nbytes and sum(w.lane not in (m.DIRECT, m.AUX) for w in close.written)
                session.staged_before[writer.owed_nbytes.bit_length()] = n_staged, writer.most_nbytes
            shortfall = self._shortfall(writer, close)
            if shortfall:
                self._core.fail_room(room, PeerError(f"prefill rank {writer.number} {shortfall}"))
            elif writer.has_aux:
                self._take_aux(writer, close)
        self._leases.release_of(session, close.epoch)
        self.endpoint.send(session, m.Closed(close.epoch))
        self._core.open_answered(writer)
        self._core.mark_quiet(writer)
        self._core.maybe_complete(room)

    def _shortfall(self, writer: Writer, close: m.CloseOk) -> str:
        """What is missing of a writer that says it has finished, in words; empty if nothing.

        Of components without positions it may have fewer slots than were asked for: then no more are needed (I9). What
        it says changes nothing else, so a writer that lies cannot leave a hole (I5).
        """
        given = dict(close.slots)
        for name, stop in writer.coverage.stops():
            if name in self._core.slots.components and name in given:
                problem = self._core.slots.compare(self.endpoint, writer.session, name, given[name], stop)
                if problem:
                    return f"does not fit: {problem}"
                writer.coverage.count(name, given[name])
        missing = writer.coverage.missing()
        return missing and f"finished without {missing}"

    def _take_aux(self, writer: Writer, close: m.CloseOk) -> None:
        """If the row came both by a write, which prefill took for failed, and in CloseOk, the bytes in CloseOk win."""
        writer.room.aux = close.aux
        if close.packed or (close.aux is None and writer.row_arrived):
            writer.room.shared = writer.session.aux
        if close.packed and self._rows.wanted:
            self.endpoint.counters.aux_fallbacks += 1
            what = "an aux row came by control message, not by the data transport"
            self.endpoint.warn_once(writer.session.route, what, "see prefill's log for why, and aux_fallbacks")


def _nbytes_in(lease: Lease, writer: Writer, tag: wire.Tag) -> int:
    """The staged bytes of the chunk that a tag tells of; 0 if the lease granted is not for it."""
    if (lease.epoch, lease.chunk) != (tag.epoch, tag.chunk):
        return 0
    if lease.rects:
        return lease.nbytes if lease.rects == tag.rects else 0
    nbytes = 0 if writer.coverage.problem(tag.rects) else writer.staged_nbytes(tag.rects)
    return nbytes if nbytes <= lease.nbytes else 0

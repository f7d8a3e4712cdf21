"""The prefill core: what engine, driver and peers may say to a prefill rank, and what follows.

No socket, thread or clock: inputs are its public methods and those of its parts that say so: an `Endpoint` (who talks),
whose effects are the output, and a `ChunkSender` (chunks and their leases). It is the table of its rooms and of each
destination's claim on them, and has a `HandshakeServer` (with whom).

A room serves all of its destinations and fails with the first that fails. Nothing of a destination begins after Abort,
and Drained is said only when nothing is in flight (I2, I8).
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pdstage.errors import Aborted, DeadlineExceeded, PdstageError, PeerError, UsageError
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.compat import Slots, lacking, open_problems
from pdstage.protocol.destinations import Chunk, Destination, GivenRow, PieceLength, PrefillRoom, SubmittedChunk
from pdstage.protocol.handshake import HandshakeServer
from pdstage.protocol.prefill_chunks import ChunkEffect, ChunkSender
from pdstage.protocol.room import OwnRows, room_id
from pdstage.protocol.session import (
    HOLD_EVERY_S,
    MAX_REMEMBERED,
    CoreEffect,
    Detach,
    Endpoint,
    Session,
    forgotten_at,
    remember,
)
from pdstage.protocol.state import DESTINATION, ChunkPhase, DestinationEvent, DestinationPhase, RoomEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdstage.plan import Rects
    from pdstage.protocol.config import Config

PrefillEffect: TypeAlias = CoreEffect | ChunkEffect
"""What the prefill core asks of its driver."""


MAX_PARKED_NBYTES = 64 << 20
"""Of Opens of one session for rooms that are not submitted yet: any peer may name any room."""
_OPEN_NBYTES = 4096
"""What an Open takes here beside its items."""


_ENDING = "the prefill node takes no new rooms"


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

    def refuses(self, session: Session, epoch: int) -> bool:
        mine = session.id, epoch
        return self.known.setdefault(session.topology.group_rank, mine) == mine


class PrefillCore:
    """The protocol's prefill half: of the node that says `welcome`.

    `choose(chunk)` says whether a chunk that may be written straight into pages should be; `direct`: any may be.
    `piece` says how long chunks are to be; None: as long as they may.
    """

    role, peer = "prefill", "decode"

    def __init__(
        self,
        incarnation: int,
        welcome: m.Welcome,
        config: Config,
        rows: OwnRows,
        *,
        n_buffers: int,
        buffer_nbytes: int,
        choose: Callable[[Chunk], bool],
        piece: PieceLength | None = None,
        direct: bool = True,
    ) -> None:
        self.layout = welcome.layout
        self.endpoint = Endpoint(incarnation, config, self)
        self.handshake = HandshakeServer(self, welcome)
        self.incarnation = incarnation
        self.sessions, self.counters = self.endpoint.sessions, self.endpoint.counters
        chunks = self.chunks = ChunkSender(self, n_buffers, buffer_nbytes, choose, piece)
        self.fenced = chunks.fenced
        self.endpoint.handlers = {
            m.Lease: chunks.on_lease, m.Open: self._on_open, m.Closed: self._on_closed,
            m.Watermark: chunks.on_watermark, m.Heartbeat: self._on_heartbeat, m.Ask: self._on_ask,
            m.Refused: chunks.on_refused, m.Recall: chunks.on_recall, m.Abort: self._on_abort,
            m.Bye: self._on_bye, m.NoSession: self._on_no_session,
        }  # fmt: skip
        self.by_key: dict[bytes, PrefillRoom] = {}
        """Rooms until they end."""
        self.destinations: dict[Destination, None] = {}
        """Until they are closed or drained, or their session is lost with nothing in flight."""
        self.pending: dict[bytes, dict[Destination, None]] = {}
        """Destinations that wait for their room, by its key."""
        self.ended: dict[bytes, Ended] = {}
        self.slots = Slots(self.layout)
        self._rows = rows
        self._unwanted = lru_cache(MAX_REMEMBERED)(self._lacked)
        """What is wrong with destinations' sessions together; a session that ends empties it."""
        self.settle = chunks.start_ready
        self._direct = direct
        self._draining = False

    # What the engine does.

    def submit(self, key: bytes, *, open_wait_s: float | None = None) -> PrefillRoom:
        """The engine will send this room. `open_wait_s` is until the last Open; None: as configured. Raises
        `UsageError` if it is being sent already.
        """
        if key in self.by_key:
            named = room_id(key)
            raise UsageError(
                f"room {named!r} is being sent already", remedy="wait for its end, or abort it", room=named
            )
        room = self.by_key[key] = PrefillRoom(key)
        ended = self.how_ended(key)
        self.ended.pop(key, None)
        self.counters.rooms_opened += 1
        room.open_wait_s = self.endpoint.config.open_wait_s if open_wait_s is None else open_wait_s
        room.waits_since = self.endpoint.now
        self.endpoint.after(room.open_wait_s, self.unopened, room)
        if ended is not None and not ended.begun:
            self.fail(room, given_up(room, ended.reason))
            self.ended[key].known.update(ended.known)
        for destination in list(self.pending.get(key, ())):
            self.unpark(destination)
            if room.ended:
                self.turn_away(destination, str(room.error))
            else:
                self.attach(room, destination)
        self.settle()
        return room

    def chunk(self, room: PrefillRoom, rects: Rects, items: Mapping[str, Any], *, ready: bool = True) -> SubmittedChunk:
        """More of the room: `rects` stored in `items`, with its data there or (not `ready`) still being computed.

        An empty one of a component without positions says that there are none of its slots. The caller has checked
        each against the layout. Raises `UsageError` after `finish`, and for what was given before.
        """
        source = SubmittedChunk(tuple([rect for rect in rects if rect.start < rect.stop]), items, ready)
        if room.ended:
            return source
        if room.finished:
            raise UsageError(f"room {room.id!r} got a chunk after finish()", remedy="chunks come first", room=room.id)
        if len(rects) > m.MAX_RECTS:
            raise UsageError(
                f"room {room.id!r} got a chunk of {len(rects)} components",
                remedy=f"give at most {m.MAX_RECTS} at once", room=room.id
            )  # fmt: skip
        for rect in rects:
            # A place in a destination's pages may be written once an epoch, and posts are not ordered.
            row = self.layout.row_tokens[rect.component]
            twice = next((r for source in room.sources for r in source.rects if r.overlaps(rect, row)), None)
            if twice is not None:
                whole = f", in chunks that begin at multiples of the {row} tokens that a row covers" if row > 1 else ""
                raise UsageError(
                    f"room {room.id!r} got {rect} after {twice}",
                    remedy=f"give each token of a layer once{whole}",
                    room=room.id,
                )
        for rect in rects:
            if rect.component in self.slots.components:
                room.slots[rect.component] = max(room.slots.get(rect.component, 0), rect.stop)
        room.sources.append(source)
        for destination in list(room.destinations.values()):
            self.chunks.add(destination, source)
        self.settle()
        return source

    def data_ready(self, source: SubmittedChunk) -> None:
        """The data of a chunk given with `ready=False` exists now."""
        source.ready = True
        for chunk in source.chunks:
            chunk.waits_since = self.endpoint.now
            if chunk.phase is ChunkPhase.PARKED:
                self.chunks.reserve(chunk)
            else:
                self.chunks.advance(chunk)
        self.settle()

    def finish(self, room: PrefillRoom, aux: bytes | GivenRow | None, *, open_wait_s: float | None = None) -> None:
        """No more chunks will come; `aux` goes to the destinations that want it. The last Open is awaited for
        `open_wait_s` from here; None: as `submit` said.

        A row is written straight into the destination's row if both sides can reach them. Else CloseOk carries it. To
        be called once; its caller has checked that bytes are within `max_aux_nbytes`.
        """
        if room.ended:
            return
        room.finished, room.aux = True, aux
        if open_wait_s is not None and (self.unopened, room) in self.endpoint.timers:
            room.open_wait_s, room.waits_since = open_wait_s, self.endpoint.now
            self.endpoint.after(open_wait_s, self.unopened, room)
        self._tell_askers(room.key, m.Asking, True)
        for destination in list(room.destinations.values()):
            self.add_row(destination)
            self.maybe_close(destination)
        self.maybe_complete(room)
        self.settle()

    def abort(self, room: PrefillRoom, reason: str) -> None:
        self.fail(room, Aborted(f"room {room.id!r} was aborted at prefill: {reason}"))

    def needs(self, route: bytes) -> bool:
        """Whether the connection to `route` is needed; those that peers made are theirs to give up."""
        return True

    def drain(self) -> None:
        """No room begins any more: decode ranks that wait for one, or will, are told at once. Those begun go on."""
        self._draining = True
        self.turn_all_away(_ENDING)

    def close(self) -> None:
        """Fails every room still open; `idle` tells when every destination has agreed that its room is over."""
        for room in list(self.by_key.values()):
            self.abort(room, "the node closes")
        self.turn_all_away("the prefill node closes")

    @property
    def idle(self) -> bool:
        return not self.chunks.flights and not self.destinations

    @property
    def memory_is_free(self) -> bool:
        return not self.chunks.flights

    # What peers say.

    def accepts(self, kind: type[m.AnyMessage], route: bytes) -> bool:
        return kind is m.Hello

    def on_stray(self, route: bytes, frame: wire.Frame) -> None:
        """A frame of no live session. NoSession proves that nothing is in flight, so it is sent after the last
        completion only; a session in doubt is answered with 0, which proves nothing.
        """
        if isinstance(frame.message, m.Hello):
            self.handshake.on_hello(route, frame, frame.message)
            return
        if self.chunks.in_flight(frame.session):
            return
        if frame.session.writer == self.incarnation:
            remember(self.handshake.lost, frame.session)
        proof = 0 if self.chunks.is_in_doubt(frame.session) else self.incarnation
        self.endpoint.send_loose(route, frame.session, m.NoSession(proof))

    def _on_ask(self, session: Session, _: Destination | None, ask: m.Ask | m.Wanted, *, again: bool = False) -> None:
        """Decode waits with this room, and asks, perhaps `again`, whether it is finished. It is told at finish(), or
        when it is not to be sent.
        """
        key, epoch = ask.room, ask.epoch
        room = self._waited(key)
        self._wanted_again(key, session, epoch)
        if room is None and (refusal := self._refusal(key, session, epoch)):
            self.endpoint.send(session, m.CloseFailed(epoch, m.brief(refusal)))
            return
        finished = room is not None and room.finished
        if not finished and len(session.asking) < m.MAX_WAITING:
            session.asking[key] = epoch
        if finished or not again:
            self.endpoint.send(session, m.Asking(epoch, finished))

    def _refusal(self, key: bytes, session: Session, epoch: int) -> str:
        """Why a room that is not here will not be sent to that destination; empty if it may."""
        ended = self.how_ended(key)
        if ended is not None and ended.refuses(session, epoch):
            return ended.reason
        return _ENDING if self._draining else ""

    def _waited(self, key: bytes) -> PrefillRoom | None:
        """The room with which decode waits, for pages say, if it is here: its wait for an Open begins anew, up to
        `max_deadline_s` in all.
        """
        room, endpoint = self.by_key.get(key), self.endpoint
        if room is not None and (self.unopened, room) in endpoint.timers:
            left_s = room.waits_since + max(endpoint.config.max_deadline_s, room.open_wait_s) - endpoint.now
            endpoint.after(min(left_s, max(room.open_wait_s, 3 * HOLD_EVERY_S)), self.unopened, room)
        return room

    def _on_heartbeat(self, session: Session, beat: m.Heartbeat) -> None:
        """Decode waits with these rooms. It asks again whether some are finished, in case an answer was lost; about no
        others: what it asked before is over. Only decode ends a session, so it is told if prefill needs it no more.
        """
        if beat.idle == m.SPARE and not session.claims:
            self.endpoint.send(session, m.Heartbeat(m.IDLE))
        session.asking.clear()
        for wanted in beat.asks:
            self._on_ask(session, None, wanted, again=True)
        for key in beat.waits:
            self._waited(key)

    def _on_open(self, session: Session, destination: Destination | None, opened: m.Open) -> None:
        refusal = ""
        if destination is None:
            for problem in open_problems(opened, session):
                raise PeerError(problem, remedy="check the peer")
            destination = Destination(session, opened, self._direct)
            room = self.by_key.get(opened.room)
            self._wanted_again(opened.room, session, opened.epoch)
            if room is None:
                refusal = self._refusal(opened.room, session, opened.epoch)
                if refusal and refusal != _ENDING:
                    self.endpoint.send(session, m.CloseFailed(opened.epoch, m.brief(refusal)))
                    return
                refusal = refusal or self._await_room(destination)
            if not refusal:
                self.destinations[destination] = None
                session.claims[opened.epoch] = destination
            if room is not None:
                self.attach(room, destination)
        if destination.phase is DestinationPhase.FAILING:
            refusal = destination.reason
        state = "refused" if refusal else "waiting" if destination.phase is DestinationPhase.WAITING else "accepted"
        self.endpoint.send(session, m.Opened(opened.epoch, state, refusal and m.brief(refusal)))

    def _await_room(self, destination: Destination) -> str:
        """Keeps a destination until its room begins; or why it is refused."""
        opened, session = destination.open, destination.session
        nbytes = _OPEN_NBYTES + sum(len(items.data) for items in opened.items)
        if session.parked_nbytes + nbytes > MAX_PARKED_NBYTES:
            return "too many rooms wait for prefill"
        session.parked_nbytes += nbytes
        destination.parked_nbytes = nbytes
        self.pending.setdefault(opened.room, {})[destination] = None
        self.endpoint.after(min(opened.deadline_s, self.endpoint.config.send_wait_s), self.never_begun, destination)
        return ""

    def _on_closed(self, _: Session, destination: Destination | None, closed: m.Closed) -> None:
        if destination is not None and destination.phase is DestinationPhase.CLOSING:
            self.forget(destination)

    def _on_abort(self, session: Session, destination: Destination | None, abort: m.Abort) -> None:
        if destination is None:
            if abort.room:
                self._give_up(abort.room, session, abort)
            self.endpoint.send(session, m.Drained(abort.epoch))
            return
        room = destination.room
        if destination.phase is DestinationPhase.CLOSING or (abort.finished and not destination.unwritten):
            DESTINATION.move(destination, DestinationEvent.DELIVERED)
            self.endpoint.send(session, m.Drained(abort.epoch))
            self.forget(destination)
            if room is not None:
                self.maybe_complete(room)
            return
        self._drain(destination)
        if room is None:
            self._give_up(destination.open.room, session, abort)
        elif room.destinations.get(destination.open.rank) is destination:
            self.fail(room, Aborted(f"room {room.id!r} was aborted at decode: {abort.reason}"))

    def _give_up(self, key: bytes, session: Session, abort: m.Abort) -> None:
        """A destination gives up a room that it never opened, or whose Open still waits here. If it already named the
        room in a later epoch, this changes nothing.

        A room that is not submitted yet fails when it is, for as long as its Open would have waited.
        """
        room, rank, mine = self.by_key.get(key), session.topology.group_rank, (session.id, abort.epoch)
        named = [one.epoch for one in self.pending.get(key, ()) if one.session is session]
        if max([*named, session.asking.get(key, -1)]) > abort.epoch:
            return
        ended = self.how_ended(key)
        if room is not None:
            if rank not in room.destinations:
                self.fail(room, given_up(room, abort.reason))
                ended = self.ended.get(key)
        elif ended is None or (ended.begun and ended.known.get(rank, mine) != mine):
            ended = Ended(abort.reason, {}, begun=False, until=self.endpoint.now + self.endpoint.config.open_wait_s)
            remember(self.ended, key, ended)
        if ended is not None:
            ended.known[rank] = mine

    def _wanted_again(self, key: bytes, session: Session, epoch: int) -> None:
        """A destination names a room in another epoch than the one it gave up: it wants the room again."""
        ended = self.how_ended(key)
        if ended is not None and not ended.begun and not ended.refuses(session, epoch):
            del self.ended[key]

    def _on_no_session(self, session: Session, _: m.NoSession) -> None:
        self.lose(session, forgotten_at("decode"))

    def _on_bye(self, session: Session, _: m.Bye) -> None:
        session.said_bye = True
        # An answer proves it quiet; later NoSession does, to whoever asks again.
        if not self.chunks.in_flight(session.id):
            self.endpoint.send(session, m.Bye())
        self.lose(session, PeerError("the decode node closed", remedy="route elsewhere"))

    # The end of sessions.

    def lose(self, session: Session, error: PdstageError) -> None:
        """The session is over: its rooms fail, nothing further is sent under it."""
        if not self.handshake.unlink(session):
            return
        self._unwanted.cache_clear()
        for destination in list(session.claims.values()):
            if destination.phase in (DestinationPhase.LIVE, DestinationPhase.FAILING):
                DESTINATION.move(destination, DestinationEvent.ABORTED)
                self.chunks.drop(destination)
                self.fail_destination(destination, error)
            if destination.in_flight == 0:
                self.forget(destination)
        if not session.said_bye:
            self.endpoint.warn(session.route, error)
        self.endpoint.effects.append(Detach(session))

    # What its parts ask of it.

    def in_use(self, session: Session) -> bool:
        return bool(session.claims)

    def waiting(self, session: Session) -> tuple[()]:
        return ()

    # Rooms and their destinations.

    def attach(self, room: PrefillRoom, destination: Destination) -> None:
        opened = destination.open
        destination.room = room
        DESTINATION.move(destination, DestinationEvent.ATTACHED)
        older = room.destinations.get(opened.rank)
        room.destinations[opened.rank] = destination
        room.n_destinations = opened.destinations
        if older is not None:
            self._drain(older)
        if room.carried:
            late = "its first pages hold something else by now (wait_carried)"
            self.fail(room, Aborted(f"room {room.id!r} has another destination, and {late}"))
            return
        room.deadline_s = min(opened.deadline_s, self.endpoint.config.max_deadline_s)
        self.endpoint.after(room.deadline_s, self.late, room)
        if room.opened:
            self.endpoint.cancel(self.unopened, room)
            problem = self._unwanted(tuple([destination.session for destination in room.destinations.values()]))
            if problem:
                self.fail(room, PeerError(problem, remedy="serve the same model with the same caches"))
                return
            if room.on(RoomEvent.CONNECTED):
                self.endpoint.changed(room)
        for source in room.sources:
            self.chunks.add(destination, source)
        if room.finished:
            self.add_row(destination)
        self.maybe_close(destination)

    def _lacked(self, sessions: tuple[Session, ...]) -> str:
        """Which part of this rank's state no destination takes, in words; asked where decode has pipeline stages."""
        if max([session.topology.pp_size for session in sessions]) == 1:
            return ""
        offered, taken, _ = zip(*(session.staged for session in sessions), strict=True)
        return lacking("decode", offered, taken)

    def maybe_close(self, destination: Destination) -> None:
        room = destination.room
        if destination.phase is not DestinationPhase.LIVE or room is None or destination.unwritten:
            return
        if not room.finished and (destination.shares or destination.open.aux):
            return
        for given in self._given(destination):
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
        if not self.slots.components:
            return ()
        named = destination.room.slots if destination.room is not None else {}
        owed = {share.component for share in destination.shares if share.component in self.slots.components}
        asked = sorted((name, stop) for name, (_, stop) in destination.asked.items() if name in owed)
        return tuple(m.Given(name, named.get(name, 0)) for name, stop in asked if name in named or not stop)

    def maybe_complete(self, room: PrefillRoom) -> None:
        """Success: finished, and every destination is known and has everything."""
        if (
            room.finished
            and len(room.destinations) == room.n_destinations
            and {destination.phase for destination in room.destinations.values()} == {DestinationPhase.CLOSING}
            and room.on(RoomEvent.COMPLETED)
        ):
            self.counters.rooms_succeeded += 1
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
        if destination.phase is not DestinationPhase.LIVE or room is None or not destination.open.aux:
            return
        if not isinstance(room.aux, GivenRow) or not session.aux.spans:
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
        if self._rows.span is None:
            return "aux rows are not within the data transport's reach, or not to be, at prefill"
        if destination.session.rows is None:
            return "aux rows are not within the data transport's reach, or not to be, at decode"
        return "a receiver was bound without an aux row" if destination.open.row is None else ""

    def row_failed(self, destination: Destination, why: str) -> None:
        if self._rows.wanted and destination.phase is DestinationPhase.LIVE:
            self.counters.aux_fallbacks += 1
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
        self.counters.lost(error)
        served = {rank: (destination.session.id, destination.epoch) for rank, destination in room.destinations.items()}
        remember(self.ended, room.key, Ended(str(error), served))
        for destination in list(room.destinations.values()):
            if destination.phase is DestinationPhase.LIVE:
                self.turn_away(destination, str(error))
        self._tell_askers(room.key, m.CloseFailed, m.brief(str(error)))
        self._end(room)

    def how_ended(self, key: bytes) -> Ended | None:
        """What is known of the last room of this name, if it failed and that still counts."""
        ended = self.ended.get(key)
        if ended is not None and ended.until <= self.endpoint.now:
            del self.ended[key]
            return None
        return ended

    def close_failed(self, destination: Destination) -> None:
        self.endpoint.send(destination.session, m.CloseFailed(destination.epoch, m.brief(destination.reason)))
        self.endpoint.repeat(self.close_again, destination)

    def _end(self, room: PrefillRoom) -> None:
        self.endpoint.cancel(self.unopened, room)
        self.endpoint.cancel(self.late, room)
        del self.by_key[room.key]
        for source in room.sources:
            source.chunks.clear()
        room.sources.clear()
        self.endpoint.changed(room)
        self._maybe_release(room)

    def _maybe_release(self, room: PrefillRoom) -> None:
        if room.ended and room.in_flight == 0 and not room.released:
            room.release()
            self.endpoint.changed(room)

    def _drain(self, destination: Destination) -> None:
        self.chunks.drop(destination)
        self.endpoint.cancel(self.close_again, destination)
        self.unpark(destination)
        DESTINATION.move(destination, DestinationEvent.ABORTED)
        self._maybe_drained(destination)

    def _maybe_drained(self, destination: Destination) -> None:
        if destination.phase is DestinationPhase.DRAINING and destination.in_flight == 0:
            if destination.session.id in self.sessions:
                self.endpoint.send(destination.session, m.Drained(destination.epoch))
            self.forget(destination)

    def flight_ended(self, destination: Destination) -> None:
        if destination.room is not None:
            destination.room.in_flight -= 1
            self._maybe_release(destination.room)
        self._maybe_drained(destination)

    def forget(self, destination: Destination) -> None:
        self.chunks.drop(destination)
        self.unpark(destination)
        self.endpoint.cancel(self.close_again, destination)
        self.destinations.pop(destination, None)
        destination.session.claims.pop(destination.epoch, None)
        # Chunks name their destination, and that its room: without this only the collector could free any of them.
        destination.chunks.clear()
        destination.room = None

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
        """Whoever waits for a room that has not begun."""
        for destination in list(chain.from_iterable(self.pending.values())):
            self.turn_away(destination, reason)
        for key in dict.fromkeys(chain.from_iterable(session.asking for session in self.sessions.values())):
            if key not in self.by_key:
                self._tell_askers(key, m.CloseFailed, m.brief(reason))

    def _tell_askers(self, key: bytes, answer: type[m.Asking | m.CloseFailed], said: bool | str) -> None:
        for session in self.sessions.values():
            if key in session.asking:
                self.endpoint.send(session, answer(session.asking.pop(key), said))  # type: ignore[arg-type]

    def turn_away(self, destination: Destination, reason: str) -> None:
        """Its room will not be sent, or not to its end."""
        self._wait_no_more(destination)
        DESTINATION.move(destination, DestinationEvent.FAILED)
        destination.reason = reason
        self.chunks.drop(destination)
        self.close_failed(destination)

    # What came too late.

    def unopened(self, room: PrefillRoom) -> None:
        what = f"no decode rank opened room {room.id!r} in {round(self.endpoint.now - room.waits_since, 3)} s"
        self.fail(room, DeadlineExceeded(what))

    def late(self, room: PrefillRoom) -> None:
        what = f"room {room.id!r} was not sent in its {room.deadline_s} s"
        remedy = "raise deadline_s at decode, or look at the slower side"
        self.fail(room, DeadlineExceeded(what, remedy=remedy, room=room.id))

    def never_begun(self, destination: Destination) -> None:
        self.turn_away(destination, f"prefill never began room {room_id(destination.open.room)!r}")


def given_up(room: PrefillRoom, reason: str) -> Aborted:
    return Aborted(f"room {room.id!r} was given up at decode: {reason}")

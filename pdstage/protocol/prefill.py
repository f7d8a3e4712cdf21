"""The prefill core: what engine, driver and peers may say to a prefill rank, and what follows.

No socket, thread or clock: inputs are its public methods and those of its parts that say so: an `Endpoint` (who talks),
whose effects are the output, and a `ChunkSender` (chunks and their leases). It also has a `HandshakeServer` (with whom)
and `PrefillRooms` (the room table).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from pdstage.errors import Aborted, PeerError, UsageError
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.compat import check_open
from pdstage.protocol.destinations import Chunk, Destination, GivenRow, PrefillRoom, SubmittedChunk
from pdstage.protocol.handshake import HandshakeServer, features
from pdstage.protocol.prefill_chunks import ChunkEffect, ChunkSender
from pdstage.protocol.prefill_rooms import Ended, PrefillRooms
from pdstage.protocol.room import NO_ROWS, OwnRows, room_id
from pdstage.protocol.session import HOLD_EVERY_S, CoreEffect, Detach, Endpoint, PeerWarning, Session, forgotten_at
from pdstage.protocol.state import DESTINATION, ChunkPhase, DestinationEvent, DestinationPhase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdstage.errors import PdstageError
    from pdstage.layout import Layout
    from pdstage.layout.topology import Topology
    from pdstage.plan import Rect
    from pdstage.protocol.config import Config
    from pdstage.protocol.destinations import PieceLength

PrefillEffect: TypeAlias = CoreEffect | ChunkEffect
"""What the prefill core asks of its driver."""


_ENDING = "the prefill node takes no new rooms"


class PrefillCore:
    """The protocol's prefill half.

    `choose(chunk)` says whether a chunk that may be written straight into pages should be; `direct`: any may be.
    `piece` says how long chunks are to be; None: as long as they may.
    `notifies`: the transport delivers tags; else they are sent as `Tagged`.
    """

    peer = "decode"

    def __init__(
        self,
        incarnation: int,
        *,
        layout: Layout,
        topology: Topology,
        transport: str,
        description: bytes,
        n_buffers: int,
        buffer_nbytes: int,
        config: Config,
        choose: Callable[[Chunk], bool],
        piece: PieceLength | None = None,
        direct: bool = True,
        notifies: bool = True,
        others: tuple[m.Offer, ...] = (),
        rows: OwnRows = NO_ROWS,
        model: tuple[m.Fact, ...] = (),
    ) -> None:
        offered = features(config, tags=not notifies)
        welcome = m.Welcome(
            topology, layout, transport, description, config.max_silence_s, offered, rows.columns, others, model
        )  # fmt: skip
        self.layout = layout
        self.topology = topology
        self.endpoint = Endpoint(incarnation, config, self)
        self.handshake = HandshakeServer(self.endpoint, welcome, self)
        self.on_other_version = self.handshake.on_other_version
        self.incarnation = incarnation
        self.sessions, self.counters = self.endpoint.sessions, self.endpoint.counters
        self.chunks = ChunkSender(self.endpoint, n_buffers, buffer_nbytes, choose, piece)
        self.rooms = PrefillRooms(self.endpoint, self.chunks, welcome, rows)
        self.endpoint.settle = self.chunks.start_ready
        self._direct = direct
        self._draining = False
        self._components = layout.names
        self._row_tokens = layout.row_tokens

    # What the engine does.

    def submit(self, key: bytes, now: float, *, open_wait_s: float | None = None) -> PrefillRoom:
        """The engine will send this room. `open_wait_s` is until the last Open; None: as configured. Raises
        `UsageError` if it is being sent already.
        """
        self.endpoint.now = now
        if key in self.rooms.by_key:
            named = room_id(key)
            raise UsageError(
                f"room {named!r} is being sent already", remedy="wait for its end, or abort it", room=named
            )
        room = self.rooms.by_key[key] = PrefillRoom(key)
        ended = self.rooms.how_ended(key)
        self.rooms.ended.pop(key, None)
        self.endpoint.counters.rooms_opened += 1
        room.open_wait_s = self.endpoint.config.open_wait_s if open_wait_s is None else open_wait_s
        self.endpoint.after(room.open_wait_s, self.rooms.unopened, room)
        if ended is not None and not ended.begun:
            self.rooms.fail(room, given_up(room, ended.reason))
            self.rooms.ended[key].known.update(ended.known)
        for destination in list(self.rooms.pending.get(key, ())):
            self.rooms.unpark(destination)
            if room.ended:
                self.rooms.turn_away(destination, str(room.error))
            else:
                self.rooms.attach(room, destination)
        self.endpoint.settle()
        return room

    def chunk(
        self, room: PrefillRoom, rects: tuple[Rect, ...], items: Mapping[str, Any], now: float, *, ready: bool = True
    ) -> SubmittedChunk:
        """More of the room: `rects` stored in `items`, with its data there or (not `ready`) still being computed.

        An empty one of a component without positions says that there are none of its slots.
        """
        self.endpoint.now = now
        source = SubmittedChunk(tuple([rect for rect in rects if rect.start < rect.stop]), items, ready)
        if room.ended:
            return source
        if room.finished:
            raise UsageError(f"room {room.id!r} got a chunk after finish()", remedy="chunks come first", room=room.id)
        self._check_rects(room, rects)
        for rect in rects if self.rooms.slots.names else ():
            if rect.component in self.rooms.slots.names:
                room.slots[rect.component] = max(room.slots.get(rect.component, 0), rect.stop)
        room.sources.append(source)
        for destination in list(room.destinations.values()):
            self.chunks.add(destination, source)
        self.endpoint.settle()
        return source

    def _check_rects(self, room: PrefillRoom, rects: tuple[Rect, ...]) -> None:
        if not 0 < len(rects) <= m.MAX_RECTS or len({rect.component for rect in rects}) != len(rects):
            raise UsageError(
                f"room {room.id!r} got a chunk of {len(rects)} rectangles",
                remedy=f"give one of each component, 1 to {m.MAX_RECTS}",
                room=room.id,
            )
        for rect in rects:
            known = rect.component in self._components
            least = 0 if rect.component in self.rooms.slots.names else 1
            ascends = 0 <= rect.start <= rect.stop - least
            if not known or not ascends or not 0 <= rect.layer_start < rect.layer_stop:
                raise UsageError(
                    f"room {room.id!r} got {rect}",
                    remedy=f"this layout has {', '.join(self._components)}; ranges ascend from 0",
                    room=room.id,
                )
            # A place in a destination's pages may be written once an epoch, and posts are not ordered.
            row = self._row_tokens[rect.component]
            twice = next((r for source in room.sources for r in source.rects if r.overlaps(rect, row)), None)
            if twice is not None:
                whole = f", in chunks that begin at multiples of the {row} tokens that a row covers" if row > 1 else ""
                raise UsageError(
                    f"room {room.id!r} got {rect} after {twice}",
                    remedy=f"give each token of a layer once{whole}",
                    room=room.id,
                )

    def data_ready(self, room: PrefillRoom, source: SubmittedChunk, now: float) -> None:
        """The data of a chunk given with `ready=False` exists now."""
        self.endpoint.now = now
        source.ready = True
        for chunk in source.chunks:
            chunk.waits_since = self.endpoint.now
            if chunk.phase is ChunkPhase.PARKED:
                self.chunks.reserve(chunk)
            elif chunk.phase is ChunkPhase.HELD:
                self.chunks.advance(chunk)
        self.endpoint.settle()

    def finish(
        self, room: PrefillRoom, aux: bytes | GivenRow | None, now: float, *, open_wait_s: float | None = None
    ) -> None:
        """No more chunks will come; `aux` goes to the destinations that want it. The last Open is awaited for
        `open_wait_s` from here; None: as `submit` said.

        A row is written straight into the destination's row if both sides can reach them. Else CloseOk carries it.
        """
        self.endpoint.now = now
        if room.ended:
            return
        if room.finished:
            raise UsageError(f"room {room.id!r} is finished already", remedy="call finish() once", room=room.id)
        if isinstance(aux, bytes) and len(aux) > self.endpoint.config.max_aux_nbytes:
            raise UsageError(
                f"room {room.id!r} has {len(aux)} aux bytes, the limit is {self.endpoint.config.max_aux_nbytes}",
                remedy="raise Config.max_aux_nbytes, or send it as a component",
                room=room.id,
            )
        room.finished, room.aux = True, aux
        if open_wait_s is not None and (self.rooms.unopened, room) in self.endpoint.timers:
            room.open_wait_s = open_wait_s
            self.endpoint.after(open_wait_s, self.rooms.unopened, room)
        for session in self.sessions.values():
            if room.key in session.asking:
                self.endpoint.send(session, m.Asking(session.asking.pop(room.key), True))
        for destination in list(room.destinations.values()):
            if destination.phase is DestinationPhase.LIVE:
                self.rooms.add_row(destination)
                self.rooms.maybe_close(destination)
        self.rooms.maybe_complete(room)
        self.endpoint.settle()

    def abort(self, room: PrefillRoom, reason: str, now: float) -> None:
        self.endpoint.now = now
        self.rooms.fail(room, Aborted(f"room {room.id!r} was aborted at prefill: {reason}"))

    def needs(self, route: bytes) -> bool:
        """Whether the connection to `route` is needed; those that peers made are theirs to give up."""
        return True

    def drain(self, now: float) -> None:
        """No room begins any more: decode ranks that wait for one, or will, are told at once. Those begun go on."""
        self.endpoint.now = now
        self._draining = True
        self.rooms.turn_all_away(_ENDING)

    def close(self, now: float) -> None:
        """Fails every room still open; `idle` tells when every destination has agreed that its room is over."""
        for room in list(self.rooms.by_key.values()):
            self.abort(room, "the node closes", now)
        self.rooms.turn_all_away("the prefill node closes")

    @property
    def quiet(self) -> bool:
        """Nothing of a live session is in flight, so that Bye may be said."""
        return not self.chunks.flights

    @property
    def idle(self) -> bool:
        return not self.chunks.flights and not self.rooms.destinations

    @property
    def memory_is_free(self) -> bool:
        return not self.chunks.flights

    # What peers say.

    def on_frame(self, route: bytes, session: Session | None, frame: wire.Frame) -> None:  # noqa: PLR0912  (a message each)
        message = frame.message
        if isinstance(message, m.Hello):
            self.handshake.on_hello(route, frame, message)
            return
        if session is None:
            self._on_stray(route, frame)
            return
        if session.half_open and not isinstance(message, m.NoSession):  # decode has heard Welcome
            self.handshake.confirm(session)
        match message:
            case m.Lease():
                self.chunks.on_lease(session, message)
            case m.Open():
                self._on_open(session, message)
            case m.Closed():
                self._on_closed(session, message)
            case m.Watermark():
                self.chunks.raise_mark(session, message.lane, message.watermark)
            case m.Heartbeat():
                self.handshake.on_heartbeat(session, message)
                self._hold(session, message)
            case m.Ask():
                finished = self._asked(session, message.room, message.epoch)
                self.endpoint.send(session, m.Asking(message.epoch, finished))
            case m.Refused():
                self.chunks.on_refused(session, message)
            case m.Recall():
                self.chunks.on_recall(session, message)
            case m.Abort():
                self._on_abort(session, message)
            case m.Bye():
                self._on_bye(session)
            case m.NoSession():
                self.lose(session, forgotten_at("decode"))
            case _:
                raise PeerError(f"{type(message).__name__} sent to a prefill node", remedy="check the peer's role")

    def accepts(self, kind: type[m.AnyMessage], route: bytes) -> bool:
        return kind is m.Hello

    def _on_stray(self, route: bytes, frame: wire.Frame) -> None:
        """A frame of no live session. NoSession proves that nothing is in flight, so it is sent after the last
        completion only; a session in doubt is answered with 0, which proves nothing.
        """
        if self.chunks.in_flight(frame.session):
            return
        if frame.session.writer == self.endpoint.incarnation:
            self.handshake.never_again(frame.session)
        proof = 0 if self.chunks.is_in_doubt(frame.session) else self.endpoint.incarnation
        self.endpoint.send_loose(route, frame.session, m.NoSession(proof))

    def _asked(self, session: Session, key: bytes, epoch: int) -> bool:
        """Decode waits with this room, and asks whether it is finished. If not, it is told at finish()."""
        room = self._waited(key)
        self._wanted_again(key, session, epoch)
        if room is not None and room.finished:
            return True
        if len(session.asking) < m.MAX_WAITING:
            session.asking[key] = epoch
        return False

    def _waited(self, key: bytes) -> PrefillRoom | None:
        """The room with which decode waits, for pages say, if it is here: its wait for an Open begins anew."""
        room = self.rooms.by_key.get(key)
        if room is not None and (self.rooms.unopened, room) in self.endpoint.timers:
            self.endpoint.after(max(room.open_wait_s, 3 * HOLD_EVERY_S), self.rooms.unopened, room)
        return room

    def _hold(self, session: Session, beat: m.Heartbeat) -> None:
        """Decode waits with these rooms. It asks again whether some are finished, in case an answer was lost; about no
        others: what it asked before is over.
        """
        session.asking.clear()
        for wanted in beat.asks:
            if self._asked(session, wanted.room, wanted.epoch):
                self.endpoint.send(session, m.Asking(wanted.epoch, True))
        for key in beat.waits:
            self._waited(key)

    def _on_open(self, session: Session, opened: m.Open) -> None:
        destination: Destination | None = session.claims.get(opened.epoch)
        refusal = ""
        if destination is None:
            check_open(opened, session, self.layout)
            destination = Destination(session, opened, self._direct)
            room = self.rooms.by_key.get(opened.room)
            self._wanted_again(opened.room, session, opened.epoch)
            if room is None:
                refusal = self._await_room(destination)
            else:
                self.rooms.note(destination)
                self.rooms.attach(room, destination)
        if destination.phase is DestinationPhase.FAILING:
            refusal = destination.reason
        held = "waiting" if destination.phase is DestinationPhase.WAITING else "accepted"
        state = "refused" if refusal else held
        self.endpoint.send(session, m.Opened(opened.epoch, state, m.brief(refusal)))

    def _await_room(self, destination: Destination) -> str:
        """Keeps a destination until its room begins; or why it is refused."""
        opened, session = destination.open, destination.session
        ended = self.rooms.how_ended(opened.room)
        if ended is not None and ended.refuses(opened.rank, session.id, opened.epoch):
            return ended.reason
        if self._draining:
            return _ENDING
        return "" if self.rooms.park(destination) else "too many rooms wait for prefill"

    def _on_closed(self, session: Session, closed: m.Closed) -> None:
        destination: Destination | None = session.claims.get(closed.epoch)
        if destination is not None and destination.phase is DestinationPhase.CLOSING:
            self.rooms.forget(destination)

    def _on_abort(self, session: Session, abort: m.Abort) -> None:
        destination: Destination | None = session.claims.get(abort.epoch)
        if destination is None:
            if abort.room:
                self._give_up(abort.room, session, abort)
            self.endpoint.send(session, m.Drained(abort.epoch))
            return
        room = destination.room
        done = destination.phase is DestinationPhase.CLOSING or (abort.finished and not destination.unwritten)
        if done:
            DESTINATION.move(destination, DestinationEvent.DELIVERED)
            self.endpoint.send(session, m.Drained(abort.epoch))
            self.rooms.forget(destination)
            if room is not None:
                self.rooms.maybe_complete(room)
            return
        self.rooms.drain(destination)
        if room is None:
            self._give_up(destination.open.room, session, abort)
        elif room.destinations.get(destination.open.rank) is destination:
            self.rooms.fail(room, Aborted(f"room {room.id!r} was aborted at decode: {abort.reason}"))

    def _give_up(self, key: bytes, session: Session, abort: m.Abort) -> None:
        """A destination gives up a room that it never opened, or whose Open still waits here. If it already named the
        room in a later epoch, this changes nothing.

        A room that is not submitted yet fails when it is, for as long as its Open would have waited.
        """
        room, rank, mine = self.rooms.by_key.get(key), session.topology.group_rank, (session.id, abort.epoch)
        named = [one.epoch for one in self.rooms.pending.get(key, ()) if one.session is session]
        if max([*named, session.asking.get(key, -1)]) > abort.epoch:
            return
        ended = self.rooms.how_ended(key)
        if room is not None:
            if rank not in room.destinations:
                self.rooms.fail(room, given_up(room, abort.reason))
                ended = self.rooms.ended.get(key)
        elif ended is None or (ended.begun and ended.known.get(rank, mine) != mine):
            ended = Ended(abort.reason, {}, begun=False, until=self.endpoint.now + self.endpoint.config.open_wait_s)
            self.rooms.note_ended(key, ended)
        if ended is not None:
            ended.known[rank] = mine

    def _wanted_again(self, key: bytes, session: Session, epoch: int) -> None:
        """A destination names a room in another epoch than the one it gave up: it wants the room again."""
        ended = self.rooms.how_ended(key)
        if ended is not None and not ended.begun and not ended.refuses(session.topology.group_rank, session.id, epoch):
            del self.rooms.ended[key]

    def _on_bye(self, session: Session) -> None:
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
        self.rooms.lose(session, error)
        self.chunks.windows.forget(session)
        if not session.said_bye:
            self.endpoint.effects.append(PeerWarning(session.route, error))
        self.endpoint.effects.append(Detach(session))

    def fenced(self, session: Session, now: float) -> None:
        """After `Detach`: posts of that session no longer read our memory. Gathers under way report themselves."""
        self.endpoint.now = now
        self.chunks.fenced(session)

    # What its parts ask of it.

    def in_use(self, session: Session) -> bool:
        return bool(session.claims)

    def waiting(self, session: Session) -> tuple[()]:
        return ()


def given_up(room: PrefillRoom, reason: str) -> Aborted:
    return Aborted(f"room {room.id!r} was given up at decode: {reason}")

"""The decode core: what engine, driver and peers may say to a decode rank, and what follows.

No socket, thread or clock: inputs are its public methods and those of its `Endpoint` (who talks), whose effects are the
output. It is the table of its rooms, and has a `HandshakeClient` (with whom, and how long), `Leases` (staging memory)
and a `ChunkReceiver` (the chunks). Rooms and leases are apart: a room that ended may still be written to.

A room that ended keeps its *writers* until each is *quiet*: Closed, Drained, or its session fenced. Only then is the
room `released`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from pdstage.errors import Aborted, DeadlineExceeded, PdstageError, PeerError, UsageError
from pdstage.layout import merged
from pdstage.plan import Shares, shares
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.compat import Slots, lacking
from pdstage.protocol.decode_chunks import ChunkReceiver, Scatter
from pdstage.protocol.decode_rooms import Coverage, DecodeRoom, Writer
from pdstage.protocol.handshake import HandshakeClient
from pdstage.protocol.leases import Leases
from pdstage.protocol.room import OwnRows, room_id
from pdstage.protocol.session import MAX_REMEMBERED, CoreEffect, Detach, Endpoint, Session, forgotten_at, remember
from pdstage.protocol.state import WRITER, RoomEvent, State, WriterEvent, WriterPhase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pdstage.protocol.config import Config

DecodeEffect: TypeAlias = CoreEffect | Scatter
"""What the decode core asks of its driver."""


class DecodeCore:
    """The protocol's decode half: of the node that says `hello`."""

    role, peer = "decode", "prefill"

    def __init__(self, incarnation: int, hello: m.Hello, config: Config, rows: OwnRows) -> None:
        self.layout = hello.layout
        self.topology = hello.topology
        self.endpoint = Endpoint(incarnation, config, self)
        self.incarnation = incarnation
        self.sessions, self.counters = self.endpoint.sessions, self.endpoint.counters
        self.handshake = HandshakeClient(self, hello)
        self.leases = Leases(self.endpoint, hello.lanes)
        self.settle = self.leases.settle
        self.by_key: dict[bytes, DecodeRoom] = {}
        """Rooms until they end."""
        self.by_epoch: dict[int, DecodeRoom] = {}
        """Rooms until they are released."""
        self.slots = Slots(self.layout)
        self._deal = lru_cache(MAX_REMEMBERED)(self._dealt)
        """Who sends what, by a room's writers; a session that ends empties it."""
        self._given_up: dict[bytes, None] = {}
        """Of the last rooms that no writer was to wait for: announced again, it must hear that at once."""
        chunks = self.chunks = ChunkReceiver(self, rows)
        self.tag, self.scattered, self.unreachable = chunks.tag, chunks.scattered, self.handshake.unreachable
        self.endpoint.handlers = {
            m.Reserve: chunks.on_reserve, m.CloseOk: chunks.on_close_ok, m.Opened: self._on_opened,
            m.Heartbeat: self.handshake.on_heartbeat, m.Tagged: chunks.on_tagged, m.Asking: self._on_asking,
            m.Returned: self.leases.on_returned, m.CloseFailed: self._on_close_failed, m.Drained: self._on_drained,
            m.Bye: self._on_bye, m.NoSession: self._on_no_session,
            m.Welcome: lambda *_: None,  # a greeting said twice was answered twice
        }  # fmt: skip
        self._last_epoch = 0
        self._stranded: dict[m.SessionId, Session] = {}
        """Lost sessions whose writers may still write, by their id."""

    # What the engine does.

    def announce(self, key: bytes, *, deadline_s: float, wait_s: float | None = None) -> DecodeRoom:
        """The engine will receive this room, from those that `found` will name. `wait_s` is until its first chunk; else
        as configured. Raises `UsageError` if it is being received already.
        """
        if key in self.by_key:
            named = room_id(key)
            raise UsageError(
                f"room {named!r} is being received already", remedy="wait for its end, or abort it", room=named
            )
        self._last_epoch += 1
        room = DecodeRoom(key, self._last_epoch, deadline_s, self.endpoint.config.wait_s if wait_s is None else wait_s)
        self.by_key[key] = self.by_epoch[room.epoch] = room
        self.counters.rooms_opened += 1
        self.endpoint.after(deadline_s, self.late, room, "room")
        return room

    def found(self, room: DecodeRoom, writers: Mapping[int, bytes]) -> None:
        """Who sends an announced room: `writers` (number -> route). Greets those not known yet. The room fails if they
        are none or share a route, or if there are more than `max_peers` peers with them.

        If the room has ended meanwhile, Abort is sent to them: they may already hold its state and wait. It is not sent
        if the room is being received again, or if there are too many peers; then they wait for their deadline.
        """
        if self.by_key.get(room.key, room) is not room:
            return
        routes, most = set(writers.values()), self.endpoint.config.max_peers
        n_peers = len(routes | self.handshake.peers.keys())
        if not writers or len(routes) != len(writers):
            what = f"room {room.id!r} has {len(writers)} writers at {len(routes)} routes"
            self.fail_room(room, UsageError(what, remedy="name each prefill rank once, at least one", room=room.id))
        elif n_peers > most:
            self.counters.peers_crowded += 1
            what = f"room {room.id!r} would make {n_peers} peers of this node"
            remedy = f"raise Config.max_peers, now {most}, or use fewer prefill ranks"
            self.fail_room(room, UsageError(what, remedy=remedy, max_peers=most))
        elif room.ended:
            for route in writers.values():
                self.handshake.peer(route)
            self._give_up(room, writers.values())
        else:
            room.routes = dict(writers)
            for route in writers.values():
                peer = self.handshake.peer(route)
                peer.rooms[room] = None
                peer.given_up.pop(room.key, None)
            self.connect(room)

    def bind(
        self,
        room: DecodeRoom,
        asked: tuple[m.Asked, ...],
        items: Mapping[str, Any],
        *,
        wire_items: tuple[m.Items, ...] = (),
        priority: int = 0,
        row: int | None = None,
    ) -> None:
        """Publishes where the room goes. Writers may write the pages `wire_items`, if there are any, in place; one
        writer may write the aux row `row`. To be called once, when the pages may be written. Its caller has checked
        that `asked` are ascending ranges of this layout's components, one of each.
        """
        if room.ended:
            return
        room.bound, room.asked, room.items = True, asked, items
        room.wire_items, room.priority = wire_items, priority
        room.row = row if self.handshake.hello.rows is not None else None
        self.endpoint.cancel(self.ask, room)
        if room.state is State.WAITING_FOR_INPUT:
            self.open(room)

    def wait_to_bind(self, room: DecodeRoom) -> None:
        """The engine binds once `room.ready_to_bind`: prefill is asked as soon as may be."""
        if room.waits_to_bind or room.bound or room.ended:
            return
        room.waits_to_bind = True
        if (self.ask, room) in self.endpoint.timers:
            self.endpoint.cancel(self.ask, room)
            self.ask(room)

    def abort(self, room: DecodeRoom, reason: str) -> None:
        self.fail(room, Aborted(f"room {room.id!r} was aborted at decode: {reason}"))

    def fail(self, room: DecodeRoom, error: PdstageError) -> None:
        self.fail_room(room, error)
        self.settle()

    def close(self) -> None:
        """Ends every room; `idle` tells when every writer is quiet."""
        for room in list(self.by_key.values()):
            self.abort(room, "the node closes")

    @property
    def idle(self) -> bool:
        return not self.by_epoch and not self.chunks.flights and not self.leases.live()

    memory_is_free = idle

    # What peers say.

    def accepts(self, kind: type[m.AnyMessage], route: bytes) -> bool:
        """Outside a session, any message but Hello, from a route that this node still needs."""
        return kind is not m.Hello and self.needs(route)

    def on_stray(self, route: bytes, frame: wire.Frame) -> None:
        """A frame of no live session: an answer to a greeting, or of a session that is over for one side."""
        match frame.message:
            case m.Welcome() as welcome:
                self.handshake.on_welcome(route, frame, welcome)
            case m.HelloRefused() as refused:
                self.handshake.on_hello_refused(route, frame, refused)
            case m.NoSession() | m.Bye() as answer:
                stranded = self._stranded.get(frame.session)
                if stranded is not None and stranded.route == route:
                    if isinstance(answer, m.Bye) or answer.incarnation == stranded.id.writer:
                        self.fenced(stranded)
                    else:  # another process, or the writer is in doubt: only the driver's `fenced` frees the memory
                        self._leave_stranded(stranded)
                self.handshake.left(route, frame.session)
            case _ if (route, frame.session) not in self.handshake.leaving:  # else it has not heard our Bye yet
                self.endpoint.send_loose(route, frame.session, m.NoSession(self.incarnation))

    def _on_no_session(self, session: Session, message: m.NoSession) -> None:
        self.denied(session, forgotten_at("prefill"))
        if message.incarnation == session.id.writer:
            self.fenced(session)

    def _on_bye(self, session: Session, _: m.Bye) -> None:
        """A process says Bye after its last completion, so the session is quiet."""
        session.said_bye = True
        self.lose(session, PeerError("the prefill rank closed", remedy="route elsewhere"))
        self.fenced(session)

    def _on_asking(self, _: Session, writer: Writer | None, asking: m.Asking) -> None:
        if writer is None:
            return
        room = writer.room
        if room.bound or room.ended or room.ready_to_bind in (True, asking.finished):
            return
        room.ready_to_bind = asking.finished
        self.endpoint.cancel(self.ask, room)
        self.endpoint.changed(room)

    def _on_opened(self, _: Session, writer: Writer | None, opened: m.Opened) -> None:
        if writer is None or writer.phase not in (WriterPhase.OPENING, WriterPhase.OPENED):
            return
        if opened.state == "refused":
            self.fail_room(writer.room, PeerError(f"prefill rank {writer.number} refused the room: {opened.reason}"))
            return
        self.open_answered(writer)
        if not writer.shares and not writer.has_aux:  # it never writes, so no CloseOk of it is waited for
            self.mark_quiet(writer)

    def _on_close_failed(self, session: Session, writer: Writer | None, close: m.CloseFailed) -> None:
        if writer is None or writer.phase is WriterPhase.QUIET:
            self.endpoint.send(session, m.Abort(close.epoch, "the room is over", False))
        elif not writer.room.ended:
            error = Aborted(f"prefill rank {writer.number} gave the room up: {close.reason}")
            self.fail_room(writer.room, error, told=session.route)
        elif writer.phase is WriterPhase.ABORTING:
            self.send_abort(writer)
        else:
            writer.reason = "the room is over"
            self.abort_writer(writer)

    def _on_drained(self, session: Session, writer: Writer | None, drained: m.Drained) -> None:
        if writer is None or writer.phase is WriterPhase.QUIET:
            return
        if not writer.room.ended:
            self.fail_room(writer.room, PeerError(f"prefill rank {writer.number} dropped the room"))
        self.leases.release_of(session, drained.epoch)
        self.mark_quiet(writer)

    # The end of a session.

    def lose(self, session: Session, error: PdstageError) -> None:
        """The session is over: its rooms fail, nothing further is sent under it, what may still be written is
        quarantined.
        """
        if not self.endpoint.end(session):
            return
        self._deal.cache_clear()
        peer = self.handshake.peers.pop(session.route)
        for writer in list(session.claims.values()):
            self.fail_room(writer.room, error)
            self.cancel_timers(writer)
            if not (writer.direct or (writer.has_aux and writer.room.row is not None)):
                # It can write staging memory alone, which its leases account for.
                self.mark_quiet(writer)
        for room in list(peer.rooms):
            self.fail_room(room, error)
        self.leases.session_lost(session)
        if not session.said_bye:
            self.endpoint.warn(session.route, error)
        self.endpoint.effects.append(Detach(session))
        if self.holds(session):
            self._stranded[session.id] = session
            self._ask_stranded(session)
        self.handshake.hang_up(session.route)

    def denied(self, session: Session, error: PdstageError) -> None:
        """The process at the session's address does not know the session: it is another one, or lost it. It may hold a
        room that it never answered under this session and would wait for its Open, so it is sent Abort for that room.
        """
        unheard = [
            room
            for room in self.handshake.peers[session.route].rooms
            if session.id not in room.writers
            or room.writers[session.id].phase in (WriterPhase.UNOPENED, WriterPhase.OPENING)
        ]
        self.lose(session, error)
        for room in unheard:
            self.handshake.peer(session.route)
            self._give_up(room, (session.route,))

    def needs(self, route: bytes) -> bool:
        """Whether a handshake, a session, a Bye or a lost session still needs the connection of `route`."""
        sessions = (*self.handshake.leaving.values(), *self._stranded.values())
        return route in self.handshake.peers or any(session.route == route for session in sessions)

    def _ask_stranded(self, session: Session) -> None:
        """Asks a lost session's writer whether it still knows the session, at the pace of a heartbeat.

        A writer that was stopped or cut off comes back as the same process: its NoSession then proves it quiet, on
        transports too that fence nothing. The question is outside the session's order, so it keeps nothing alive.
        """
        if not self.holds(session):
            self._leave_stranded(session)
            return
        self.endpoint.send_loose(session.route, session.id, m.Heartbeat())
        self.endpoint.after(self.endpoint.config.max_silence_s / 3, self._ask_stranded, session)

    def _leave_stranded(self, session: Session) -> None:
        if self._stranded.pop(session.id, None) is not None:
            self.endpoint.cancel(self._ask_stranded, session)
            self.handshake.hang_up(session.route)

    def fenced(self, session: Session) -> None:
        """Nothing of a lost session lands any more, so all it held is free; the driver answers `Detach` so."""
        self._leave_stranded(session)
        self.leases.release_of(session, None)
        for writer in list(session.claims.values()):
            self.mark_quiet(writer)
        self.settle()

    def holds(self, session: Session) -> bool:
        """Whether a lost session that is not fenced yet still keeps memory: leases, or what it may write in place."""
        return bool(self.leases.of(session)) or any(
            writer.phase is not WriterPhase.QUIET for writer in session.claims.values()
        )

    # What its parts ask of it.

    def in_use(self, session: Session) -> bool:
        return bool(session.claims or self.handshake.peers[session.route].rooms)

    # Before the data.

    def connect(self, room: DecodeRoom) -> None:
        """Once every writer is greeted: deals the shares and opens."""
        if room.state is not State.BOOTSTRAPPING:
            return
        sessions = {}
        for number, route in room.routes.items():
            session = self.handshake.peers[route].session
            if session is None:
                return
            sessions[number] = session
        try:
            dealt = self._deal(tuple(sorted(sessions.items())))
        except UsageError as error:
            self.fail_room(room, PeerError(f"prefill cannot serve this layout: {error}", remedy="match both sides"))
            return
        # The last pipeline stage samples, so it knows the request's aux row.
        aux = max(sessions, key=lambda number: (sessions[number].topology.pp_rank, -number))
        for number, session in sessions.items():
            writer = Writer(room, number, session, dealt[number], has_aux=number == aux)
            room.writers[session.id] = session.claims[room.epoch] = writer
        room.on(RoomEvent.CONNECTED)
        self.endpoint.changed(room)
        if room.bound:
            self.open(room)
        elif room.waits_to_bind or room.key in self._given_up:
            self.ask(room)
        else:  # most engines bind at once, and then there is nothing to ask
            self.endpoint.repeat(self.ask, room)

    def _dealt(self, sessions: tuple[tuple[int, Session], ...]) -> dict[int, Shares]:
        layouts = {number: session.staged.offered for number, session in sessions}
        wanted = merged(self.layout, (session.staged.taken for _, session in sessions))
        problem = lacking("prefill", layouts.values(), (wanted,))
        if problem:
            raise UsageError(problem, remedy="serve the same model with the same caches")
        return shares(layouts, wanted, (self.topology.tp_size, self.topology.tp_rank))

    def ask(self, room: DecodeRoom) -> None:
        writer = next(writer for writer in room.writers.values() if writer.has_aux)
        self.endpoint.send(writer.session, m.Ask(room.epoch, room.key))

    def waiting(self, session: Session) -> Iterator[tuple[tuple[m.Wanted, ...], tuple[bytes, ...]]]:
        """The rooms of a session that are announced and not opened, as a Heartbeat says them."""
        unopened = [writer for writer in session.claims.values() if writer.phase is WriterPhase.UNOPENED]
        asks = [m.Wanted(one.room.epoch, one.room.key) for one in unopened if one.asks]
        waits = [one.room.key for one in unopened if not one.asks]
        n = m.MAX_WAITING
        for at in range(0, max(len(asks), len(waits)), n):
            yield tuple(asks[at : at + n]), tuple(waits[at : at + n])

    def open(self, room: DecodeRoom) -> None:
        self.endpoint.after(self.endpoint.config.open_s, self.late, room, "open_until")
        self.endpoint.after(room.wait_s, self.late, room, "wait")
        for writer in room.writers.values():
            WRITER.move(writer, WriterEvent.OPEN)
            writer.coverage = Coverage(writer.shares, room.asked, writer.session.common, self.slots.exact)
            writer.owed_nbytes = writer.staged_nbytes(writer.coverage.whole())
            self.leases.lend_in_advance(writer)  # so that a writer of little need not ask for staging memory
            self.send_open(writer)
        self.maybe_complete(room)

    def send_open(self, writer: Writer) -> None:
        room, topology = writer.room, self.topology
        opening = m.Open(
            room.epoch, room.key, writer.shares, room.asked, room.wire_items if writer.direct else (),
            topology.group_rank, topology.group_size, writer.has_aux, room.priority, room.deadline_s,
            room.row if writer.has_aux else None, self.leases.advances_of(writer.session, room.epoch),
        )  # fmt: skip
        self.endpoint.send(writer.session, opening)
        self.endpoint.repeat(self.send_open, writer)

    def fail_room(self, room: DecodeRoom, error: PdstageError, told: bytes = b"") -> None:
        """`told`: the route of the writer that said so, which may have begun the room again."""
        if not room.on(RoomEvent.FAILED, error):
            return
        self.counters.lost(error)
        if all(writer.phase is WriterPhase.UNOPENED for writer in room.writers.values()):
            self._give_up(room, [route for route in room.routes.values() if route != told])
        self._end(room)
        for writer in room.writers.values():
            self.leases.quarantine_of(writer.session, room.epoch)
            self.abort_writer(writer)
        self.maybe_release(room)

    def _give_up(self, room: DecodeRoom, routes: Iterable[bytes]) -> None:
        """Tells the writers at `routes` that no Open of this room follows; those without a session as they get one."""
        abort = m.Abort(room.epoch, m.brief(str(room.error)), False, room.key)
        remember(self._given_up, room.key)
        for route in routes:
            peer = self.handshake.peers.get(route)
            if peer is not None and peer.session is not None:
                self.endpoint.send(peer.session, abort)
            elif peer is not None and len(peer.given_up) < MAX_REMEMBERED:
                peer.given_up[room.key] = abort

    def _end(self, room: DecodeRoom) -> None:
        self.endpoint.cancel(self.ask, room)
        for kind in ("room", "open_until", "wait", "transfer"):
            self.endpoint.cancel(self.late, room, kind)
        del self.by_key[room.key]
        for route in room.routes.values():
            peer = self.handshake.peers.get(route)
            if peer is not None:
                peer.rooms.pop(room, None)
        for writer in room.writers.values():
            self.leases.forget_requests(writer.session, room.epoch)
        self.endpoint.changed(room)

    def abort_writer(self, writer: Writer) -> None:
        lives = writer.session.id in self.sessions
        if WRITER.move(writer, WriterEvent.ABORT):
            self.cancel_timers(writer)
            if lives and writer.phase is WriterPhase.ABORTING:
                self.endpoint.after(self.endpoint.config.drain_s, self._not_drained, writer)
                self.send_abort(writer)
        elif lives and writer.phase is WriterPhase.QUIET and not (writer.shares or writer.has_aux):
            # This writer owes nothing, so one Abort, not repeated, is enough: it lets prefill forget its Destination.
            self._say_abort(writer)

    def _say_abort(self, writer: Writer) -> None:
        room = writer.room
        reason = m.brief(str(room.error or writer.reason))
        self.endpoint.send(writer.session, m.Abort(room.epoch, reason, room.state is State.SUCCESS))

    def send_abort(self, writer: Writer) -> None:
        self._say_abort(writer)
        self.endpoint.repeat(self.send_abort, writer)

    def cancel_timers(self, writer: Writer) -> None:
        for call in (self.send_open, self.send_abort, self._not_drained, self.abort_writer):
            self.endpoint.cancel(call, writer)

    def mark_quiet(self, writer: Writer) -> None:
        WRITER.move(writer, WriterEvent.QUIET)
        self.cancel_timers(writer)
        self.maybe_release(writer.room)

    def maybe_complete(self, room: DecodeRoom) -> None:
        """Success: all covered, every scatter done, the aux bytes here (I5)."""
        if room.ended or not room.bound or room.pending:
            return
        for writer in room.writers.values():
            if writer.coverage.missing() or (writer.has_aux and writer.phase is not WriterPhase.QUIET):
                return
        problem = self._unlike(room)
        if problem:
            self.fail_room(room, PeerError(problem, remedy="give as many at each prefill rank", room=room.id))
        elif room.on(RoomEvent.COMPLETED):
            self.counters.rooms_succeeded += 1
            self._end(room)
            # A writer that owes nothing may not have heard its Open yet: that is still repeated.
            for writer in room.writers.values():
                if writer.phase is not WriterPhase.QUIET:
                    self.endpoint.after(self.endpoint.config.drain_s, self.abort_writer, writer)
            self.maybe_release(room)

    def _unlike(self, room: DecodeRoom) -> str:
        """Where the writers' numbers of slots disagree, in words; empty where they do not (I5)."""
        ends: dict[str, tuple[int, int]] = {}
        for writer in room.writers.values() if self.slots.components else ():
            for name, stop in writer.coverage.stops():
                number, other = ends.setdefault(name, (writer.number, stop))
                if name in self.slots.components and stop != other:
                    both = f"{other} from prefill rank {number} and {stop} from {writer.number}"
                    return f"component {name!r} got slots that are not whole: {both}"
        return ""

    def maybe_release(self, room: DecodeRoom) -> None:
        if not room.ended or room.pending or room.released:
            return
        if all(writer.phase is WriterPhase.QUIET for writer in room.writers.values()):
            del self.by_epoch[room.epoch]
            for writer in room.writers.values():
                del writer.session.claims[room.epoch]
            room.writers = {}  # writer and room name each other: without this only the collector could free either
            room.release()
            self.endpoint.changed(room)

    # Writers.

    def open_answered(self, writer: Writer) -> None:
        if WRITER.move(writer, WriterEvent.ANSWERED):
            self.endpoint.cancel(self.send_open, writer)
            if all(other.phase is not WriterPhase.OPENING for other in writer.room.writers.values()):
                self.endpoint.cancel(self.late, writer.room, "open_until")

    # What came too late.

    def late(self, room: DecodeRoom, kind: str) -> None:
        config = self.endpoint.config
        what, remedy = {
            "room": (f"did not end in its {room.deadline_s} s", "raise deadline_s, or look at the slower side"),
            "open_until": (f"was not answered by prefill in {config.open_s} s", "look at the prefill ranks"),
            "wait": (f"got no chunk in {room.wait_s} s", "was it submitted at prefill?"),
            "transfer": (f"got nothing new in {config.transfer_s} s", "look at the prefill ranks and the network"),
        }[kind]
        self.fail_room(room, DeadlineExceeded(f"room {room.id!r} {what}", remedy=remedy, room=room.id))

    def _not_drained(self, writer: Writer) -> None:
        late = DeadlineExceeded(f"prefill rank {writer.number} did not drain in {self.endpoint.config.drain_s} s")
        self.lose(writer.session, late)

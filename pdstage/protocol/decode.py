"""The decode core: what engine, driver and peers may say to a decode rank, and what follows.

Layer 2, pure: no socket, thread or clock. Inputs are its public methods, output is `take_effects()`.

It stands on six floors: `session_id` (who talks), `handshake` and `parting` (with whom, and how long), `lender` (the
ledger of leases), `receiving` (the room table), `arriving` (the chunks). Room table and ledger are apart: a room that
ended may still be written to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.errors import Aborted, DeadlineExceeded, PeerError, UsageError
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.arriving import Arriving
from pdstage.protocol.effects import Changed
from pdstage.protocol.handshake import Peer
from pdstage.protocol.inbox import DecodeRoom, Landing, Writer, WriterPhase
from pdstage.protocol.receiving import too_late
from pdstage.protocol.room import NO_ROWS, OwnRows, State, room_id
from pdstage.protocol.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdstage.layout import Layout
    from pdstage.protocol.config import Config
    from pdstage.topology import Topology

__all__ = ["DecodeCore", "DecodeRoom", "Landing", "Writer", "WriterPhase"]


class DecodeCore(Arriving):
    """The protocol's decode half. Not `notifies`: the transport carries no tags, so writers say them."""

    def __init__(
        self,
        incarnation: int,
        *,
        layout: Layout,
        topology: Topology,
        transport: str,
        description: bytes,
        lanes: tuple[m.LaneSpan, ...],
        config: Config,
        direct: bool = True,
        notifies: bool = True,
        others: tuple[m.Offer, ...] = (),
        rows: OwnRows = NO_ROWS,
    ) -> None:
        offered = (
            (m.DIRECT_FEATURE, direct), (m.CHECKSUM_FEATURE, config.checksums), (m.CONVERT_FEATURE, config.convert),
            (m.TAGS_FEATURE, not notifies),
        )  # fmt: skip
        features = tuple(name for name, offer in offered if offer)
        hello = m.Hello(
            topology, layout, transport, description, lanes, config.max_silence_s, features, rows.columns,
            rows.span if rows.wanted else None, others,
        )  # fmt: skip
        super().__init__(incarnation, config, hello, rows)
        self._last_epoch = 0
        self._handlers: dict[type, Callable[..., None]] = {
            m.Asking: self._on_asking,
            m.Opened: self._on_opened,
            m.Reserve: self._on_reserve,
            m.Returned: self._on_returned,
            m.Tagged: self._on_tagged,
            m.CloseOk: self._on_close_ok,
            m.CloseFailed: self._on_close_failed,
            m.Drained: self._on_drained,
            m.Heartbeat: self._on_heartbeat,
            m.Bye: self._on_bye,
        }

    # What the engine does.

    def announce(self, key: bytes, writers: Mapping[int, bytes], now: float, *, deadline_s: float) -> DecodeRoom:
        """The engine will receive this room from `writers` (number -> route). Greets those not known yet.

        Raises `UsageError` if the room is being received already, its writers are none or share a route, or there are
        `max_peers` others and all in use.
        """
        if key in self.rooms:
            named = room_id(key)
            raise UsageError(
                f"room {named!r} is being received already", remedy="wait for its end, or abort it", room=named
            )
        if not writers or len(set(writers.values())) != len(writers):
            named = room_id(key)
            raise UsageError(
                f"room {named!r} has {len(writers)} writers at {len(set(writers.values()))} routes",
                remedy="name each prefill rank once, at least one",
                room=named,
            )
        self._make_place(writers.values(), now)
        room = DecodeRoom(key, self._new_epoch(), dict(writers))
        room.deadline_s = deadline_s
        self.rooms[key] = self.epochs[room.epoch] = room
        self.counters.rooms_opened += 1
        self.timers.set(("room", room), now + deadline_s)
        self.timers.set(("bind", room), now + self.config.bind_s)
        for route in writers.values():
            peer = self._peer(route, now)
            peer.rooms[room] = None
            peer.given_up.pop(key, None)
        self._maybe_connected(room, now)
        return room

    def give_up(self, key: bytes, writers: Mapping[int, bytes], reason: str, now: float) -> None:
        """The engine gave this room up before its `writers` were known: they are told, greeted for it if need be.

        Nothing if the room is being received anew. Raises `UsageError` as `announce` does for too many peers.
        """
        if key in self.rooms:
            return
        self._make_place(writers.values(), now)
        for route in writers.values():
            self._peer(route, now)
        self._give_up(m.Abort(self._new_epoch(), m.brief(reason), False, key), writers.values(), now)

    def _new_epoch(self) -> int:
        self._last_epoch += 1
        return self._last_epoch

    def bind(
        self,
        room: DecodeRoom,
        asked: tuple[m.Asked, ...],
        items: Mapping[str, object],
        now: float,
        *,
        wire_items: tuple[m.Items, ...] = (),
        priority: int = 0,
        row: int | None = None,
    ) -> None:
        """Publishes the room's destinations. `wire_items` non-empty lets writers go direct, `row` one of them write
        that aux row. Call once `after` completed.

        Raises `UsageError` if it is bound already, or asks for a component twice, backwards, or that this layout lacks.
        """
        if room.bound:
            raise UsageError(f"room {room.id!r} is bound already", remedy="call bind() once", room=room.id)
        if len({ask.component for ask in asked}) != len(asked):
            raise UsageError(f"room {room.id!r} asks for a component twice", remedy="give one range each", room=room.id)
        for ask in asked:
            if ask.component not in self._components or not 0 <= ask.start <= ask.stop:
                raise UsageError(
                    f"room {room.id!r} asks for {ask.component!r} {ask.start}..{ask.stop}",
                    remedy=f"this layout has {', '.join(self._components)}; ranges ascend from 0",
                    room=room.id,
                )
        if room.ended:
            return
        room.bound, room.asked, room.items = True, asked, items
        room.wire_items, room.priority = wire_items, priority
        room.row = row if self._rows.within_reach else None
        self.timers.cancel(("bind", room))
        self.timers.cancel(("asking", room))
        if room.state is State.WAITING_FOR_INPUT:
            self._open(room, now)

    def abort(self, room: DecodeRoom, reason: str, now: float) -> None:
        self._fail(room, Aborted(f"room {room.id!r} was aborted at decode: {reason}"), now)
        self._settle(now)

    def close(self, now: float) -> None:
        """Ends every room; `idle` tells when every writer is quiet."""
        for room in list(self.rooms.values()):
            self.abort(room, "the node closes", now)

    @property
    def quiet(self) -> bool:
        """Nothing of ours is in flight, so that Bye may be said."""
        return not self._flights

    @property
    def idle(self) -> bool:
        return not self.epochs and not self._flights and not self.leases.lent

    @property
    def memory_is_free(self) -> bool:
        return self.idle

    def snapshot(self) -> tuple[object, ...]:
        """Everything that may differ between two states of this core, comparable and hashable."""
        rooms = []
        for epoch, room in sorted(self.epochs.items()):
            writers = tuple((session_id, writer.phase.name) for session_id, writer in sorted(room.writers.items()))
            rooms.append((epoch, room.key, room.status, room.pending, writers))
        return (tuple(rooms), self.leases.snapshot())

    # What peers say, in the order of DESIGN's table.

    def _dispatch(self, route: bytes, session: Session | None, frame: wire.Frame, now: float) -> None:
        message = frame.message
        match message:
            case m.Welcome():
                if session is None:
                    self._on_welcome(route, frame, message, now)
            case m.HelloRefused():
                self._on_hello_refused(route, frame, message, now)
            case m.NoSession() if session is not None:
                self.lose(session, PeerError("prefill does not know this session", remedy="it restarted"), now)
                if message.incarnation == session.id.writer:
                    self.fenced(session, now)
            case m.NoSession() | m.Bye() if session is None:
                stranded = self._stranded.get(frame.session)
                if stranded is not None and stranded.route == route:
                    self._on_stranded(stranded, message.incarnation if isinstance(message, m.NoSession) else None, now)
                self._on_farewell(route, frame.session)
            case _ if self._is_leaving(route, frame.session):
                pass  # it has not heard our Bye yet
            case _ if session is None:
                self.send_loose(route, frame.session, m.NoSession(self.incarnation))
            case _:
                handler = self._handlers.get(type(message))
                if handler is None:
                    raise PeerError(f"{type(message).__name__} sent to a decode node", remedy="check the peer's role")
                handler(session, message, now)

    def _on_bye(self, session: Session, bye: m.Bye, now: float) -> None:
        """A process says Bye after its last completion, so the session is quiet."""
        session.said_bye = True
        self.lose(session, PeerError("the prefill rank closed", remedy="route elsewhere"), now)
        self.fenced(session, now)

    def _on_asking(self, session: Session, asking: m.Asking, now: float) -> None:
        writer = self._writer(session, asking.epoch)
        if writer is None or not asking.finished:
            return
        room = writer.room
        if not room.bound and not room.ended and not room.ready_to_bind:
            room.ready_to_bind = True
            self.timers.cancel(("asking", room))
            self.emit(Changed(room))

    def _on_opened(self, session: Session, opened: m.Opened, now: float) -> None:
        writer = self._writer(session, opened.epoch)
        if writer is None or writer.phase not in (WriterPhase.OPENING, WriterPhase.OPENED):
            return
        if opened.state == "refused":
            self._fail(writer.room, PeerError(f"prefill rank {writer.number} refused the room: {opened.reason}"), now)
            return
        self._answered(writer)
        if not writer.shares and not writer.has_aux:  # told, and it never writes: nobody waits for its Close
            self._quiet(writer)

    def _on_close_failed(self, session: Session, close: m.CloseFailed, now: float) -> None:
        writer = self._writer(session, close.epoch)
        if writer is None or writer.phase is WriterPhase.QUIET:
            self.send(session, m.Abort(close.epoch, "the room is over", False), now)
        elif not writer.room.ended:
            self._fail(writer.room, Aborted(f"prefill rank {writer.number} gave the room up: {close.reason}"), now)
        elif writer.phase is WriterPhase.ABORTING:
            self._send_abort(writer, now)
        else:
            self._abort_writer(writer, "the room is over", now)

    def _on_drained(self, session: Session, drained: m.Drained, now: float) -> None:
        writer = self._writer(session, drained.epoch)
        if writer is None or writer.phase is WriterPhase.QUIET:
            return
        if not writer.room.ended:
            self._fail(writer.room, PeerError(f"prefill rank {writer.number} dropped the room"), now)
        self._release_of(session, drained.epoch, now)
        self._quiet(writer)

    # Time.

    def _on_timer(self, key: tuple[str, object], now: float) -> None:
        match key:
            case ("recalls",):
                self._recall_all(now)
            case (str() as kind, Peer() as peer):
                self._on_greeting_timer(kind, peer, now)
            case ("asking", DecodeRoom() as room):
                self._ask(room, now)
            case (str() as kind, DecodeRoom() as room):
                self._fail(room, too_late(kind, room, self.config), now)
            case ("open", Writer() as writer):
                self._send_open(writer, now)
            case ("abort", Writer() as writer):
                self._send_abort(writer, now)
            case ("drain", Writer() as writer):
                late = DeadlineExceeded(f"prefill rank {writer.number} did not drain in {self.config.drain_s} s")
                self.lose(writer.session, late, now)
            case (("bye" | "bye_until") as kind, Session() as session):
                self._on_farewell_timer(kind, session, now)
            case ("linger", Writer() as writer):
                self._abort_writer(writer, "finished", now)
            case ("stranded", Session() as session):
                self._ask_stranded(session, now)
            case (("beat" | "silence") as kind, Session() as session):
                if self.on_session_timer(kind, session, now):
                    silent = f"prefill was silent for {session.silence_s} s"
                    self.lose(session, DeadlineExceeded(silent, remedy="look at that node"), now)

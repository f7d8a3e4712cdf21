"""The rooms of a decode rank: met, opened, failed, complete, released.

Layer 2, pure. Must not know how frames arrive: `decode` hears them and calls here.

A room that ended keeps its *parts*, one a writer, until each is *quiet*: Closed, Drained, or its session fenced. Only
then is the room `released`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.convert import merged
from pdstage.errors import DeadlineExceeded, PdstageError, PeerError, UsageError
from pdstage.plan import Share, shares
from pdstage.protocol import messages as m
from pdstage.protocol.coverage import Coverage, of_writer
from pdstage.protocol.effects import Changed, Detach, PeerWarning
from pdstage.protocol.fit import lacking
from pdstage.protocol.inbox import DecodeRoom, Writer, WriterPhase
from pdstage.protocol.lender import Lender
from pdstage.protocol.room import Event, OwnRows, State
from pdstage.protocol.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdstage.protocol.config import Config
    from pdstage.protocol.handshake import Peer
    from pdstage.protocol.session import Session

_MAX_DEALT = 4096
_MAX_GIVEN_UP = 4096


class Receiving(Lender):
    """The decode core's room table. A room is in `rooms` until it ends, in `epochs` until it is released."""

    def __init__(self, incarnation: int, config: Config, hello: m.Hello, rows: OwnRows) -> None:
        super().__init__(incarnation, config, hello)
        self._rows = rows
        self.rooms: dict[bytes, DecodeRoom] = {}
        self.epochs: dict[int, DecodeRoom] = {}
        self.layout = hello.layout
        self.topology = hello.topology
        self._slots = Slots(hello.layout)
        self._dealt: dict[tuple[tuple[int, m.SessionId], ...], dict[int, tuple[Share, ...]]] = {}
        self._stranded: dict[m.SessionId, Session] = {}

    # Before the data.

    def _met(self, peer: Peer, now: float) -> None:
        for room in list(peer.rooms):
            self._maybe_connected(room, now)

    def _maybe_connected(self, room: DecodeRoom, now: float) -> None:
        """Once every writer is greeted: deals the shards and opens."""
        sessions = {}
        for number, route in room.routes.items():
            peer = self.peers.get(route)
            if peer is None or peer.session is None:
                return
            sessions[number] = peer.session
        if room.state is not State.BOOTSTRAPPING:
            return
        try:
            dealt = self._deal(sessions)
        except UsageError as error:
            self._fail(room, PeerError(f"prefill cannot serve this layout: {error}", remedy="match both sides"), now)
            return
        # The last pipeline stage samples, so it knows the request's aux row.
        aux = max(sessions, key=lambda number: (sessions[number].topology.pp_rank, -number))
        for number, session in sessions.items():
            writer = Writer(room, number, session, dealt[number], has_aux=number == aux)
            room.writers[session.id] = session.writers[room.epoch] = writer
        room.on(Event.CONNECTED)
        self.emit(Changed(room))
        if room.bound:
            self._open(room, now)
        else:  # at the next tick: most engines bind at once, and then there is nothing to ask
            self.timers.set(("asking", room), now)

    def _deal(self, sessions: dict[int, Session]) -> dict[int, tuple[Share, ...]]:
        key = tuple((number, session.id) for number, session in sorted(sessions.items()))
        dealt = self._dealt.get(key)
        if dealt is None:
            layouts = {
                n: session.converted.offered if session.converted else session.layout for n, session in sessions.items()
            }
            wanted = merged(
                self.layout, [session.converted.taken for session in sessions.values() if session.converted]
            )
            problem = lacking("prefill", layouts.values(), (wanted,))
            if problem:
                raise UsageError(problem, remedy="serve the same model with the same caches")
            dealt = shares(layouts, wanted, (self.topology.tp_size, self.topology.tp_rank))
            if len(self._dealt) >= _MAX_DEALT:
                self._dealt.clear()
            self._dealt[key] = dealt
        return dealt

    def _ask(self, room: DecodeRoom, now: float) -> None:
        writer = next(writer for writer in room.writers.values() if writer.has_aux)
        self.send(writer.session, m.Ask(room.epoch, room.key), now)
        self.timers.set(("asking", room), now + self.config.ask_s)

    def _open(self, room: DecodeRoom, now: float) -> None:
        self.timers.set(("open_until", room), now + self.config.open_s)
        self.timers.set(("wait", room), now + self.config.wait_s)
        for writer in room.writers.values():
            writer.phase = WriterPhase.OPENING
            writer.coverage = Coverage(writer.shares, room.asked, writer.session.common, self._slots.exact)
            writer.direct = bool(room.wire_items) and bool(writer.shares)
            self._send_open(writer, now)
        self._maybe_complete(room, now)

    def _send_open(self, writer: Writer, now: float) -> None:
        room, topology = writer.room, self.topology
        opening = m.Open(
            room.epoch,
            room.key,
            writer.shares,
            of_writer(room.asked, writer.session.common),
            room.wire_items if writer.direct else (),
            topology.group_rank,
            topology.group_size,
            writer.has_aux,
            room.priority,
            room.deadline_s,
            room.row if writer.has_aux else None,
        )
        self.send(writer.session, opening, now)
        self.repeat(("open", writer), now)

    def _fail(self, room: DecodeRoom, error: PdstageError, now: float) -> None:
        if not room.on(Event.FAILED, error):
            return
        self.counters.rooms_failed += 1
        if all(writer.phase is WriterPhase.UNOPENED for writer in room.writers.values()):
            self._give_up(m.Abort(room.epoch, m.brief(str(error)), False, room.key), room.routes.values(), now)
        self._end(room)
        for writer in room.writers.values():
            self._quarantine_of(writer.session, room.epoch, now)
            self._abort_writer(writer, str(error), now)
        self._maybe_release(room)

    def _give_up(self, told: m.Abort, routes: Iterable[bytes], now: float) -> None:
        """No writer need wait for this room's Open. Those not met yet are told when they answer."""
        for route in routes:
            peer = self.peers.get(route)
            if peer is not None and peer.session is not None:
                self.send(peer.session, told, now)
            elif peer is not None and len(peer.given_up) < _MAX_GIVEN_UP:
                peer.given_up[told.room] = told

    def _end(self, room: DecodeRoom) -> None:
        for kind in ("room", "bind", "asking", "open_until", "wait", "transfer"):
            self.timers.cancel((kind, room))
        if self.rooms.get(room.key) is room:
            del self.rooms[room.key]
        for route in room.routes.values():
            peer = self.peers.get(route)
            if peer is not None:
                peer.rooms.pop(room, None)
        for writer in room.writers.values():
            self.leases.forget_requests(writer.session, room.epoch)
        self.emit(Changed(room))

    def _abort_writer(self, writer: Writer, reason: str, now: float) -> None:
        if writer.phase is WriterPhase.UNOPENED:
            writer.phase = WriterPhase.QUIET
        elif writer.phase in (WriterPhase.OPENING, WriterPhase.OPENED):
            writer.phase, writer.reason = WriterPhase.ABORTING, reason
            self._stop_asking(writer)
            if writer.session.id in self.sessions:
                self.timers.set(("drain", writer), now + self.config.drain_s)
                self._send_abort(writer, now)
        elif (
            writer.phase is WriterPhase.QUIET
            and not (writer.shares or writer.has_aux)
            and writer.session.id in self.sessions
        ):
            # It writes nothing, so one word is enough: its record would wait for a room that is sent to others next.
            self.send(writer.session, m.Abort(writer.room.epoch, m.brief(reason), False), now)

    def _send_abort(self, writer: Writer, now: float) -> None:
        finished = writer.room.state is State.SUCCESS
        self.send(writer.session, m.Abort(writer.room.epoch, m.brief(writer.reason), finished), now)
        self.repeat(("abort", writer), now)

    def _stop_asking(self, writer: Writer) -> None:
        for kind in ("open", "abort", "drain", "linger"):
            self.timers.cancel((kind, writer))

    def _quiet(self, writer: Writer) -> None:
        writer.phase = WriterPhase.QUIET
        self._stop_asking(writer)
        self._maybe_release(writer.room)

    def _maybe_complete(self, room: DecodeRoom, now: float) -> None:
        """Success: all covered, every scatter done, the aux bytes here (I5)."""
        if room.ended or not room.bound or room.pending:
            return
        for writer in room.writers.values():
            if writer.coverage is None or not writer.coverage.complete:
                return
            if writer.has_aux and writer.phase is not WriterPhase.QUIET:
                return
        problem = self._unlike(room)
        if problem:
            self._fail(room, PeerError(problem, remedy="give as many at each prefill rank", room=room.id), now)
        elif room.on(Event.COMPLETED):
            self.counters.rooms_succeeded += 1
            self._end(room)
            # A writer that owes nothing may not have heard its Open yet: that is still repeated.
            for writer in room.writers.values():
                if writer.phase is not WriterPhase.QUIET:
                    self.timers.set(("linger", writer), now + self.config.drain_s)
            self._maybe_release(room)

    def _unlike(self, room: DecodeRoom) -> str:
        """Of which slots some writers brought their part and others did not, in words; empty if there are none (I5)."""
        ends: dict[str, tuple[int, int]] = {}
        for writer in room.writers.values() if self._slots else ():
            assert writer.coverage is not None
            for name, stop in writer.coverage.stops():
                number, other = ends.setdefault(name, (writer.number, stop))
                if name in self._slots and stop != other:
                    both = f"{other} from prefill rank {number} and {stop} from {writer.number}"
                    return f"component {name!r} got slots that are not whole: {both}"
        return ""

    def _maybe_release(self, room: DecodeRoom) -> None:
        if not room.ended or room.pending or room.released:
            return
        if all(writer.phase is WriterPhase.QUIET for writer in room.writers.values()):
            self.epochs.pop(room.epoch, None)
            for writer in room.writers.values():
                del writer.session.writers[room.epoch]
            room.writers = {}  # parts name their room: without this only the collector could free either
            room.release()
            self.emit(Changed(room))

    # Parts.

    def _writer(self, session: Session, epoch: int) -> Writer | None:
        return session.writers.get(epoch)

    def _answered(self, writer: Writer) -> None:
        if writer.phase is WriterPhase.OPENING:
            writer.phase = WriterPhase.OPENED
            self.timers.cancel(("open", writer))
            if all(p.phase is not WriterPhase.OPENING for p in writer.room.writers.values()):
                self.timers.cancel(("open_until", writer.room))

    # The end of a session.

    def lose(self, session: Session, error: PdstageError, now: float) -> None:
        """The session is over: its rooms fail, nothing further is sent under it, what may still be written is
        quarantined.
        """
        if self.sessions.pop(session.id, None) is None:
            return
        self.count_end(session)
        self.unwatch(session)
        self._dealt.clear()
        peer = self.peers.pop(session.route, None)
        for writer in list(session.writers.values()):
            self._fail(writer.room, error, now)
            self._stop_asking(writer)
            if not writer.writes_in_place:  # it may still write staging memory, never this room's own
                self._quiet(writer)
        if peer is not None:
            for room in list(peer.rooms):
                self._fail(room, error, now)
        self._strand(session, now)
        if not session.said_bye:
            self.emit(PeerWarning(session.route, error))
        self.emit(Detach(session))
        if self.holds(session):
            self._stranded[session.id] = session
            self._ask_stranded(session, now)
        self._hang_up(session.route)

    def needs(self, route: bytes) -> bool:
        return super().needs(route) or any(session.route == route for session in self._stranded.values())

    def _ask_stranded(self, session: Session, now: float) -> None:
        """Asks a lost session's writer whether it still knows the session, at the pace of a heartbeat.

        A writer that was stopped or cut off comes back as the same process: its NoSession then proves it quiet, on
        transports too that fence nothing. The question is outside the session's order, so it keeps nothing alive.
        """
        if not self.holds(session):
            self._leave_stranded(session)
            return
        self.send_loose(session.route, session.id, m.Heartbeat())
        self.timers.set(("stranded", session), now + self.config.max_silence_s / 3)

    def _on_stranded(self, session: Session, incarnation: int | None, now: float) -> None:
        """A lost session's route answers NoSession, or Bye: its writer itself is quiet, another proves nothing."""
        if incarnation in (None, session.id.writer):
            self.fenced(session, now)
        else:  # whoever may still write is not at this route any more
            self._leave_stranded(session)

    def _leave_stranded(self, session: Session) -> None:
        if self._stranded.pop(session.id, None) is not None:
            self.timers.cancel(("stranded", session))
            self._hang_up(session.route)

    def fenced(self, session: Session, now: float) -> None:
        """After `Detach`: nothing of that session lands any more, so all it held is free."""
        session.quiet = True
        self._leave_stranded(session)
        self._unstrand(session, now)
        for writer in list(session.writers.values()):
            self._quiet(writer)
        self._settle(now)

    def holds(self, session: Session) -> bool:
        """Whether a lost session that is not fenced yet still keeps memory: leases, or what it may write in place."""
        if self.leases.of_session(session):
            return True
        return any(writer.phase is not WriterPhase.QUIET for writer in session.writers.values())


def too_late(kind: str, room: DecodeRoom, config: Config) -> DeadlineExceeded:
    what, remedy = {
        "room": (f"did not end in its {room.deadline_s} s", "raise deadline_s, or look at the slower side"),
        "bind": (f"was not bound in {config.bind_s} s", "call bind() sooner or raise Config.bind_s"),
        "open_until": (f"was not answered by prefill in {config.open_s} s", "look at the prefill ranks"),
        "wait": (f"got no chunk in {config.wait_s} s", "was it submitted at prefill?"),
        "transfer": (f"got nothing new in {config.transfer_s} s", "look at the prefill ranks and the network"),
    }[kind]
    return DeadlineExceeded(f"room {room.id!r} {what}", remedy=remedy, room=room.id)

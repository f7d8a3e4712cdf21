"""The rooms of a decode rank: connected, opened, failed, complete, released; and each writer's part of a room.

A room that ended keeps its *writers* until each is *quiet*: Closed, Drained, or its session fenced. Only then is the
room `released`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdstage.errors import DeadlineExceeded, PdstageError, PeerError, UsageError
from pdstage.layout import merged
from pdstage.plan import Share, shares
from pdstage.protocol import messages as m
from pdstage.protocol.compat import Slots, lacking
from pdstage.protocol.coverage import Coverage
from pdstage.protocol.room import Room
from pdstage.protocol.session import Changed, Session
from pdstage.protocol.state import WRITER, RoomEvent, State, WriterEvent, WriterPhase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pdstage.columns import Shared
    from pdstage.plan import Rect
    from pdstage.protocol.handshake import HandshakeClient, Peer
    from pdstage.protocol.leases import Leases
    from pdstage.protocol.session import Endpoint

_MAX_DEALT = 4096
_MAX_GIVEN_UP = 4096


@dataclass(slots=True, eq=False)
class Writer:
    """One writer of one room."""

    room: DecodeRoom
    number: int
    session: Session
    shares: tuple[Share, ...]
    phase: WriterPhase = WriterPhase.UNOPENED
    coverage: Coverage | None = None
    owed_nbytes: int = 0
    """All that it owes, staged as one chunk."""
    most_nbytes: int = 0
    """Of its largest staged chunk."""
    arrived: set[int] = field(default_factory=set)
    closing: m.CloseOk | None = None
    has_aux: bool = False
    direct: bool = False
    row_arrived: bool = False
    reason: str = ""

    @property
    def writes_in_place(self) -> bool:
        """Whether this writer was given addresses in the room's pages or aux row, which it writes without a lease."""
        return self.direct or (self.has_aux and self.room.row is not None)

    @property
    def asks(self) -> bool:
        """Whether it is asked if its room is finished."""
        return self.has_aux and not self.room.ready_to_bind

    def staged_nbytes(self, rects: tuple[Rect, ...]) -> int:
        """What a chunk of `rects` has in staging memory; 0 for none that could be one."""
        if len({rect.component for rect in rects}) != len(rects) or not rects:
            return 0
        session = self.session
        return session.stagings.of(self.shares, rects).nbytes(session.common.tokens(rects))


@dataclass(slots=True, eq=False)
class DecodeRoom(Room):
    """One room as its decode rank sees it. `items` are the engine's, opaque here."""

    epoch: int
    routes: dict[int, bytes] = field(default_factory=dict)
    """Of each writer, by its number; none while they are looked up."""
    writers: dict[m.SessionId, Writer] = field(default_factory=dict)
    bound: bool = False
    ready_to_bind: bool | None = None
    """Whether prefill has finished it; None until it has answered."""
    waits_to_bind: bool = False
    """Its engine looks whether prefill has finished it."""
    items: Mapping[str, Any] = field(default_factory=dict)
    wire_items: tuple[m.Items, ...] = ()
    asked: tuple[m.Asked, ...] = ()
    aux: bytes | None = None
    row: int | None = None
    """The number of the aux row that its writer may write."""
    shared: Shared | None = None
    """Once the aux is here, if it is a row: of which columns. Its bytes are in the row itself if `aux` is None."""
    pending: int = 0
    priority: int = 0
    deadline_s: float = 0.0
    wait_s: float = 0.0


class DecodeRooms:
    """The room table. A room is in `by_key` until it ends, in `by_epoch` until it is released."""

    def __init__(self, endpoint: Endpoint, handshake: HandshakeClient, leases: Leases) -> None:
        hello = handshake.hello
        self.endpoint = endpoint
        self.layout = hello.layout
        self.topology = hello.topology
        self.slots = Slots(hello.layout)
        self.by_key: dict[bytes, DecodeRoom] = {}
        self.by_epoch: dict[int, DecodeRoom] = {}
        self._handshake = handshake
        self._leases = leases
        self.dealt: dict[tuple[tuple[int, m.SessionId], ...], dict[int, tuple[Share, ...]]] = {}
        """Who sends what, by a room's writers; a session that ends empties it."""
        self._given_up: dict[bytes, None] = {}
        """Of the last rooms that no writer was to wait for: announced again, it must hear that at once."""

    # Before the data.

    def welcomed(self, peer: Peer) -> None:
        for room in list(peer.rooms):
            self.connect(room)

    def connect(self, room: DecodeRoom) -> None:
        """Once every writer is greeted: deals the shares and opens."""
        sessions = {}
        for number, route in room.routes.items():
            peer = self._handshake.peers.get(route)
            if peer is None or peer.session is None:
                return
            sessions[number] = peer.session
        if room.state is not State.BOOTSTRAPPING:
            return
        try:
            dealt = self._deal(sessions)
        except UsageError as error:
            self.fail(room, PeerError(f"prefill cannot serve this layout: {error}", remedy="match both sides"))
            return
        # The last pipeline stage samples, so it knows the request's aux row.
        aux = max(sessions, key=lambda number: (sessions[number].topology.pp_rank, -number))
        for number, session in sessions.items():
            writer = Writer(room, number, session, dealt[number], has_aux=number == aux)
            room.writers[session.id] = session.claims[room.epoch] = writer
        room.on(RoomEvent.CONNECTED)
        self.endpoint.effects.append(Changed(room))
        if room.bound:
            self.open(room)
        elif room.waits_to_bind or room.key in self._given_up:
            self.ask(room)
        else:  # most engines bind at once, and then there is nothing to ask
            self.endpoint.repeat(self.ask, room)

    def _deal(self, sessions: dict[int, Session]) -> dict[int, tuple[Share, ...]]:
        key = tuple((number, session.id) for number, session in sorted(sessions.items()))
        dealt = self.dealt.get(key)
        if dealt is None:
            layouts = {number: session.staged.offered for number, session in sessions.items()}
            wanted = merged(self.layout, (session.staged.taken for session in sessions.values()))
            problem = lacking("prefill", layouts.values(), (wanted,))
            if problem:
                raise UsageError(problem, remedy="serve the same model with the same caches")
            dealt = shares(layouts, wanted, (self.topology.tp_size, self.topology.tp_rank))
            if len(self.dealt) >= _MAX_DEALT:
                self.dealt.clear()
            self.dealt[key] = dealt
        return dealt

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
            writer.direct = bool(room.wire_items) and bool(writer.shares)
            writer.owed_nbytes = writer.staged_nbytes(writer.coverage.whole())
            self._leases.lend_in_advance(writer)  # so that a writer of little need not ask for staging memory
            self.send_open(writer)
        self.maybe_complete(room)

    def send_open(self, writer: Writer) -> None:
        room, topology = writer.room, self.topology
        opening = m.Open(
            room.epoch,
            room.key,
            writer.shares,
            room.asked,
            room.wire_items if writer.direct else (),
            topology.group_rank,
            topology.group_size,
            writer.has_aux,
            room.priority,
            room.deadline_s,
            room.row if writer.has_aux else None,
            self._leases.advances_of(writer.session, room.epoch),
        )
        self.endpoint.send(writer.session, opening)
        self.endpoint.repeat(self.send_open, writer)

    def fail(self, room: DecodeRoom, error: PdstageError) -> None:
        if not room.on(RoomEvent.FAILED, error):
            return
        self.endpoint.counters.rooms_failed += 1
        if all(writer.phase is WriterPhase.UNOPENED for writer in room.writers.values()):
            self.give_up(m.Abort(room.epoch, m.brief(str(error)), False, room.key), room.routes.values())
        self._end(room)
        for writer in room.writers.values():
            self._leases.quarantine_of(writer.session, room.epoch)
            self.abort_writer(writer, str(error))
        self.maybe_release(room)

    def give_up(self, abort: m.Abort, routes: Iterable[bytes]) -> None:
        """Tells the writers at `routes` not to wait for this room's Open; those without a session as they get one."""
        self._given_up[abort.room] = None
        if len(self._given_up) > _MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        for route in routes:
            peer = self._handshake.peers.get(route)
            if peer is not None and peer.session is not None:
                self.endpoint.send(peer.session, abort)
            elif peer is not None and len(peer.given_up) < _MAX_GIVEN_UP:
                peer.given_up[abort.room] = abort

    def _end(self, room: DecodeRoom) -> None:
        self.endpoint.cancel(self.ask, room)
        for kind in ("room", "open_until", "wait", "transfer"):
            self.endpoint.cancel(self.late, room, kind)
        if self.by_key.get(room.key) is room:
            del self.by_key[room.key]
        for route in room.routes.values():
            peer = self._handshake.peers.get(route)
            if peer is not None:
                peer.rooms.pop(room, None)
        for writer in room.writers.values():
            self._leases.forget_requests(writer.session, room.epoch)
        self.endpoint.effects.append(Changed(room))

    def abort_writer(self, writer: Writer, reason: str) -> None:
        if WRITER.move(writer, WriterEvent.ABORT):
            if writer.phase is WriterPhase.QUIET:
                return
            writer.reason = reason
            self.cancel_timers(writer)
            if writer.session.id in self.endpoint.sessions:
                self.endpoint.after(self.endpoint.config.drain_s, self._not_drained, writer)
                self.send_abort(writer)
        elif (
            writer.phase is WriterPhase.QUIET
            and not (writer.shares or writer.has_aux)
            and writer.session.id in self.endpoint.sessions
        ):
            # This writer owes nothing, so one Abort, not repeated, is enough: it lets prefill forget its Destination.
            self.endpoint.send(writer.session, m.Abort(writer.room.epoch, m.brief(reason), False))

    def send_abort(self, writer: Writer) -> None:
        finished = writer.room.state is State.SUCCESS
        self.endpoint.send(writer.session, m.Abort(writer.room.epoch, m.brief(writer.reason), finished))
        self.endpoint.repeat(self.send_abort, writer)

    def cancel_timers(self, writer: Writer) -> None:
        for call in (self.send_open, self.send_abort, self._not_drained):
            self.endpoint.cancel(call, writer)
        self.endpoint.cancel(self.abort_writer, writer, "finished")

    def mark_quiet(self, writer: Writer) -> None:
        WRITER.move(writer, WriterEvent.QUIET)
        self.cancel_timers(writer)
        self.maybe_release(writer.room)

    def maybe_complete(self, room: DecodeRoom) -> None:
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
            self.fail(room, PeerError(problem, remedy="give as many at each prefill rank", room=room.id))
        elif room.on(RoomEvent.COMPLETED):
            self.endpoint.counters.rooms_succeeded += 1
            self._end(room)
            # A writer that owes nothing may not have heard its Open yet: that is still repeated.
            for writer in room.writers.values():
                if writer.phase is not WriterPhase.QUIET:
                    self.endpoint.after(self.endpoint.config.drain_s, self.abort_writer, writer, "finished")
            self.maybe_release(room)

    def _unlike(self, room: DecodeRoom) -> str:
        """Where the writers' numbers of slots disagree, in words; empty where they do not (I5)."""
        ends: dict[str, tuple[int, int]] = {}
        for writer in room.writers.values() if self.slots.names else ():
            assert writer.coverage is not None
            for name, stop in writer.coverage.stops():
                number, other = ends.setdefault(name, (writer.number, stop))
                if name in self.slots.names and stop != other:
                    both = f"{other} from prefill rank {number} and {stop} from {writer.number}"
                    return f"component {name!r} got slots that are not whole: {both}"
        return ""

    def maybe_release(self, room: DecodeRoom) -> None:
        if not room.ended or room.pending or room.status >= 0x80:
            return
        if all(writer.phase is WriterPhase.QUIET for writer in room.writers.values()):
            self.by_epoch.pop(room.epoch, None)
            for writer in room.writers.values():
                del writer.session.claims[room.epoch]
            room.writers = {}  # writer and room name each other: without this only the collector could free either
            room.release()
            self.endpoint.effects.append(Changed(room))

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
        self.fail(room, DeadlineExceeded(f"room {room.id!r} {what}", remedy=remedy, room=room.id))

    def _not_drained(self, writer: Writer) -> None:
        late = DeadlineExceeded(f"prefill rank {writer.number} did not drain in {self.endpoint.config.drain_s} s")
        self.endpoint.owner.lose(writer.session, late)

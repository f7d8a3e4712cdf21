"""The prefill core: what engine, driver and peers may say to a prefill rank, and what follows.

Layer 2, pure: no socket, thread or clock. Inputs are its public methods, output is `take_effects()`.

It stands on five floors: `session_id` (who talks), `handshake` (with whom), `windows` (how far lanes may be written),
`borrower` (chunks and their leases), `sending` (the room table).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.errors import Aborted, DeadlineExceeded, PeerError, UsageError
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.opening import check_open
from pdstage.protocol.outbox import (
    Chunk,
    Destination,
    DestinationPhase,
    Ended,
    GivenRow,
    Phase,
    PrefillRoom,
    SubmittedChunk,
)
from pdstage.protocol.room import NO_ROWS, OwnRows, room_id
from pdstage.protocol.sending import Sending
from pdstage.protocol.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdstage.layout import Layout
    from pdstage.plan import Rect
    from pdstage.protocol.config import Config
    from pdstage.topology import Topology


class PrefillCore(Sending):
    """The protocol's prefill half. `choose` says whether a chunk that may go direct should; not `direct`: none may.

    Not `notifies`: the transport carries no tags, so they are said here.
    """

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
        direct: bool = True,
        notifies: bool = True,
        others: tuple[m.Offer, ...] = (),
        rows: OwnRows = NO_ROWS,
    ) -> None:
        offered = (
            (m.CHECKSUM_FEATURE, config.checksums), (m.CONVERT_FEATURE, config.convert), (m.TAGS_FEATURE, not notifies),
        )  # fmt: skip
        features = tuple(name for name, offer in offered if offer)
        welcome = m.Welcome(
            topology, layout, transport, description, config.max_silence_s, features, rows.columns, others
        )  # fmt: skip
        super().__init__(
            incarnation, config, welcome, n_buffers=n_buffers, buffer_nbytes=buffer_nbytes, choose=choose, rows=rows
        )  # fmt: skip
        self._direct = direct
        self._components = tuple(component.name for component in layout.components)
        self._row_tokens = layout.row_tokens
        self._handlers: dict[type, Callable[..., None]] = {
            m.Ask: self._on_ask,
            m.Open: self._on_open,
            m.Lease: self._on_lease,
            m.Refused: self._on_refused,
            m.Watermark: self._on_watermark,
            m.Recall: self._on_recall,
            m.Closed: self._on_closed,
            m.Abort: self._on_abort,
            m.Heartbeat: self._on_heartbeat,
            m.Bye: self._on_bye,
        }

    # What the engine does.

    def submit(self, key: bytes, now: float) -> PrefillRoom:
        """The engine will send this room. Raises `UsageError` if it is being sent already."""
        if key in self.rooms:
            named = room_id(key)
            raise UsageError(
                f"room {named!r} is being sent already", remedy="wait for its end, or abort it", room=named
            )
        room = self.rooms[key] = PrefillRoom(key)
        ended = self._how_ended(key, now)
        self._ended.pop(key, None)
        self.counters.rooms_opened += 1
        self.timers.set(("open_wait", room), now + self.config.open_wait_s)
        if ended is not None and not ended.begun:
            self._fail(room, given_up(room, ended.reason), now)
            self._ended[key].known.update(ended.known)
        for destination in self._parked.take(key):
            self.timers.cancel(("parked", destination))
            if room.ended:
                self._turn_away(destination, str(room.error), now)
            else:
                self._attach(room, destination, now)
        self._settle(now)
        return room

    def chunk(
        self, room: PrefillRoom, rects: tuple[Rect, ...], items: Mapping[str, object], now: float, *, ready: bool = True
    ) -> SubmittedChunk:
        """More of the room: `rects` stored in `items`, with its data there or (not `ready`) still being computed.

        An empty one of a component without positions says that there are none of its slots.
        """
        source = SubmittedChunk(tuple(rect for rect in rects if rect.start < rect.stop), items, ready)
        if room.ended:
            return source
        if room.finished:
            raise UsageError(f"room {room.id!r} got a chunk after finish()", remedy="chunks come first", room=room.id)
        self._check_rects(room, rects)
        for rect in rects:
            if rect.component in self._slots:
                room.slots[rect.component] = max(room.slots.get(rect.component, 0), rect.stop)
        room.sources.append(source)
        for destination in list(room.destinations.values()):
            self._add(destination, source, now)
        self._settle(now)
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
            least = 0 if rect.component in self._slots else 1
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
        source.ready = True
        for chunk in source.chunks:
            chunk.waits_since = now
            if chunk.phase is Phase.PARKED:
                self._ask(chunk, now)
            elif chunk.phase is Phase.HELD:
                self._advance(chunk)
        self._settle(now)

    def finish(self, room: PrefillRoom, aux: bytes | GivenRow | None, now: float) -> None:
        """No more chunks will come; `aux` goes to the destinations that want it.

        A row goes straight into theirs where both sides have them within reach, else in their Close.
        """
        if room.ended:
            return
        if room.finished:
            raise UsageError(f"room {room.id!r} is finished already", remedy="call finish() once", room=room.id)
        if isinstance(aux, bytes) and len(aux) > self.config.max_aux_nbytes:
            raise UsageError(
                f"room {room.id!r} has {len(aux)} aux bytes, the limit is {self.config.max_aux_nbytes}",
                remedy="raise Config.max_aux_nbytes, or send it as a component",
                room=room.id,
            )
        room.finished, room.aux = True, aux
        for session, epoch in self._forget_askers(room.key):
            if session.id in self.sessions:
                self.send(session, m.Asking(epoch, True), now)
        for destination in list(room.destinations.values()):
            if destination.phase is DestinationPhase.LIVE:
                self._add_row(destination)
                self._maybe_close(destination, now)
        self._maybe_complete(room)
        self._settle(now)

    def abort(self, room: PrefillRoom, reason: str, now: float) -> None:
        self._fail(room, Aborted(f"room {room.id!r} was aborted at prefill: {reason}"), now)

    # What the driver reports.

    def _dispatch(self, route: bytes, session: Session | None, frame: wire.Frame, now: float) -> None:
        message = frame.message
        if isinstance(message, m.Hello):
            self._on_hello(route, frame, message, now)
        elif session is None:
            # A process says NoSession only after the session's last completion: it is taken as proof of quiet.
            if not isinstance(message, m.NoSession | m.Bye) and not self._in_flight(frame.session):
                if frame.session.writer == self.incarnation:
                    self._never_again(frame.session)
                proof = 0 if frame.session in self._unsettled else self.incarnation
                self.send_loose(route, frame.session, m.NoSession(proof))
        elif isinstance(message, m.NoSession):
            self.lose(session, PeerError("decode does not know this session", remedy="it restarted"), now)
        else:
            handler = self._handlers.get(type(message))
            if handler is None:
                raise PeerError(f"{type(message).__name__} sent to a prefill node", remedy="check the peer's role")
            if session.half_open:
                self._confirm(session, now)
            handler(session, message, now)

    def close(self, now: float) -> None:
        """Fails every room still open; `idle` tells when every destination has agreed that its room is over."""
        for room in list(self.rooms.values()):
            self.abort(room, "the node closes", now)
        for destination in self._parked.waiting():
            self._turn_away(destination, "the prefill node closes", now)

    @property
    def quiet(self) -> bool:
        """Nothing of ours is in flight, so that Bye may be said."""
        return not self._flights

    @property
    def idle(self) -> bool:
        return not self._flights and not self.destinations

    @property
    def memory_is_free(self) -> bool:
        return not self._flights

    def snapshot(self) -> tuple[object, ...]:
        """Everything that may differ between two states of this core, comparable and hashable."""
        return (
            tuple(sorted((key, room.status, room.in_flight) for key, room in self.rooms.items())),
            tuple(
                (
                    session_id,
                    epoch,
                    r.phase.name,
                    tuple((c.number, c.phase.name, c.attempt, c.lane, c.cursor) for c in r.chunks.values()),
                )
                for (session_id, epoch), r in sorted(self.destinations.items())
            ),
            tuple(sorted((session.id, lane, mark) for (session, lane), mark in self._marks.items())),
            tuple(sorted(self.buffers.free)),
        )

    # Messages, in the order of the table.

    def _on_ask(self, session: Session, ask: m.Ask, now: float) -> None:
        """Answered at once and, if not `finished`, again at finish(); decode repeats it slowly for a lost answer."""
        room = self.rooms.get(ask.room)
        self._wanted_again(ask.room, session, ask.epoch, now)
        finished = room is not None and room.finished
        if not finished and self._askers.note(ask.room, session, ask.epoch):
            self.timers.set(("asked", ask.room), now + 4 * self.config.ask_s)
        self.send(session, m.Asking(ask.epoch, finished), now)

    def _on_open(self, session: Session, opened: m.Open, now: float) -> None:
        destination = self.destinations.get((session.id, opened.epoch))
        if destination is not None:
            self.send(session, m.Opened(opened.epoch, *self._opened_state(destination)), now)
            return
        check_open(opened, session, self.layout)
        destination = Destination(session, opened, self._direct)
        room = self.rooms.get(opened.room)
        self._wanted_again(opened.room, session, opened.epoch, now)
        ended = self._how_ended(opened.room, now)
        if room is None and ended is not None and ended.refuses(opened.rank, session.id, opened.epoch):
            self.send(session, m.Opened(opened.epoch, "refused", m.brief(ended.reason)), now)
        elif room is None and not self._park(destination, now):
            self.send(session, m.Opened(opened.epoch, "refused", "too many rooms wait for prefill"), now)
        else:
            if room is not None:
                self._note(destination)
                self._attach(room, destination, now)
            self.send(session, m.Opened(opened.epoch, *self._opened_state(destination)), now)

    def _opened_state(self, destination: Destination) -> tuple[str, str]:
        if destination.phase is DestinationPhase.WAITING:
            return "waiting", ""
        return (
            ("refused", m.brief(destination.reason))
            if destination.phase is DestinationPhase.FAILING
            else ("accepted", "")
        )

    def _on_closed(self, session: Session, closed: m.Closed, now: float) -> None:
        destination = self.destinations.get((session.id, closed.epoch))
        if destination is not None and destination.phase is DestinationPhase.CLOSING:
            self._forget(destination)

    def _on_abort(self, session: Session, abort: m.Abort, now: float) -> None:
        destination = self.destinations.get((session.id, abort.epoch))
        if destination is None:
            if abort.room:
                self._give_up(abort.room, session, abort, now)
            self.send(session, m.Drained(abort.epoch), now)
            return
        room = destination.room
        done = destination.phase is DestinationPhase.CLOSING or (abort.finished and not destination.unwritten)
        if done:
            destination.phase = DestinationPhase.CLOSING
            self.send(session, m.Drained(abort.epoch), now)
            self._forget(destination)
            if room is not None:
                self._maybe_complete(room)
            return
        self._drain(destination, now)
        if room is None:
            self._give_up(destination.open.room, session, abort, now)
        elif room.destinations.get(destination.open.rank) is destination:
            self._fail(room, Aborted(f"room {room.id!r} was aborted at decode: {abort.reason}"), now)

    def _give_up(self, key: bytes, session: Session, abort: m.Abort, now: float) -> None:
        """A destination says of a room that is not sent to it that it does not want it: it never opened it, or took
        back an Open that was parked. Where it speaks of that room in a later epoch already, this changes nothing.

        So a room that is not here yet fails once it is submitted, if that comes as soon as an Open would have waited.
        """
        room, rank, mine = self.rooms.get(key), session.topology.group_rank, (session.id, abort.epoch)
        if self._parked.epoch_of(key, session) > abort.epoch or self._askers.epoch_of(key, session) > abort.epoch:
            return
        ended = self._how_ended(key, now)
        if room is not None:
            if rank not in room.destinations:
                self._fail(room, given_up(room, abort.reason), now)
                ended = self._ended.get(key)
        elif ended is None or (ended.begun and ended.known.get(rank, mine) != mine):
            ended = Ended(abort.reason, {}, begun=False, until=now + self.config.open_wait_s)
            self._note_ended(key, ended)
        if ended is not None:
            ended.known[rank] = mine

    def _wanted_again(self, key: bytes, session: Session, epoch: int, now: float) -> None:
        """A destination speaks of a room that it had given up, in another epoch."""
        ended = self._how_ended(key, now)
        if ended is not None and not ended.begun and not ended.refuses(session.topology.group_rank, session.id, epoch):
            del self._ended[key]

    def _on_bye(self, session: Session, bye: m.Bye, now: float) -> None:
        session.said_bye = True
        if not self._in_flight(session.id):  # an answer proves it quiet; later NoSession does, to whoever asks again
            self.send(session, m.Bye(), now)
        self.lose(session, PeerError("the decode node closed", remedy="route elsewhere"), now)

    # Time, and the end of sessions.

    def _on_timer(self, key: tuple[str, object], now: float) -> None:
        match key:
            case ("ask", Chunk() as chunk):
                self._ask_again(chunk, now)
            case ("close", Destination() as destination):
                if destination.phase is DestinationPhase.CLOSING:
                    self._close_again(destination, now)
                elif destination.phase is DestinationPhase.FAILING:
                    self._close_failed(destination, now)
            case ("open_wait", PrefillRoom() as room):
                waited = self.config.open_wait_s
                self._fail(room, DeadlineExceeded(f"no decode rank opened room {room.id!r} in {waited} s"), now)
            case ("room", PrefillRoom() as room):
                late = f"room {room.id!r} was not sent in its {room.deadline_s} s"
                error = DeadlineExceeded(
                    late, remedy="raise deadline_s at decode, or look at the slower side", room=room.id
                )
                self._fail(room, error, now)
            case ("parked", Destination() as destination):
                self._turn_away(destination, f"prefill never began room {room_id(destination.open.room)!r}", now)
            case ("write", int() as ticket):
                self._on_write_timer(ticket, now)
            case ("asked", bytes() as room_key):
                self._forget_askers(room_key)
            case (("beat" | "silence") as kind, Session() as session):
                if self.on_session_timer(kind, session, now):
                    silent = f"decode was silent for {session.silence_s} s"
                    self.lose(session, DeadlineExceeded(silent, remedy="look at that node"), now)


def given_up(room: PrefillRoom, reason: str) -> Aborted:
    return Aborted(f"room {room.id!r} was given up at decode: {reason}")

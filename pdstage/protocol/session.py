"""One end of a node's sessions: who is talking, in what order, and how long silent. Every part of a core stands on it.

A session is one agreement of two process lives. Within it and one direction seq rises by one a frame, and a frame not
above the last accepted one is dropped; so the cores see loss, never reordering or duplicates, and need no tombstones.

Here are also the effects that both cores ask for; what only prefill or only decode asks for stands with its chunks.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pdstage.errors import DeadlineExceeded, PdstageError, PeerError
from pdstage.metrics import Counters
from pdstage.protocol.messages import (
    IDLE,
    IN_USE,
    SPARE,
    AnyMessage,
    Bye,
    Heartbeat,
    Hello,
    HelloRefused,
    LaneSpan,
    NoSession,
    OfEpoch,
    RowSpan,
    SessionId,
    Welcome,
)
from pdstage.protocol.wire import (
    OUTSIDE_A_SESSION,
    UNREAD,
    Frame,
    OtherVersion,
    UnknownMessage,
    decode_body,
    decode_head,
    encode,
    kind_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from pdstage.columns import Shared
    from pdstage.layout import Layout
    from pdstage.layout.topology import Topology
    from pdstage.plan import Shares, Stagings
    from pdstage.plan.convert import StagedPair
    from pdstage.plan.ownership import Common
    from pdstage.protocol.config import Config
    from pdstage.protocol.decode import DecodeCore
    from pdstage.protocol.destinations import Chunk
    from pdstage.protocol.prefill import PrefillCore
    from pdstage.protocol.room import Room


_GONE = object()
_MAX_SAID = 64
MAX_REMEMBERED = 4096
HOLD_EVERY_S = 5.0
"""Decode names the rooms that it waits with at least this often."""


@dataclass(slots=True, eq=False)
class Session:
    """One session as one of its two ends sees it."""

    id: SessionId
    route: bytes
    layout: Layout
    topology: Topology
    staged: StagedPair
    """The two layouts as their bytes are staged."""
    stagings: Stagings
    """Of this side of `staged`."""
    lanes: tuple[LaneSpan, ...]
    largest_lane: int
    """Bytes of the largest of `lanes`; 0 at decode, where the peer has none."""
    silence_s: float
    """What the peer promised: silent for longer, it is lost."""
    half_open: bool
    rows: RowSpan | None
    """The peer's aux rows, if they may be written in place."""
    exposes_pool: bool
    """The peer's pages may be written in place; else only its staging memory."""
    common: Common
    """The tokens that both ranks hold of each component."""
    aux: Shared
    """The columns of aux rows that both have."""
    checksums: bool
    """Both sides offered them: staged chunks carry one."""
    tags_as_messages: bool
    """Both sides offered it: tags travel as messages."""
    received_at: float = 0.0
    used_at: float = 0.0
    """When a room last needed it: the last frame that was no heartbeat. No room of either side ends without one."""
    sent_at: float = 0.0
    beat_at: float = 0.0
    """When it was last asked whether a heartbeat must be sent."""
    n_sent: int = 0
    last_seq: int = 0
    """Of the frames accepted from the peer."""
    in_place: bool = True
    """At prefill, set by the driver: whether its transport reaches the exposed pages."""
    claims: dict[int, Any] = field(default_factory=dict)
    """What rooms hold under it, by epoch, until they are settled: at decode a `Writer`, at prefill a `Destination`."""
    asking: dict[bytes, int] = field(default_factory=dict)
    """At prefill: the rooms that decode asks about, with the epochs in which it will open them."""
    marks: dict[int, int] = field(default_factory=dict)
    """The watermarks that decode has told, by lane."""
    lent_nbytes: dict[int, int] = field(default_factory=dict)
    """At decode: what it has of each lane."""
    staged_before: dict[int, tuple[int, int]] = field(default_factory=dict)
    """At decode, by a room's size as a power of two: how many chunks its last such room staged, and the bytes of the
    largest.
    """
    closed: dict[int, list[Chunk]] = field(default_factory=dict)
    """At prefill: by lane, held chunks whose window is closed."""
    parked_nbytes: int = 0
    """At prefill: of its Opens of rooms that are not here yet."""
    shares: set[Shares] = field(default_factory=set)
    """What its rooms ask for, each checked once."""
    n_byes: int = 0
    said_bye: bool = False
    """The peer ended the session in order: nothing to complain of."""


class Send(NamedTuple):
    """Send one control frame; a lost one is asked for again."""

    route: bytes
    frame: bytes


class Attach(NamedTuple):
    """A session began: tell the transport who its peer is. Prefill connects, for its writes; decode identifies the
    peer, so that its death can be proved. `offers`: the peer's description of each of its transports, by name.
    """

    session: Session
    offers: dict[str, bytes]


class Detach(NamedTuple):
    """The session is lost: disconnect the transport; answer `fenced` once none of its writes can land any more."""

    session: Session


class HangUp(NamedTuple):
    """No session and no handshake needs the connection of `route`: it may be closed, if that is still so by then."""

    route: bytes


class Renew(NamedTuple):
    """`route` is silent: connect again, since the other end may be gone, or belong to another process."""

    route: bytes


class Changed(NamedTuple):
    """A room's state, its `released` or its `ready_to_bind` changed."""

    room: Room


class PeerWarning(NamedTuple):
    """For the log: a peer broke the protocol, did something unusual, or was refused. It is counted already."""

    route: bytes
    error: PdstageError


CoreEffect: TypeAlias = Send | Attach | Detach | HangUp | Renew | Changed | PeerWarning
"""What both cores ask of their driver."""


class Timers:
    """The one timer of a core: many named moments, the earliest of which the driver waits for. Setting one again moves
    it.

    A cancelled moment lets go of its key at once, and so of all the key holds; its place in the heap is forgotten
    lazily, within a constant factor.
    """

    __slots__ = ("_at", "_heap", "_n")

    def __init__(self) -> None:
        self._at: dict[Hashable, list[Any]] = {}
        self._heap: list[list[Any]] = []
        """[moment, number, key]; the key is `_GONE` once it was cancelled or moved."""
        self._n = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._at

    def set(self, at: float, *key: object) -> None:
        if (moved := self._at.get(key)) is not None:
            moved[2] = _GONE
        self._n += 1
        entry = self._at[key] = [at, self._n, key]
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 4 * len(self._at):
            self._heap = list(self._at.values())
            heapq.heapify(self._heap)

    def cancel(self, *key: object) -> None:
        entry = self._at.pop(key, None)
        if entry is not None:
            entry[2] = _GONE

    def next_at(self) -> float | None:
        heap = self._heap
        while heap and heap[0][2] is _GONE:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> Iterator[Any]:
        """Keys whose moment has come, each removed as it is given; the consumer may set and cancel freely."""
        while self._heap and self._heap[0][0] <= now:
            key = heapq.heappop(self._heap)[2]
            if key is not _GONE:
                del self._at[key]
                yield key

    def delay(self, by_s: float) -> None:
        """Moves every moment `by_s` later: for a driver that itself came late."""
        for entry in self._heap:  # their order stays
            entry[0] += by_s


class Endpoint:
    """A core's live sessions, its timers, its counters, and the effects it asks for."""

    def __init__(self, incarnation: int, config: Config, owner: PrefillCore | DecodeCore) -> None:
        self.incarnation = incarnation
        self.config = config
        self.counters = Counters()
        self.timers = Timers()
        self.ticket = count(1).__next__
        self.cancel = self.timers.cancel
        self.sessions: dict[SessionId, Session] = {}
        self.owner = owner
        self.now = 0.0
        """The time of the input under way: the driver sets it before it says anything."""
        self.handlers: dict[type[AnyMessage], Callable[..., None]]
        """What its core does with each message of a live session: with one of an epoch, what that epoch claims too."""
        self.effects: list[Any] = []
        """What a part asks of the driver is appended here."""
        self._ticked_at = -1.0
        self._said: set[str] = set()

    # Inputs.

    def receive(self, route: bytes, data: bytes | memoryview) -> None:
        """One control frame. Never raises for what a peer sent: that is a `PeerWarning`."""
        session = None
        try:
            session_id, seq = decode_head(data)
            held = self.sessions.get(session_id)
            if held is None:
                message = self._read_stray(route, data)
            elif held.route != route and not held.half_open:
                # A session's frames come by its own route: nobody else speaks for a peer, whatever numbers it knows.
                self.counters.frames_stale += 1
                raise PeerError("a frame of a session that another peer has", remedy="distrust this one")  # noqa: TRY301  (caught as any fault)
            else:
                session, held.route = held, route  # of a half-open one it is where decode speaks
                message = decode_body(data)
            self.counters.frames_received += 1
            if message is None:
                return
            if session is None:
                self.owner.on_stray(route, Frame(session_id, seq, message))
            else:
                self._serve(session, seq, message)
        except PeerError as error:
            self.counters.frames_malformed += 1
            # Engines may keep this error for long, as their rooms': without the stack frames that refer to the message.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            self.warn(route, error)
            if isinstance(error, OtherVersion) and error.greets and self.owner.role == "prefill":
                self.counters.sessions_refused += 1
                self.send_loose(route, error.session, HelloRefused(error.what))
            if session is not None and not isinstance(error, UnknownMessage):
                self.owner.lose(session, error)
        self.owner.settle()

    def _serve(self, session: Session, seq: int, message: AnyMessage) -> None:
        """A frame under a live session; dropped unless it is the next. NoSession is outside of any order."""
        if not isinstance(message, NoSession):
            if seq <= session.last_seq:
                self.counters.frames_stale += 1
                return
            session.last_seq, session.received_at = seq, self.now
            if not isinstance(message, Heartbeat):
                session.used_at = self.now
        handler = self.handlers.get(type(message))
        if handler is None:
            raise PeerError(
                f"{type(message).__name__} sent to a {self.owner.role} node", remedy="check the peer's role"
            )
        if session.half_open and not isinstance(message, NoSession):  # decode has heard Welcome
            self.owner.handshake.confirm(session)  # type: ignore[union-attr]
        if isinstance(message, OfEpoch):
            handler(session, session.claims.get(message.epoch), message)
        else:
            handler(session, message)

    def _read_stray(self, route: bytes, data: bytes | memoryview) -> AnyMessage | None:
        """The message of a frame of no live session. What anybody may say then is read only where it is of use, since
        that may take long: the others are None, to be dropped, or `UNREAD`, to be answered for their session's sake.
        """
        kind = kind_of(data)
        message: AnyMessage | None = UNREAD
        if kind is None or kind in OUTSIDE_A_SESSION:
            message = decode_body(data) if kind is None or self.owner.accepts(kind, route) else None
        self.counters.frames_stale += not isinstance(message, Hello | Welcome | HelloRefused)
        return message

    def tick(self) -> None:
        """Serves what is due. A turn reads all its inputs first, so that its own lateness is not taken for a
        peer's: one that comes later than its own promise pushes its deadlines by the excess.
        """
        now, due_at = self.now, self.timers.next_at()
        gap_s, self._ticked_at = now - self._ticked_at, now
        # A node that had nothing due was idle, not late: nothing is pushed further than what was due is overdue.
        excess = min(gap_s - self.config.max_silence_s, now - due_at) if due_at is not None else 0.0
        if excess > 0:
            self.timers.delay(excess)
            for session in self.sessions.values():
                session.received_at += excess
        for call, *things in self.timers.due(now):
            call(*things)
        self.owner.settle()

    # Outputs.

    def take_effects(self) -> list[Any]:
        """The effects since the last call, in order; the driver carries them out."""
        effects, self.effects = self.effects, []
        return effects

    def changed(self, room: Room) -> None:
        self.effects.append(Changed(room))

    def send(self, session: Session, message: AnyMessage) -> None:
        session.n_sent += 1
        session.sent_at = self.now
        self.send_loose(session.route, session.id, message, session.n_sent)

    def send_loose(self, route: bytes, session_id: SessionId, message: AnyMessage, seq: int = 0) -> None:
        """A frame of no live session, whose `seq` is 0: greetings, and answers to strangers."""
        self.counters.frames_sent += 1
        self.effects.append(Send(route, encode(session_id, seq, message)))

    def warn(self, route: bytes, error: PdstageError) -> None:
        self.effects.append(PeerWarning(route, error))

    def warn_once(self, route: bytes, what: str, remedy: str) -> None:
        """A warning that would otherwise repeat for many rooms or peers."""
        if what not in self._said and len(self._said) < _MAX_SAID:
            self._said.add(what)
            self.warn(route, PeerError(what, remedy=f"{remedy}; this is said once"))

    def bye(self) -> None:
        """After the last completion: this process ends its sessions in order."""
        for session in self.sessions.values():
            self.send(session, Bye())

    # Time.

    def begin(self, session: Session, offers: dict[str, bytes]) -> None:
        """Both sides agreed on `session`. Starts its two timers: our heartbeat and the peer's silence."""
        for what in session.aux.left_out:
            self.warn_once(session.route, f"aux column {what}: it is left out", "give it on both sides, or on neither")
        session.received_at = session.used_at = session.sent_at = session.beat_at = self.now
        self.sessions[session.id] = session
        self.counters.sessions_opened += 1
        self._beat(session)
        self._listen(session)
        self.effects.append(Attach(session, offers))

    def end(self, session: Session) -> bool:
        """Forgets `session`; False if it was forgotten already."""
        if self.sessions.pop(session.id, None) is None:
            return False
        self.cancel(self._beat, session)
        self.cancel(self._listen, session)
        if session.said_bye:
            self.counters.sessions_ended += 1
        elif not session.half_open:
            self.counters.sessions_lost += 1
        return True

    def _listen(self, session: Session) -> None:
        """Ends a session whose peer was silent for too long. Decode connects anew: the other end may be gone.

        A session that is only greeted expires after `hello_s`, whatever `max_silence_s` its peer promised.
        """
        patience_s = min(session.silence_s, self.config.hello_s) if session.half_open else session.silence_s
        silent_at = session.received_at + patience_s
        if silent_at > self.now:
            self.timers.set(silent_at, self._listen, session)
            return
        late = f"{self.owner.peer} was silent for {session.silence_s} s"
        self.owner.lose(session, DeadlineExceeded(late, remedy="look at that node"))
        if self.owner.peer == "prefill":
            self.effects.append(Renew(session.route))

    def keep_alive(self) -> None:
        """Sends the heartbeats that are due, in a turn that has more to read than it has time for."""
        for session in self.sessions.values():
            if self._beats_at(session) <= self.now:
                self._beat(session)

    def _beats_at(self, session: Session) -> float:
        """When its next heartbeat is due."""
        pause_s = self.config.max_silence_s / 3
        return min(session.sent_at + pause_s, session.beat_at + min(pause_s, HOLD_EVERY_S))

    def _beat(self, session: Session) -> None:
        """Sends a heartbeat if it is due; sets when the next one is. Rooms that wait need one whatever else is said,
        one for all of them.
        """
        pause_s = self.config.max_silence_s / 3
        if session.beat_at + min(pause_s, HOLD_EVERY_S) <= self.now:
            session.beat_at = self.now
            for asks, waits in self.owner.waiting(session):
                self.send(session, Heartbeat(IN_USE, asks, waits))
        if session.sent_at + pause_s <= self.now:
            self.send(session, Heartbeat(self.need_of(session)))
        self.timers.set(self._beats_at(session), self._beat, session)

    def need_of(self, session: Session) -> int:
        """What a heartbeat says of the session. One that no room needs costs both ends memory and a connection."""
        if self.owner.in_use(session):
            return IN_USE
        return SPARE if self.now - session.used_at >= self.config.idle_s else IDLE

    def after(self, wait_s: float, call: Callable[..., None], *things: object, anew: bool = True) -> None:
        """`call(*things)` follows in `wait_s`; later than asked for before, or, if not `anew`, then."""
        if anew or (call, *things) not in self.timers:
            self.timers.set(self.now + wait_s, call, *things)

    def repeat(self, call: Callable[..., None], *things: object) -> None:
        """`call(*things)` follows after `retry_s`: the side that waits repeats its question."""
        self.after(self.config.retry_s, call, *things)

    def back_off(self, n_tries: int, salt: int, call: Callable[..., None], thing: object) -> None:
        """As `repeat`, after `n_tries` in vain: twice as long each time up to 20 times, less up to half of it.

        The jitter is drawn from `salt` and `n_tries` alone: a fleet that lost one peer does not ask in step, and a core
        does the same things again when it is given the same inputs.
        """
        wait_s = self.config.retry_s * min(2 ** min(n_tries, 5), 20)
        self.after(wait_s * (0.5 + 0.5 * drawn(salt + n_tries)), call, thing)


def forgotten_at(side: str) -> PeerError:
    """What NoSession says: `side` has none of what this session was about."""
    return PeerError(f"{side} does not know this session", remedy="it restarted, or had given this node up as silent")


def remember(last: dict[Any, Any], key: object, value: object = None) -> None:
    """Notes `key` in `last`, which forgets the oldest beyond `MAX_REMEMBERED`."""
    last[key] = value
    if len(last) > MAX_REMEMBERED:
        del last[next(iter(last))]


def drawn(salt: int) -> float:
    """A number in [0, 1) that looks random: the finalizer of SplitMix64 (Steele, Lea, Flood 2014) of `salt`."""
    z = salt * 0x9E37_79B9_7F4A_7C15 % (1 << 64)
    z = (z ^ z >> 30) * 0xBF58_476D_1CE4_E5B9 % (1 << 64)
    z = (z ^ z >> 27) * 0x94D0_49BB_1331_11EB % (1 << 64)
    return (z ^ z >> 31) / (1 << 64)

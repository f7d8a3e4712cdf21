"""Can these two talk: decode greets, prefill answers, and each refuses in words what does not fit.

Layer 2, pure. Must not know leases or what rooms do: a `HandshakeClient` tells its heir when a peer is met, or never
will be.

Every greeting carries a number of its own, so a session once lost is never resumed, not by the same two processes
either; and prefill remembers the lost ones for a while, lest a late Hello begin one again with its seq at zero.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdstage import columns, convert
from pdstage.convert import Conversion
from pdstage.errors import DeadlineExceeded, PdstageError, PeerError
from pdstage.ownership import Common
from pdstage.plan import Stagings
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.effects import Attach, PeerWarning
from pdstage.protocol.fit import incompatible, parted
from pdstage.protocol.session import Core, Session
from pdstage.protocol.told import layout_problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdstage.protocol.config import Config
    from pdstage.protocol.inbox import DecodeRoom
    from pdstage.protocol.versions import OtherVersion

_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MAX_LOST = 4096


def meeting(welcome: m.Welcome, hello: m.Hello) -> Conversion:
    """The two layouts as their bytes are staged: converted where both sides offered that and formats differ."""
    if m.CONVERT_FEATURE in welcome.features and m.CONVERT_FEATURE in hello.features:
        return convert.pair(welcome.layout, hello.layout)
    return Conversion(welcome.layout, hello.layout)


@dataclass(slots=True, eq=False)
class Peer:
    """A prefill rank by its address: greeted, agreed with, or neither."""

    route: bytes
    nonce: int
    """This end of the session to come; a lost session's successor has another."""
    session: Session | None = None
    n_hellos: int = 0
    rooms: dict[DecodeRoom, None] = field(default_factory=dict)
    given_up: dict[bytes, m.Abort] = field(default_factory=dict)
    """Rooms that ended before it answered, which it is told once it does."""


class HandshakeClient(Core):
    """Decode's half: says Hello to each writer of a room, once."""

    def __init__(self, incarnation: int, config: Config, hello: m.Hello) -> None:
        super().__init__(incarnation, config)
        self.peers: dict[bytes, Peer] = {}
        self._hello = hello
        self._n_greeted = 0

    @abstractmethod
    def _met(self, peer: Peer, now: float) -> None:
        """The peer agreed: its rooms may open."""

    @abstractmethod
    def _fail(self, room: DecodeRoom, error: PdstageError, now: float) -> None: ...

    @abstractmethod
    def _hang_up(self, route: bytes) -> None:
        """Nobody there is greeted any more."""

    def _on_other_version(self, route: bytes, error: OtherVersion) -> None:
        """The warning is enough: nobody greets a decode node."""

    def _peer(self, route: bytes, now: float) -> Peer:
        """The peer at `route`, greeted if it is new."""
        peer = self.peers.get(route)
        if peer is None:
            self._n_greeted += 1
            nonce = (self.incarnation + self._n_greeted * _GOLDEN) % (1 << 64)
            peer = self.peers[route] = Peer(route, nonce)
            self._greet(peer, now)
            self.timers.set(("hello_until", peer), now + self.config.hello_s)
        return peer

    def _greet(self, peer: Peer, now: float) -> None:
        self.send_loose(peer.route, m.SessionId(peer.nonce, 0), self._hello)
        self.back_off(("hello", peer), now, peer.n_hellos, peer.nonce)
        peer.n_hellos += 1

    def _on_welcome(self, route: bytes, frame: wire.Frame, welcome: m.Welcome, now: float) -> None:
        session_id = frame.session
        peer = self.peers.get(route)
        if peer is None or session_id.decode != peer.nonce:
            return
        if peer.session is not None:  # the same greeting answered by a second process: the first is gone
            self.lose(peer.session, PeerError("the prefill rank restarted", remedy="send its rooms again"), now)
            return
        problem = self._welcome_problem(welcome)
        if problem:
            self._refused(peer, PeerError(f"a prefill rank does not fit: {problem}", remedy="match both sides"), now)
            return
        silence_s = welcome.max_silence_s
        session = Session(session_id, route, welcome.layout, welcome.topology, (), silence_s, now, now, half_open=False)
        session.heard = frame.seq
        if (met := _agree(session, welcome, self._hello)) is not None:
            session.stagings = Stagings(met.taken)
        self._say_left_out(session)
        self.sessions[session_id] = peer.session = session
        self.counters.sessions_opened += 1
        self._stop_greeting(peer)
        self.watch(session, now)
        self.emit(Attach(session, m.offers(welcome)))
        self.send(session, m.Heartbeat(), now)
        for told in peer.given_up.values():
            self.send(session, told, now)
        peer.given_up.clear()
        self._met(peer, now)

    def _welcome_problem(self, welcome: m.Welcome) -> str:
        if problem := _apart(welcome, "prefill", self._hello, "decode"):
            return problem
        if not 0 < welcome.max_silence_s < float("inf"):
            return "no finite max_silence_s"
        problem = columns.problem(welcome.columns, columns.MAX_ROW_NBYTES)
        return problem or layout_problem(welcome.layout) or _misfit(welcome, self._hello)

    def _on_hello_refused(self, route: bytes, frame: wire.Frame, refused: m.HelloRefused, now: float) -> None:
        peer = self.peers.get(route)
        if peer is not None and peer.session is None and frame.session.decode == peer.nonce:
            error = PeerError(f"prefill refused this node: {refused.reason}", remedy="match both sides")
            self._refused(peer, error, now)

    def _refused(self, peer: Peer, error: PdstageError, now: float) -> None:
        self.counters.sessions_refused += 1
        self.peers.pop(peer.route, None)
        self._stop_greeting(peer)
        self.emit(PeerWarning(peer.route, error))
        for room in list(peer.rooms):
            self._fail(room, error, now)
        self._hang_up(peer.route)

    def unreachable(self, route: bytes, error: PdstageError, now: float) -> None:
        """No connection to `route` can be made: the rooms that wait for its answer to Hello fail with `error`.

        A session that lives is left alone: if its peer is gone, its silence will tell.
        """
        peer = self.peers.get(route)
        if peer is not None and peer.session is None:
            self._refused(peer, error, now)
        self._settle(now)

    def _stop_greeting(self, peer: Peer) -> None:
        self.timers.cancel(("hello", peer))
        self.timers.cancel(("hello_until", peer))

    def _on_greeting_timer(self, kind: str, peer: Peer, now: float) -> None:
        if kind == "hello":
            self._greet(peer, now)
        else:
            waited = self.config.hello_s
            self._refused(
                peer, DeadlineExceeded(f"no answer from {peer.route!r} in {waited} s", remedy="is it up?"), now
            )


class HandshakeServer(Core):
    """Prefill's half: answers Hello. A session is *half-open* until the first frame under it."""

    def __init__(self, incarnation: int, config: Config, welcome: m.Welcome) -> None:
        super().__init__(incarnation, config)
        self._welcome = welcome
        self._at: dict[bytes, Session] = {}
        self._n_half_open = 0
        self._lost: OrderedDict[m.SessionId, None] = OrderedDict()

    def _on_hello(self, route: bytes, frame: wire.Frame, hello: m.Hello, now: float) -> None:
        session_id = m.SessionId(frame.session.decode, self.incarnation)
        session = self.sessions.get(session_id)
        if session is None:
            if session_id in self._lost:
                self.counters.frames_stale += 1
                return
            problem = self._hello_problem(hello)
            if not problem and len(self.sessions) >= self.config.max_peers:
                self.counters.peers_crowded += 1
                if self._ask_idlest(now):
                    return  # by the time Hello comes again there is a place
                problem = f"already {len(self.sessions)} peers, all in use; raise Config.max_peers, or route elsewhere"
            if problem:
                self.counters.sessions_refused += 1
                self.send_loose(route, frame.session, m.HelloRefused(m.brief(problem)))
                self.emit(PeerWarning(route, PeerError(f"refused a decode node: {problem}", remedy="match both sides")))
                return
            self._make_room(route, now)
            session = Session(
                session_id, route, hello.layout, hello.topology, hello.lanes, hello.max_silence_s, now, now
            )
            session.exposes_pool = m.DIRECT_FEATURE in hello.features
            session.rows = hello.rows
            if (met := _agree(session, self._welcome, hello)) is not None:
                session.stagings = Stagings(met.offered)
            self._say_left_out(session)
            self.sessions[session_id] = session
            self._n_half_open += 1
            self.counters.sessions_opened += 1
            self.watch(session, now)
            self.emit(Attach(session, m.offers(hello)))
        self.send(session, self._welcome, now)

    def _on_other_version(self, route: bytes, error: OtherVersion) -> None:
        self.counters.sessions_refused += 1
        self.send_loose(route, m.SessionId(*error.session), m.HelloRefused(error.what))

    def _hello_problem(self, hello: m.Hello) -> str:
        if problem := _apart(hello, "decode", self._welcome, "prefill"):
            return problem
        if not 0 < len(hello.lanes) < m.AUX or any(lane.nbytes < 1 for lane in hello.lanes):
            return f"{len(hello.lanes)} lanes, or an empty one"
        if not 0 < hello.max_silence_s < float("inf"):
            return "no finite max_silence_s"
        return _rows_problem(hello) or layout_problem(hello.layout) or _misfit(self._welcome, hello)

    def _ask_idlest(self, now: float) -> bool:
        """Asks the peer whose session was idle for longest to end it; False if there is none."""
        unused = (session for session in self.sessions.values() if not session.half_open and not self.in_use(session))
        idlest = min(unused, key=lambda session: session.used_at, default=None)
        if idlest is not None:
            idlest.spare, idlest.used_at = True, now  # one that does not go is not asked again before the others
            self.send(idlest, m.Heartbeat(m.SPARE), now)
        return idlest is not None

    def in_use(self, session: Session) -> bool:
        return bool(session.destinations)

    def _on_heartbeat(self, session: Session, beat: m.Heartbeat, now: float) -> None:
        if beat.idle == m.SPARE and not self.in_use(session):
            self.send(session, m.Heartbeat(m.IDLE), now)

    def _make_room(self, route: bytes, now: float) -> None:
        """Of too many half-open sessions one is over: the oldest of the route that greets, else of all.

        An honest peer's is confirmed within a round trip; so who greets without end takes nobody's place.
        """
        if self._n_half_open >= self.config.max_half_open:
            half_open = [session for session in self.sessions.values() if session.half_open]
            oldest = next((session for session in half_open if session.route == route), half_open[0])
            self.lose(oldest, PeerError("too many half-open sessions", remedy="follow a Hello up"), now)

    def _confirm(self, session: Session, now: float) -> None:
        """The first frame under a session: it replaces the one that its peer had before."""
        session.half_open = False
        self._n_half_open -= 1
        older = self._at.get(session.route)
        self._at[session.route] = session
        if older is not None:
            self.lose(older, PeerError("the decode node greeted again", remedy="see its log for why"), now)

    def _unlink(self, session: Session) -> bool:
        """Forgets a session; False if it was forgotten already."""
        if self.sessions.pop(session.id, None) is None:
            return False
        self.unwatch(session)
        if self._at.get(session.route) is session:
            del self._at[session.route]
        if session.half_open:
            self._n_half_open -= 1
        else:
            self.count_end(session)
            self._never_again(session.id)
        return True

    def _never_again(self, session_id: m.SessionId) -> None:
        """No late Hello may begin this session: it was lost, or this process has said that it knows nothing of it."""
        self._lost[session_id] = None
        if len(self._lost) > _MAX_LOST:
            self._lost.popitem(last=False)


def _rows_problem(hello: m.Hello) -> str:
    rows = hello.rows
    if rows is not None and rows.base + rows.n_rows * rows.row_nbytes >= 1 << 63:
        return f"{rows.n_rows} aux rows at {rows.base}"
    return columns.problem(hello.columns, rows.row_nbytes if rows is not None else columns.MAX_ROW_NBYTES)


def _agree(session: Session, welcome: m.Welcome, hello: m.Hello) -> Conversion | None:
    """What both sides' greetings make of a session, the same on both; returns how its layouts are converted, if so."""
    session.common = Common.of(welcome.layout, hello.layout)
    session.aux = columns.share(welcome.columns, hello.columns)
    session.checksums = m.CHECKSUM_FEATURE in welcome.features and m.CHECKSUM_FEATURE in hello.features
    session.tells_tags = m.TAGS_FEATURE in welcome.features and m.TAGS_FEATURE in hello.features
    met = meeting(welcome, hello)
    session.converted = met if met.components else None
    return session.converted


def _apart(theirs: m.Hello | m.Welcome, there: str, ours: m.Hello | m.Welcome, here: str) -> str:
    told, own = m.offers(theirs), m.offers(ours)
    if told.keys() & own.keys():
        return ""
    return f"transport {_either(told)} at {there}, {_either(own)} at {here}"


def _either(names: Iterable[str]) -> str:
    return " or ".join(map(repr, names))


def _misfit(welcome: m.Welcome, hello: m.Hello) -> str:
    def judged(met: Conversion) -> str:
        return incompatible(met.offered, met.taken, welcome.topology, hello.topology) or parted(met, hello.layout)

    if (m.TAGS_FEATURE in welcome.features) != (m.TAGS_FEATURE in hello.features):
        return f"transport {hello.transport!r} carries tags at one side only: run one version of it on both"
    if lacks := columns.lacking(welcome.columns, hello.columns):
        return lacks
    problem = judged(meeting(welcome, hello))
    if problem and not judged(convert.pair(welcome.layout, hello.layout)):
        problem += "; to convert in flight, set Config.convert on both sides"
    return problem

"""How sessions begin and end in order: decode sends Hello, prefill answers, each side refuses what does not fit and
says why, and decode ends a session that neither side needs.

Every Hello carries a number of its own. So a lost session is never resumed, not even by the same two processes. Prefill
remembers lost sessions for a while, so that a late Hello cannot begin one again with its seq at zero.

Only decode ends an idle session, since only its rooms use it. It does so when a heartbeat says that prefill does not
need the session either. Frames keep their order, so decode has received everything that prefill did for a room before
that heartbeat. A room that begins at that moment finds the session alive, or sends Hello again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any

from pdstage import columns
from pdstage.errors import DeadlineExceeded, PdstageError, PeerError
from pdstage.plan import Stagings, convert
from pdstage.plan.convert import StagedPair
from pdstage.plan.ownership import Common
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.compat import incompatible, layout_problem, other_model
from pdstage.protocol.session import HangUp, Renew, Session, remember

if TYPE_CHECKING:
    from pdstage.protocol.config import Config
    from pdstage.protocol.decode import DecodeCore
    from pdstage.protocol.prefill import PrefillCore

_GOLDEN = 0x9E37_79B9_7F4A_7C15
_HELLOS_A_CONNECTION = 4
"""Hellos without an answer after which the connection is made anew."""


def features(config: Config, *, tags: bool, direct: bool = False) -> tuple[str, ...]:
    """What a greeting offers: `tags` where the transport carries none, `direct` where pages may be written."""
    return tuple(compress(m.FEATURES, (direct, config.checksums, config.convert, tags)))


def staged_pair(welcome: m.Welcome, hello: m.Hello) -> StagedPair:
    """The two layouts as their bytes are staged: converted where both sides offered that and formats differ."""
    if m.CONVERT_FEATURE in welcome.features and m.CONVERT_FEATURE in hello.features:
        return convert.pair(welcome.layout, hello.layout)
    return StagedPair(welcome.layout, hello.layout)


@dataclass(slots=True, eq=False)
class Peer:
    """A prefill rank at its address, with or without a session."""

    route: bytes
    nonce: int
    """This end of the session to come; a lost session's successor has another."""
    session: Session | None = None
    n_hellos: int = 0
    rooms: dict[Any, None] = field(default_factory=dict)
    given_up: dict[bytes, m.Abort] = field(default_factory=dict)
    """Rooms that ended before it answered: these are sent when it does."""


class HandshakeClient:
    """Decode's half: says Hello to each writer of a room, once, and Bye where a session is idle."""

    def __init__(self, owner: DecodeCore, hello: m.Hello) -> None:
        self.endpoint = owner.endpoint
        self.hello = hello
        self._stagings = Stagings(hello.layout)
        self.peers: dict[bytes, Peer] = {}
        self.leaving: dict[tuple[bytes, m.SessionId], Session] = {}
        """Those whose Bye is not answered yet."""
        self._owner = owner
        self._n_greeted = 0

    def peer(self, route: bytes) -> Peer:
        """The peer at `route`; a new one is sent Hello."""
        peer = self.peers.get(route)
        if peer is None:
            self._n_greeted += 1
            nonce = (self.endpoint.incarnation + self._n_greeted * _GOLDEN) % (1 << 64)
            peer = self.peers[route] = Peer(route, nonce)
            self._greet(peer)
            self.endpoint.after(self.endpoint.config.hello_s, self._unanswered, peer)
        return peer

    def _greet(self, peer: Peer) -> None:
        if peer.n_hellos and peer.n_hellos % _HELLOS_A_CONNECTION == 0:
            self.endpoint.effects.append(Renew(peer.route))
        self.endpoint.send_loose(peer.route, m.SessionId(peer.nonce, 0), self.hello)
        self.endpoint.back_off(peer.n_hellos, peer.nonce, self._greet, peer)
        peer.n_hellos += 1

    def on_welcome(self, route: bytes, frame: wire.Frame, welcome: m.Welcome) -> None:
        session_id = frame.session
        peer = self.peers.get(route)
        if peer is None or session_id.decode != peer.nonce:
            return
        if peer.session is not None:  # a second process answers the same Hello: the first is gone
            self._owner.denied(peer.session, PeerError("the prefill rank restarted", remedy="send its rooms again"))
            return
        if problem := greeting_problem(welcome, welcome, self.hello):
            self._refused(peer, PeerError(f"a prefill rank does not fit: {problem}", remedy="match both sides"))
            return
        session = _agreed(session_id, route, welcome, welcome, self.hello, stagings=self._stagings)
        session.last_seq = frame.seq
        peer.session = session
        self._stop_greeting(peer)
        self.endpoint.begin(session, m.offers(welcome))
        self.endpoint.send(session, m.Heartbeat())
        for abort in peer.given_up.values():
            self.endpoint.send(session, abort)
        peer.given_up.clear()
        for room in list(peer.rooms):
            self._owner.connect(room)

    def on_hello_refused(self, route: bytes, frame: wire.Frame, refused: m.HelloRefused) -> None:
        peer = self.peers.get(route)
        if peer is not None and peer.session is None and frame.session.decode == peer.nonce:
            self._refused(peer, PeerError(f"prefill refused this node: {refused.reason}", remedy="match both sides"))

    def _refused(self, peer: Peer, error: PdstageError) -> None:
        self.endpoint.counters.sessions_refused += 1
        self.peers.pop(peer.route, None)
        self._stop_greeting(peer)
        self.endpoint.warn(peer.route, error)
        for room in list(peer.rooms):
            self._owner.fail_room(room, error)
        self.hang_up(peer.route)

    def unreachable(self, route: bytes, error: PdstageError) -> None:
        """No connection to `route` can be made: the rooms that wait for its answer to Hello fail with `error`.

        A session that lives is left alone: if its peer is gone, its silence will tell.
        """
        peer = self.peers.get(route)
        if peer is not None and peer.session is None:
            self._refused(peer, error)
        self._owner.settle()

    def _stop_greeting(self, peer: Peer) -> None:
        self.endpoint.cancel(self._greet, peer)
        self.endpoint.cancel(self._unanswered, peer)

    def _unanswered(self, peer: Peer) -> None:
        late = f"prefill gave no answer in {self.endpoint.config.hello_s} s"
        self._refused(peer, DeadlineExceeded(late, remedy="is it up?"))

    def hang_up(self, route: bytes) -> None:
        """No handshake with `route` is under way: the connection may be closed, if nothing else needs it."""
        if not self._owner.needs(route):
            self.endpoint.effects.append(HangUp(route))

    # The end of sessions that neither side needs.

    def on_heartbeat(self, session: Session, beat: m.Heartbeat) -> None:
        """Ends a session that neither side needs: Bye, until it is answered or the peer was silent for too long."""
        if beat.idle == m.IN_USE or self._owner.in_use(session):
            return
        if m.SPARE not in (beat.idle, self.endpoint.need_of(session)):
            return
        self.endpoint.counters.sessions_idle += 1
        session.said_bye = True
        self.leaving[session.route, session.id] = session
        self._owner.lose(session, PeerError("neither side needed the session"))
        self.endpoint.after(session.silence_s, self.left, session.route, session.id)
        self._say_bye(session)

    def _say_bye(self, session: Session) -> None:
        self.endpoint.send(session, m.Bye())
        if session.n_byes:  # the answer may be what was lost: then the peer knows no such session, and says so
            self.endpoint.send_loose(session.route, session.id, m.Heartbeat())
        self.endpoint.back_off(session.n_byes, session.id.decode, self._say_bye, session)
        session.n_byes += 1

    def left(self, route: bytes, session_id: m.SessionId) -> None:
        """The peer answered our Bye, with whatever message, or its time is over."""
        session = self.leaving.pop((route, session_id), None)
        if session is not None:
            self.endpoint.cancel(self._say_bye, session)
            self.endpoint.cancel(self.left, route, session_id)
            self.hang_up(route)


class HandshakeServer:
    """Prefill's half: answers Hello. A session is *half-open* until the first frame under it."""

    def __init__(self, owner: PrefillCore, welcome: m.Welcome) -> None:
        self.endpoint = owner.endpoint
        self.welcome = welcome
        self._stagings = Stagings(welcome.layout)
        self.lost: dict[m.SessionId, None] = {}
        """No late Hello may begin one of these: it was lost, or this process has denied it with NoSession."""
        self._owner = owner
        self._at: dict[bytes, Session] = {}

    def on_hello(self, route: bytes, frame: wire.Frame, hello: m.Hello) -> None:
        endpoint = self.endpoint
        session_id = m.SessionId(frame.session.decode, endpoint.incarnation)
        session = endpoint.sessions.get(session_id)
        if session is None:
            if session_id in self.lost:
                endpoint.counters.frames_stale += 1
                return
            if problem := self._hello_problem(hello) or self._make_place(route):
                endpoint.counters.sessions_refused += 1
                endpoint.send_loose(route, frame.session, m.HelloRefused(m.brief(problem)))
                endpoint.warn(route, PeerError(f"refused a decode node: {problem}", remedy="match both sides"))
                return
            session = _agreed(session_id, route, hello, self.welcome, hello, stagings=self._stagings)
            endpoint.begin(session, m.offers(hello))
        elif session.half_open:
            session.route = route  # decode has made its connection anew
        endpoint.send(session, self.welcome)

    def _hello_problem(self, hello: m.Hello) -> str:
        return greeting_problem(hello, self.welcome, hello)

    def _make_place(self, route: bytes) -> str:
        """Why no peer more is taken, in words; empty if one is. At the limit the oldest half-open session ends, of
        this route or of all: an honest peer confirms its own within a round trip. A peer that greets anew is none more.
        """
        sessions = self.endpoint.sessions.values()
        if len(sessions) < self.endpoint.config.max_peers:
            return ""
        half_open = [session for session in sessions if session.half_open]
        if half_open:
            oldest = min(half_open, key=lambda session: session.route != route)
            self._owner.lose(oldest, PeerError("the handshake was not completed", remedy="follow a Hello up"))
        elif route not in self._at:
            self.endpoint.counters.peers_crowded += 1
            return f"already {len(sessions)} peers; raise Config.max_peers, or route elsewhere"
        return ""

    def confirm(self, session: Session) -> None:
        """The first frame under a session: it replaces the one that its peer had before."""
        session.half_open = False
        older = self._at.get(session.route)
        self._at[session.route] = session
        if older is not None:
            self._owner.lose(older, PeerError("the decode node greeted again", remedy="see its log for why"))

    def unlink(self, session: Session) -> bool:
        """Forgets a session; False if it was forgotten already."""
        if not self.endpoint.end(session):
            return False
        if self._at.get(session.route) is session:
            del self._at[session.route]
        if not session.half_open:
            remember(self.lost, session.id)
        return True


def greeting_problem(theirs: m.Greeting, welcome: m.Welcome, hello: m.Hello) -> str:
    """Why no session can come of the two greetings, as who got `theirs` judges it, in words; empty if one can."""

    def judged(staged: StagedPair) -> str:
        problem = incompatible(staged.offered, staged.taken, welcome.topology, hello.topology)
        return problem or staged.undecodable(hello.layout)

    at_prefill, at_decode = m.offers(welcome), m.offers(hello)
    if not at_prefill.keys() & at_decode.keys():
        src, dst = (" or ".join(map(repr, names)) for names in (at_prefill, at_decode))
        return f"transport {src} at prefill, {dst} at decode"
    rows = hello.rows if theirs is hello else None
    if rows is not None and rows.base + rows.n_rows * rows.row_nbytes >= 1 << 63:
        return f"{rows.n_rows} aux rows at {rows.base}"
    if (m.TAGS_FEATURE in welcome.features) != (m.TAGS_FEATURE in hello.features):
        return f"transport {hello.transport!r} carries tags at one side only: run one version of it on both"
    problem = (
        columns.problem(theirs.columns, rows.row_nbytes if rows is not None else columns.MAX_ROW_NBYTES)
        or layout_problem(theirs.layout)
        or other_model(welcome.model, hello.model)
        or columns.lacking(welcome.columns, hello.columns)
    )
    if problem:
        return problem
    problem = judged(staged_pair(welcome, hello))
    if problem and not judged(convert.pair(welcome.layout, hello.layout)):
        problem += "; to convert in flight, set Config.convert on both sides"
    return problem


def _agreed(
    session_id: m.SessionId, route: bytes, theirs: m.Greeting, welcome: m.Welcome, hello: m.Hello,
    *, stagings: Stagings,
) -> Session:  # fmt: skip
    """The session that the two greetings make, as who got `theirs` sees it."""
    staged, both = staged_pair(welcome, hello), {*welcome.features} & {*hello.features}
    at_prefill = theirs is hello
    lanes = hello.lanes if at_prefill else ()
    return Session(
        session_id, route, theirs.layout, theirs.topology, staged,
        stagings.of_layout(staged.offered if at_prefill else staged.taken), lanes,
        max([lane.nbytes for lane in lanes], default=0), theirs.max_silence_s, half_open=at_prefill,
        rows=hello.rows if at_prefill else None, exposes_pool=at_prefill and m.DIRECT_FEATURE in hello.features,
        common=Common.of(welcome.layout, hello.layout), aux=columns.share(welcome.columns, hello.columns),
        checksums=m.CHECKSUM_FEATURE in both, tags_as_messages=m.TAGS_FEATURE in both,
    )  # fmt: skip

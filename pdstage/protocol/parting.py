"""Sessions that no room needs, and peers that there is no place for: let go in order, at decode.

Layer 2, pure. Must not know leases or what rooms do.

Only decode ends an idle session, since only its rooms use it, and only on hearing a heartbeat by which prefill needs it
no more either. Frames keep their order, so whatever prefill did for a room before that heartbeat decode has heard of:
a room that comes at that very moment finds the session whole, or greets the peer anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.errors import PeerError, UsageError
from pdstage.protocol import messages as m
from pdstage.protocol.effects import HangUp
from pdstage.protocol.handshake import HandshakeClient

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdstage.protocol.config import Config
    from pdstage.protocol.session import Session


class Parting(HandshakeClient):
    """The decode core's farewells."""

    def __init__(self, incarnation: int, config: Config, hello: m.Hello) -> None:
        super().__init__(incarnation, config, hello)
        self._leaving: dict[bytes, tuple[Session, int]] = {}
        """By route: a session whose Bye is not answered yet, and how often it was said."""

    def _make_place(self, routes: Collection[bytes], now: float) -> None:
        """For peers at `routes`: beyond `max_peers` as many others, the idlest first, are asked to end their sessions.

        Until they have answered there are that many too many. Raises `UsageError` where too many are in use.
        """
        n_new = sum(route not in self.peers for route in routes)
        n_over = len(self.peers) + n_new - self.config.max_peers
        if not n_new or n_over <= 0:
            return
        self.counters.peers_crowded += n_new
        sessions = (peer.session for peer in self.peers.values() if peer.route not in routes)
        unused = [session for session in sessions if session is not None and not self.in_use(session)]
        if len(unused) < n_over:
            raise UsageError(
                f"this node talks with {len(self.peers)} peers, {n_new} more are needed and {len(unused)} are idle",
                remedy=f"raise Config.max_peers, now {self.config.max_peers}, or use fewer prefill ranks",
                max_peers=self.config.max_peers,
            )
        asked = sorted((session for session in unused if not session.spare), key=lambda session: session.used_at)
        for session in asked[: max(0, n_over - (len(unused) - len(asked)))]:
            session.spare = True
            self.send(session, m.Heartbeat(m.SPARE), now)

    def in_use(self, session: Session) -> bool:
        peer = self.peers.get(session.route)
        return bool(session.writers) or (peer is not None and bool(peer.rooms))

    def _on_heartbeat(self, session: Session, beat: m.Heartbeat, now: float) -> None:
        if beat.idle != m.IN_USE and m.SPARE in (beat.idle, self._need_of(session, now)) and not self.in_use(session):
            self._leave(session, now)

    def _leave(self, session: Session, now: float) -> None:
        """Ends a session that neither side needs: Bye, until it is answered or the peer was silent for too long."""
        self.counters.sessions_idle += 1
        session.said_bye = True
        self._leaving[session.route] = session, 0
        self.lose(session, PeerError("neither side needed the session"), now)
        self.timers.set(("bye_until", session), now + session.silence_s)
        self._say_bye(session, now)

    def _say_bye(self, session: Session, now: float) -> None:
        if not self._is_leaving(session.route, session.id):  # the route was left again since
            self.timers.cancel(("bye_until", session))
            return
        _, n_byes = self._leaving[session.route]
        self._leaving[session.route] = session, n_byes + 1
        self.send(session, m.Bye(), now)
        if n_byes:  # the answer may be what was lost: then the peer knows no such session, and says so
            self.send_loose(session.route, session.id, m.Heartbeat())
        self.back_off(("bye", session), now, n_byes, session.id.decode)

    def _on_farewell_timer(self, kind: str, session: Session, now: float) -> None:
        if kind == "bye":
            self._say_bye(session, now)
        else:
            self._left(session)

    def _is_leaving(self, route: bytes, session_id: m.SessionId) -> bool:
        return route in self._leaving and self._leaving[route][0].id == session_id

    def _on_farewell(self, route: bytes, session_id: m.SessionId) -> None:
        """The peer has heard our Bye, whatever it says to it."""
        if self._is_leaving(route, session_id):
            self._left(self._leaving[route][0])

    def _left(self, session: Session) -> None:
        if self._is_leaving(session.route, session.id):
            del self._leaving[session.route]
        self.timers.cancel(("bye", session))
        self.timers.cancel(("bye_until", session))
        self._hang_up(session.route)

    def needs(self, route: bytes) -> bool:
        """Whether somebody at `route` is greeted, talked with, or owes an answer."""
        return route in self.peers or route in self._leaving

    def _hang_up(self, route: bytes) -> None:
        if not self.needs(route):
            self.emit(HangUp(route))

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
    from pdstage.protocol.session import Link


class Parting(HandshakeClient):
    """The decode core's farewells."""

    def __init__(self, incarnation: int, config: Config, hello: m.Hello) -> None:
        super().__init__(incarnation, config, hello)
        self._leaving: dict[bytes, tuple[Link, int]] = {}
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
        links = (peer.link for peer in self.peers.values() if peer.route not in routes)
        unused = [link for link in links if link is not None and not self.in_use(link)]
        if len(unused) < n_over:
            raise UsageError(
                f"this node talks with {len(self.peers)} peers, {n_new} more are needed and {len(unused)} are idle",
                remedy=f"raise Config.max_peers, now {self.config.max_peers}, or use fewer prefill ranks",
                max_peers=self.config.max_peers,
            )
        asked = sorted((link for link in unused if not link.spare), key=lambda link: link.used_at)
        for link in asked[: max(0, n_over - (len(unused) - len(asked)))]:
            link.spare = True
            self.send(link, m.Heartbeat(m.SPARE), now)

    def in_use(self, link: Link) -> bool:
        peer = self.peers.get(link.route)
        return bool(link.parts) or (peer is not None and bool(peer.rooms))

    def _on_heartbeat(self, link: Link, beat: m.Heartbeat, now: float) -> None:
        if beat.idle != m.IN_USE and m.SPARE in (beat.idle, self._need_of(link, now)) and not self.in_use(link):
            self._leave(link, now)

    def _leave(self, link: Link, now: float) -> None:
        """Ends a session that neither side needs: Bye, until it is answered or the peer was silent for too long."""
        self.counters.sessions_idle += 1
        link.said_bye = True
        self._leaving[link.route] = link, 0
        self.lose(link, PeerError("neither side needed the session"), now)
        self.timers.set(("bye_until", link), now + link.silence_s)
        self._say_bye(link, now)

    def _say_bye(self, link: Link, now: float) -> None:
        if not self._is_leaving(link.route, link.session):  # the route was left again since
            self.timers.cancel(("bye_until", link))
            return
        _, n_byes = self._leaving[link.route]
        self._leaving[link.route] = link, n_byes + 1
        self.send(link, m.Bye(), now)
        if n_byes:  # the answer may be what was lost: then the peer knows no such session, and says so
            self.send_loose(link.route, link.session, m.Heartbeat())
        self.back_off(("bye", link), now, n_byes, link.session.decode)

    def _on_farewell_timer(self, kind: str, link: Link, now: float) -> None:
        if kind == "bye":
            self._say_bye(link, now)
        else:
            self._left(link)

    def _is_leaving(self, route: bytes, session: m.Session) -> bool:
        return route in self._leaving and self._leaving[route][0].session == session

    def _on_farewell(self, route: bytes, session: m.Session) -> None:
        """The peer has heard our Bye, whatever it says to it."""
        if self._is_leaving(route, session):
            self._left(self._leaving[route][0])

    def _left(self, link: Link) -> None:
        if self._is_leaving(link.route, link.session):
            del self._leaving[link.route]
        self.timers.cancel(("bye", link))
        self.timers.cancel(("bye_until", link))
        self._hang_up(link.route)

    def needs(self, route: bytes) -> bool:
        """Whether somebody at `route` is greeted, talked with, or owes an answer."""
        return route in self.peers or route in self._leaving

    def _hang_up(self, route: bytes) -> None:
        if not self.needs(route):
            self.emit(HangUp(route))

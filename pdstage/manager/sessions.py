"""Sessions at the transport: how they begin and end, and which lost ones still keep memory out of use.

A lost session is kept until none of its writes can land any more. The transport's disconnect may prove that, or the
death of the peer's process, or an operator says so: to this node (`fence`), or to all by the directory.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdstage.control.address import is_at
from pdstage.control.zmq import name_of
from pdstage.errors import PdstageError
from pdstage.layout.topology import Topology, places_of
from pdstage.log_limit import LogLimit
from pdstage.plan.token_slices import Pair

if TYPE_CHECKING:
    from pdstage.kernels import Pool
    from pdstage.manager.data_path import InPlace
    from pdstage.manager.node import AnyNode
    from pdstage.protocol.session import Session

log = logging.getLogger(__name__)

_DEAD_CHECK_S = 0.5


@dataclass(slots=True, eq=False)
class PeerPlan:
    """How one session's chunks travel: the peer's name at the transport, how the two layouts meet, and the plans of the
    direct path, which are made once for each range of layers.
    """

    label: str
    pair: Pair
    in_place: dict[tuple[object, ...], InPlace] = field(default_factory=dict)
    mapped: Pool | None = None
    """The peer's pages, where all of them are mapped here."""


class Sessions:
    """One node's sessions."""

    def __init__(self, node: AnyNode) -> None:
        self._node = node
        self._plans: dict[Session, PeerPlan] = {}
        self._dead_check_at = 0.0
        self._log_limit = LogLimit()
        self.lost: list[Session] = []
        """Those that are not fenced yet."""
        self._ended: set[Session] = set()
        """Lost ones whose processes an operator says have ended."""
        self.over: Counter[str] = Counter()
        """How many began, by transport."""

    def plan(self, session: Session) -> PeerPlan:
        """Made on first use: a peer may open a room before `attach`."""
        plan = self._plans.get(session)
        if plan is None:
            ours, theirs = self._node.pool.layout, session.layout
            layouts = (ours, theirs) if self._node.role == "prefill" else (theirs, ours)
            pair = Pair(*session.staged.made_of(*layouts), session.common, session.staged.order)
            plan = self._plans[session] = PeerPlan(label(session), pair)
        return plan

    def attach(self, session: Session, offers: dict[str, bytes]) -> None:
        """A session began: tells the transport who its peer is."""
        node = self._node
        try:
            node._identify_peer(session, node.transport.described(offers))
        except PdstageError as error:
            node.stager.check()  # a device of our own that has failed is no fault of a peer
            self.warn(session.route, error)
            with node.driver.lock:
                node.core.endpoint.now = time.monotonic()
                node.core.lose(session, error)
            return
        node.stager.reserve()
        over = node.transport.traits_of(label(session)).name
        peer = f"{node.core.peer} rank {place(session.topology)}"
        log.info(
            "session with %s at %s: transport %s, path %s",
            peer, node.socket.endpoint_of(session.route), over, self._path_to(session),
        )  # fmt: skip
        with node.driver.lock:
            self.over[over] += 1

    def _path_to(self, session: Session) -> str:
        """Which path the session's chunks take, as far as this side knows, for people."""
        path = self._node.path
        if path == "staged":
            return path
        if self._node.role == "decode":
            return "as prefill chooses"
        if session.exposes_pool and session.in_place:
            return path
        return f"staged (here it is {path}, but decode's pages cannot be written in place)"

    def detach(self, session: Session) -> None:
        """A session is lost: the transport lets go of its peer."""
        node = self._node
        if node.observed is not None:
            node.observed.lost(session)
        if (plan := self._plans.pop(session, None)) is not None:
            plan.in_place.clear()  # which hold the plan, and so the peer's mapped memory
        node.directory.forget()
        node.transport.disconnect(label(session))
        node.stager.forget(*session.staged[:2])
        self.lost.append(session)
        self._dead_check_at = 0.0

    def warn(self, route: bytes, error: PdstageError) -> None:
        """Logs what a peer did, within limits."""
        peer = self._node.socket.endpoint_of(route)
        if text := self._log_limit.due(peer, str(error), time.monotonic()):
            log.warning("peer %s: %s", peer, text)

    def check_lost(self) -> bool:
        """Checks whether lost sessions are fenced by now; true if one is, so that another round follows."""
        if not self.lost or (now := time.monotonic()) < self._dead_check_at:
            return False
        node = self._node
        self._dead_check_at = now + _DEAD_CHECK_S
        let_go = False
        for session in list(self.lost):
            if node._copies_to(session):  # they read this node's pages until they are over
                continue
            safe = session in self._ended or node._is_fenced(session) or node.transport.proved_dead(label(session))
            if safe or node._holds_nothing(session):
                let_go = True
                with node.driver.lock:
                    self.lost.remove(session)
                    self._ended.discard(session)
                    if safe:
                        node.core.counters.sessions_fenced += 1
                        node.core.endpoint.now = time.monotonic()
                        node.core.fenced(session)
                    node.transport.forget(label(session))
                    self.hang_up(session.route)
        return let_go

    def hang_up(self, route: bytes) -> None:
        """Closes a connection that this node made, unless it is needed again by now."""
        node = self._node
        # As in an engine's call that asks for this peer: it finds the connection, or makes a new one.
        with node.driver.lock:
            lost = any(session.route == route for session in self.lost)  # still named by `unfenced`
            if not lost and not node.core.needs(route):
                node.socket.disconnect(route)

    def fence(self, *names: str) -> int:
        """Processes have ended, by `control.zmq.name_of`, or by their endpoint or host; under the lock. Returns the
        number of their lost sessions.
        """
        endpoint_of = self._node.socket.endpoint_of
        gone = [
            one
            for one in self.lost
            if name_of(one.id.writer) in names or any(is_at(endpoint_of(one.route), name) for name in names)
        ]
        self._ended.update(gone)
        self._dead_check_at = 0.0
        return len(gone)


def place(topology: Topology) -> str:
    """A rank among its engine's, for people; a size of 1 goes without saying, but tp's."""
    said = (f"{axis} {rank} of {size}" for axis, rank, size in places_of(topology) if size > 1 or axis == "tp")
    return ", ".join(said)


def label(session: Session) -> str:
    """A session's name at the transport; a lost session's successor has another."""
    return f"{session.id.decode:016x}-{session.id.writer:016x}"

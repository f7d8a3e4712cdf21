"""Decode lends staging memory: leases, watermarks told, recalls, quarantine.

Layer 2, pure. Must not know the room table: a lease's life goes on after its room's end (I2, I15).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.protocol import messages as m
from pdstage.protocol.holdings import Grant, Holdings
from pdstage.protocol.parting import Parting

if TYPE_CHECKING:
    from pdstage.protocol.config import Config
    from pdstage.protocol.session import Session


class Lender(Parting):
    """The decode core's ledger of leases."""

    def __init__(self, incarnation: int, config: Config, hello: m.Hello) -> None:
        super().__init__(incarnation, config, hello)
        self.holdings = Holdings(hello.lanes)
        self._marks_sent: dict[Session, dict[int, int]] = {}

    def _lease(self, grant: Grant, now: float) -> None:
        request = grant.request
        mark = self._mark(request.session, grant.lane)
        answer = m.Lease(request.epoch, request.chunk, request.attempt, grant.lane, grant.cursor, request.nbytes, mark)
        self.send(request.session, answer, now)

    def _mark(self, session: Session, lane: int) -> int:
        """The lane's watermark, remembered as known to `session`: it bounds what that session may still begin."""
        mark = self.holdings.lanes[lane].watermark
        self._marks_sent.setdefault(session, {})[lane] = mark
        return mark

    def _on_returned(self, session: Session, returned: m.Returned, now: float) -> None:
        grant = self.holdings.at(returned.lane, returned.cursor)
        if grant is None or grant.request.session is not session or grant.state == "landed":
            return
        if (grant.request.epoch, grant.request.chunk) == (returned.epoch, returned.chunk):
            self.counters.leases_returned += 1
            self.holdings.release(grant, now)

    def _release_of(self, session: Session, epoch: int, now: float) -> None:
        """The writer is quiet about this epoch: everything it did not land is free."""
        for grant in self.holdings.of(session, epoch):
            if grant.state != "landed":
                self.holdings.release(grant, now)

    def _quarantine_of(self, session: Session, epoch: int, now: float) -> None:
        """The room failed: its writer may still write what it was granted."""
        for grant in self.holdings.of(session, epoch):
            if grant.state == "granted":
                self._quarantine(grant, now)

    def _quarantine(self, grant: Grant, now: float) -> None:
        self.counters.leases_quarantined += 1
        self.holdings.quarantine(grant, now)
        self.timers.set(("recalls",), now)

    def _strand(self, session: Session, now: float) -> None:
        """The session is lost: what it may still write is quarantined; what its last watermark forbids it, free."""
        marks = self._marks_sent.pop(session, {})
        self.holdings.forget_requests(session)
        for grant in self.holdings.of_session(session):
            capacity = self.holdings.lanes[grant.lane].capacity
            begins_never = grant.end > marks.get(grant.lane, 0) + capacity
            if grant.state != "landed" and begins_never:
                self.holdings.release(grant, now)
            elif grant.state == "granted":
                self._quarantine(grant, now)

    def _unstrand(self, session: Session, now: float) -> None:
        """The session is fenced: all it held but what waits for its scatter is free."""
        for grant in self.holdings.of_session(session):
            if grant.state != "landed":
                self.holdings.release(grant, now)

    def _settle(self, now: float) -> None:
        """After every input: grants what waits, tells whose window opened, and arms recall while something waits."""
        for granted in self.holdings.grant_waiting(now):
            if isinstance(granted, Grant):
                self.counters.leases_granted += 1
                self._lease(granted, now)
            else:
                most = self.holdings.largest()
                refused = m.Refused(granted.epoch, granted.chunk, granted.attempt, "too_big", most)
                self.send(granted.session, refused, now)
        told = set()
        for grant in self.holdings.opened():
            session = grant.request.session
            if (session, grant.lane) not in told and session.id in self.sessions:
                told.add((session, grant.lane))
                self.send(session, m.Watermark(grant.lane, self._mark(session, grant.lane)), now)
        if self.holdings.note_contention(now):
            soon = min(self.config.recall_after_s, self.config.stuck_after_s)
            self.timers.set_default(("recalls",), now + soon)

    def _recall_all(self, now: float) -> None:
        """Asks for every lease that is in the way, again and again while something waits."""
        for grant in self.holdings.to_recall(now, self.config.recall_after_s, self.config.stuck_after_s):
            if grant.request.session.id in self.sessions:
                self._recall(grant, now)
        if self.holdings.contended:
            self.repeat(("recalls",), now)

    def _recall(self, grant: Grant, now: float) -> None:
        request = grant.request
        self.counters.leases_recalled += 1
        mark = self._mark(request.session, grant.lane)
        recall = m.Recall(request.epoch, request.chunk, request.attempt, grant.lane, grant.cursor, mark)
        self.send(request.session, recall, now)

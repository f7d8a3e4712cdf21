"""Decode lends staging memory: leases, watermarks told, recalls, quarantine.

Layer 2, pure. Must not know the room table: a lease's life goes on after its room's end (I2, I15).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.protocol import messages as m
from pdstage.protocol.leases import Lease, LeaseTable
from pdstage.protocol.parting import Parting

if TYPE_CHECKING:
    from pdstage.protocol.config import Config
    from pdstage.protocol.session import Session


class Lender(Parting):
    """The decode core's ledger of leases."""

    def __init__(self, incarnation: int, config: Config, hello: m.Hello) -> None:
        super().__init__(incarnation, config, hello)
        self.leases = LeaseTable(hello.lanes)
        self._marks_sent: dict[Session, dict[int, int]] = {}

    def _lease(self, lease: Lease, now: float) -> None:
        request = lease.request
        mark = self._mark(request.session, lease.lane)
        answer = m.Lease(request.epoch, request.chunk, request.attempt, lease.lane, lease.cursor, request.nbytes, mark)
        self.send(request.session, answer, now)

    def _mark(self, session: Session, lane: int) -> int:
        """The lane's watermark, remembered as known to `session`: it bounds what that session may still begin."""
        mark = self.leases.lanes[lane].watermark
        self._marks_sent.setdefault(session, {})[lane] = mark
        return mark

    def _on_returned(self, session: Session, returned: m.Returned, now: float) -> None:
        lease = self.leases.at(returned.lane, returned.cursor)
        if lease is None or lease.request.session is not session or lease.state == "landed":
            return
        if (lease.request.epoch, lease.request.chunk) == (returned.epoch, returned.chunk):
            self.counters.leases_returned += 1
            self.leases.release(lease, now)

    def _release_of(self, session: Session, epoch: int, now: float) -> None:
        """The writer is quiet about this epoch: everything it did not land is free."""
        for lease in self.leases.of(session, epoch):
            if lease.state != "landed":
                self.leases.release(lease, now)

    def _quarantine_of(self, session: Session, epoch: int, now: float) -> None:
        """The room failed: its writer may still write what it was granted."""
        for lease in self.leases.of(session, epoch):
            if lease.state == "granted":
                self._quarantine(lease, now)

    def _quarantine(self, lease: Lease, now: float) -> None:
        self.counters.leases_quarantined += 1
        self.leases.quarantine(lease, now)
        self.timers.set(("recalls",), now)

    def _strand(self, session: Session, now: float) -> None:
        """The session is lost: what it may still write is quarantined; what its last watermark forbids it, free."""
        marks = self._marks_sent.pop(session, {})
        self.leases.forget_requests(session)
        for lease in self.leases.of_session(session):
            capacity = self.leases.lanes[lease.lane].capacity
            begins_never = lease.end > marks.get(lease.lane, 0) + capacity
            if lease.state != "landed" and begins_never:
                self.leases.release(lease, now)
            elif lease.state == "granted":
                self._quarantine(lease, now)

    def _unstrand(self, session: Session, now: float) -> None:
        """The session is fenced: all it held but what waits for its scatter is free."""
        for lease in self.leases.of_session(session):
            if lease.state != "landed":
                self.leases.release(lease, now)

    def _settle(self, now: float) -> None:
        """After every input: grants what waits, tells whose window opened, and arms recall while something waits."""
        for granted in self.leases.grant_waiting(now):
            if isinstance(granted, Lease):
                self.counters.leases_granted += 1
                self._lease(granted, now)
            else:
                most = self.leases.largest()
                refused = m.Refused(granted.epoch, granted.chunk, granted.attempt, "too_big", most)
                self.send(granted.session, refused, now)
        told = set()
        for lease in self.leases.opened():
            session = lease.request.session
            if (session, lease.lane) not in told and session.id in self.sessions:
                told.add((session, lease.lane))
                self.send(session, m.Watermark(lease.lane, self._mark(session, lease.lane)), now)
        if self.leases.note_contention(now):
            soon = min(self.config.recall_after_s, self.config.stuck_after_s)
            self.timers.set_default(("recalls",), now + soon)

    def _recall_all(self, now: float) -> None:
        """Asks for every lease that is in the way, again and again while something waits."""
        for lease in self.leases.to_recall(now, self.config.recall_after_s, self.config.stuck_after_s):
            if lease.request.session.id in self.sessions:
                self._recall(lease, now)
        if self.leases.contended:
            self.repeat(("recalls",), now)

    def _recall(self, lease: Lease, now: float) -> None:
        request = lease.request
        self.counters.leases_recalled += 1
        mark = self._mark(request.session, lease.lane)
        recall = m.Recall(request.epoch, request.chunk, request.attempt, lease.lane, lease.cursor, mark)
        self.send(request.session, recall, now)

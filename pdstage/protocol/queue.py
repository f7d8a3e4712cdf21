"""Requests that wait for a lease, in order of priority and arrival, whatever the number of sessions that ask.

Layer 2, pure. Must not know lanes: `leases` says whose turn may be passed over.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from pdstage.plan import Rect
    from pdstage.protocol.messages import SessionId
    from pdstage.protocol.session import Session


@dataclass(slots=True, eq=False)
class LeaseRequest:
    """One attempt of one chunk, waiting for a lease."""

    session: Session
    epoch: int
    chunk: int
    attempt: int
    nbytes: int
    rects: tuple[Rect, ...]
    priority: int
    waiting: bool = True

    @property
    def claim(self) -> tuple[SessionId, int]:
        return (self.session.id, self.epoch)


class RequestQueue:
    """First come first served within a priority; sessions may be passed over.

    Each session's requests are a heap, and one heap holds the front of each session. Entries that are no longer true
    are met and thrown away at the top, or all at once when they are most of a heap.
    """

    def __init__(self) -> None:
        self._n_arrived = 0
        self._n_waiting = 0
        self._queues: dict[Session, list[tuple[int, int, LeaseRequest]]] = {}
        self._counts: dict[Session, int] = {}
        self._fronts: list[tuple[int, int, Session]] = []
        self._front: dict[Session, tuple[int, int]] = {}
        """The entry of each session in `_fronts` that counts: never behind its true front."""

    def __len__(self) -> int:
        return self._n_waiting

    def __contains__(self, session: Session) -> bool:
        return session in self._counts

    @property
    def n_sessions(self) -> int:
        return len(self._counts)

    def add(self, request: LeaseRequest) -> None:
        session = request.session
        self._n_arrived += 1
        self._n_waiting += 1
        self._counts[session] = self._counts.get(session, 0) + 1
        place = (request.priority, self._n_arrived)
        queue = self._queues.setdefault(session, [])
        heapq.heappush(queue, (*place, request))
        if len(queue) > 64 + 4 * self._counts[session]:
            queue[:] = [entry for entry in queue if entry[2].waiting]
            heapq.heapify(queue)
        if session not in self._front or place < self._front[session]:
            self._put_front(session, place)

    def remove(self, request: LeaseRequest) -> None:
        session = request.session
        request.waiting = False
        self._n_waiting -= 1
        self._counts[session] -= 1
        if not self._counts[session]:
            del self._counts[session], self._queues[session], self._front[session]

    def first(self, passed_over: Container[Session]) -> LeaseRequest | None:
        """The first in line of the sessions not `passed_over`; those are few, the sessions that wait may be many."""
        aside, found = [], None
        while self._fronts and found is None:
            priority, n, session = self._fronts[0]
            if self._front.get(session) != (priority, n):
                heapq.heappop(self._fronts)
                continue
            queue = self._queues[session]
            while not queue[0][2].waiting:
                heapq.heappop(queue)
            if queue[0][:2] != (priority, n):
                heapq.heappop(self._fronts)
                self._put_front(session, queue[0][:2])
            elif session in passed_over:
                aside.append(heapq.heappop(self._fronts))
            else:
                found = queue[0][2]
        for entry in aside:
            heapq.heappush(self._fronts, entry)
        return found

    def entries(self) -> Iterator[tuple[int, int, LeaseRequest]]:
        """(priority, place in line, request), in no order."""
        return (entry for queue in self._queues.values() for entry in queue if entry[2].waiting)

    def _put_front(self, session: Session, place: tuple[int, int]) -> None:
        self._front[session] = place
        heapq.heappush(self._fronts, (*place, session))
        if len(self._fronts) > 64 + 4 * len(self._front):
            self._fronts = [(*place, session) for session, place in self._front.items()]
            heapq.heapify(self._fronts)

"""Requests that wait for a lease, in order of priority and arrival, whatever the number of sessions that ask.

Layer 2, pure. Must not know lanes: `holdings` says whose turn may be passed over.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from pdstage.plan import Rect
    from pdstage.protocol.messages import Session
    from pdstage.protocol.session import Link


@dataclass(slots=True, eq=False)
class Request:
    """One attempt of one chunk, waiting for a lease."""

    link: Link
    epoch: int
    chunk: int
    attempt: int
    nbytes: int
    rects: tuple[Rect, ...]
    priority: int
    waiting: bool = True

    @property
    def claim(self) -> tuple[Session, int]:
        return (self.link.session, self.epoch)


class RequestQueue:
    """First come first served within a priority; sessions may be passed over.

    Each session's requests are a heap, and one heap holds the front of each session. Entries that are no longer true
    are met and thrown away at the top, or all at once when they are most of a heap.
    """

    def __init__(self) -> None:
        self._n_arrived = 0
        self._n_waiting = 0
        self._queues: dict[Link, list[tuple[int, int, Request]]] = {}
        self._counts: dict[Link, int] = {}
        self._fronts: list[tuple[int, int, Link]] = []
        self._front: dict[Link, tuple[int, int]] = {}
        """The entry of each session in `_fronts` that counts: never behind its true front."""

    def __len__(self) -> int:
        return self._n_waiting

    def __contains__(self, link: Link) -> bool:
        return link in self._counts

    @property
    def n_sessions(self) -> int:
        return len(self._counts)

    def add(self, request: Request) -> None:
        link = request.link
        self._n_arrived += 1
        self._n_waiting += 1
        self._counts[link] = self._counts.get(link, 0) + 1
        place = (request.priority, self._n_arrived)
        queue = self._queues.setdefault(link, [])
        heapq.heappush(queue, (*place, request))
        if len(queue) > 64 + 4 * self._counts[link]:
            queue[:] = [entry for entry in queue if entry[2].waiting]
            heapq.heapify(queue)
        if link not in self._front or place < self._front[link]:
            self._put_front(link, place)

    def remove(self, request: Request) -> None:
        link = request.link
        request.waiting = False
        self._n_waiting -= 1
        self._counts[link] -= 1
        if not self._counts[link]:
            del self._counts[link], self._queues[link], self._front[link]

    def first(self, passed_over: Container[Link]) -> Request | None:
        """The first in line of the sessions not `passed_over`; those are few, the sessions that wait may be many."""
        aside, found = [], None
        while self._fronts and found is None:
            priority, n, link = self._fronts[0]
            if self._front.get(link) != (priority, n):
                heapq.heappop(self._fronts)
                continue
            queue = self._queues[link]
            while not queue[0][2].waiting:
                heapq.heappop(queue)
            if queue[0][:2] != (priority, n):
                heapq.heappop(self._fronts)
                self._put_front(link, queue[0][:2])
            elif link in passed_over:
                aside.append(heapq.heappop(self._fronts))
            else:
                found = queue[0][2]
        for entry in aside:
            heapq.heappush(self._fronts, entry)
        return found

    def entries(self) -> Iterator[tuple[int, int, Request]]:
        """(priority, place in line, request), in no order."""
        return (entry for queue in self._queues.values() for entry in queue if entry[2].waiting)

    def _put_front(self, link: Link, place: tuple[int, int]) -> None:
        self._front[link] = place
        heapq.heappush(self._fronts, (*place, link))
        if len(self._fronts) > 64 + 4 * len(self._front):
            self._fronts = [(*place, link) for link, place in self._front.items()]
            heapq.heapify(self._fronts)

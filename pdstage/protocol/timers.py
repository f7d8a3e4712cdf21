"""The one timer of a core: many named moments, the earliest of which the driver waits for.

Layer 2, pure. Must not know what the moments mean.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator


class Timers:
    """Moments by key; setting one again moves it. Cancelled ones are forgotten lazily, within a constant factor."""

    __slots__ = ("_at", "_heap", "_n")

    def __init__(self) -> None:
        self._at: dict[Hashable, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._n = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._at

    def set(self, key: Hashable, at: float) -> None:
        self._n += 1
        self._at[key] = (at, self._n)
        heapq.heappush(self._heap, (at, self._n, key))
        if len(self._heap) > 64 + 4 * len(self._at):
            self._heap = [(at, n, key) for key, (at, n) in self._at.items()]
            heapq.heapify(self._heap)

    def set_default(self, key: Hashable, at: float) -> None:
        if key not in self._at:
            self.set(key, at)

    def cancel(self, key: Hashable) -> None:
        self._at.pop(key, None)

    def next_at(self) -> float | None:
        heap, at = self._heap, self._at
        while heap and at.get(heap[0][2], (0.0, 0))[1] != heap[0][1]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> Iterator[Hashable]:
        """Keys whose moment has come, each removed as it is given; the consumer may set and cancel freely."""
        while (at := self.next_at()) is not None and at <= now:
            key = heapq.heappop(self._heap)[2]
            del self._at[key]
            yield key

    def delay(self, by_s: float) -> None:
        """Moves every moment `by_s` later: for a driver that itself came late."""
        self._at = {key: (at + by_s, n) for key, (at, n) in self._at.items()}
        self._heap = [(at, n, key) for key, (at, n) in self._at.items()]
        heapq.heapify(self._heap)

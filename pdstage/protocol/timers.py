"""The one timer of a core: many named moments, the earliest of which the driver waits for."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

_GONE = object()


class Timers:
    """Moments by key; setting one again moves it.

    A cancelled moment lets go of its key at once, and so of all the key holds; its place in the heap is forgotten
    lazily, within a constant factor.
    """

    __slots__ = ("_at", "_heap", "_n")

    def __init__(self) -> None:
        self._at: dict[Hashable, list[Any]] = {}
        self._heap: list[list[Any]] = []
        """[moment, number, key]; the key is `_GONE` once it was cancelled or moved."""
        self._n = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._at

    def set(self, at: float, *key: object) -> None:
        if (moved := self._at.get(key)) is not None:
            moved[2] = _GONE
        self._n += 1
        entry = self._at[key] = [at, self._n, key]
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 4 * len(self._at):
            self._heap = list(self._at.values())
            heapq.heapify(self._heap)

    def cancel(self, *key: object) -> None:
        entry = self._at.pop(key, None)
        if entry is not None:
            entry[2] = _GONE

    def next_at(self) -> float | None:
        heap = self._heap
        while heap and heap[0][2] is _GONE:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due(self, now: float) -> Iterator[Any]:
        """Keys whose moment has come, each removed as it is given; the consumer may set and cancel freely."""
        while self._heap and self._heap[0][0] <= now:
            key = heapq.heappop(self._heap)[2]
            if key is not _GONE:
                del self._at[key]
                yield key

    def delay(self, by_s: float) -> None:
        """Moves every moment `by_s` later: for a driver that itself came late."""
        for entry in self._heap:  # their order stays
            entry[0] += by_s

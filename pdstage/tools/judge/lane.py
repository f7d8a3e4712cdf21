"""One lane of decode's staging memory, from its leases' journal lines: which leases share bytes (I3)."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """A lease's cursors, rounded up to 256."""

    start: int
    stop: int


class Lane:
    """The leases of one lane, by their first cursor: those not released, and those that landed in the last laps."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.live: dict[int, Span] = {}
        self.landed: dict[int, Span] = {}

    def before(self, lease: Span) -> list[int]:
        """Unreleased leases granted before `lease` that share bytes with it."""
        return [one.start for one in self.live.values() if one.start < lease.start and self._meet(one, lease)]

    def after(self, lease: Span) -> list[int]:
        """Landed leases granted after `lease` that share bytes with it."""
        return [one.start for one in self.landed.values() if one.start > lease.start and self._meet(one, lease)]

    def land(self, lease: Span) -> None:
        self.landed[lease.start] = lease
        for old in [old for old in self.landed if old < lease.start - 4 * self.capacity]:
            del self.landed[old]

    def _meet(self, one: Span, other: Span) -> bool:
        """Whether they share a byte of memory; neither crosses the lane's end."""
        first, second = one.start % self.capacity, other.start % self.capacity
        return first < second + other.stop - other.start and second < first + one.stop - one.start

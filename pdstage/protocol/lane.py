"""One staging lane as a ring: which bytes are leased, and up to where they are free. It touches no memory.

A *cursor* is a byte count that never wraps and never restarts; the byte it names is `cursor % capacity`. Leases are
granted in cursor order, each contiguous. The *watermark* is the cursor below which everything is released. A lease

    may be granted   if its end is at most watermark + 2 * capacity
    may be written   if its end is at most watermark + capacity; it is *open* then, and *closed* before

A closed lease lies on bytes that belong to leases of the lap before. In a lane of 1,024 bytes:

    cursor   0      256            768     1024     1280
             [  A  ][      B      ][  C   ][   D    ]      D has the bytes of A. It opens when A is released,
             lap 0                         lap 1           since the watermark is then 256, and 256 + 1024 = 1280.

Only unreleased leases are stored. The watermark is the cursor of the first of them, or the head if there is none. A
lease may skip bytes, to stay contiguous or to avoid a carved-out span. That padding is not stored, so nothing waits for
it.

A *quarantined* lease may still be written by a lost writer. Its bytes are *carved out*: no later lease gets them until
`release`. The watermark may pass it, unless a live lease has the same bytes one lap on, because that lease would open.
So if B is quarantined and A is released, the watermark goes on to C at 768. But if D had the bytes of B, the watermark
would stay at 256 until D is returned (`in_the_way`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdstage.errors import UsageError
from pdstage.protocol.state import LeasePhase

if TYPE_CHECKING:
    from collections.abc import Iterator

ALIGNMENT = 256


@dataclass(slots=True)
class _Lease:
    """A lease as its lane sees it: `nbytes` is rounded up to 256."""

    cursor: int
    nbytes: int
    state: LeasePhase

    @property
    def end(self) -> int:
        return self.cursor + self.nbytes


class Lane:
    """The leases of one ring of `capacity` bytes, a positive multiple of 256.

    Every lease starts at a multiple of 256 and occupies a multiple of 256 bytes. Between grant and release it is
    exactly one of "granted", "landed" and "quarantined" (I15). Memory is proportional to unreleased leases (I14).
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1 or capacity % ALIGNMENT:
            raise UsageError(
                f"a lane of {capacity} bytes cannot be cut into leases",
                remedy=f"give a positive multiple of {ALIGNMENT}",
                capacity=capacity,
            )
        self.capacity = capacity
        self.head = 0
        """The cursor the next grant starts from, before any padding."""
        self.watermark = 0
        """The cursor below which everything is released or carved out. Never falls (I4); equals `head` in an idle lane.
        """
        self._ahead: OrderedDict[int, _Lease] = OrderedDict()  # unreleased, from the watermark on; cursors rise
        self._passed: dict[int, _Lease] = {}  # quarantined and passed by the watermark
        self._gaps: list[tuple[int, int]] | None = [(0, capacity)]  # of `_find_gaps`; None once outdated
        self._largest = capacity  # of the gaps

    @property
    def quarantined_nbytes(self) -> int:
        """Bytes of the lane that are carved out."""
        return self.capacity - sum(stop - start for start, stop in self._find_gaps())

    def largest(self) -> int:
        """The largest lease that the lane can grant now: its largest span that is not carved out."""
        if self._gaps is None:
            self._find_gaps()
        return self._largest

    def cursor_of_next(self, nbytes: int) -> int | None:
        """What `grant` would return now. Changes nothing."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        largest = self.largest()
        if not 1 <= size <= largest:
            raise UsageError(
                f"a lease of {nbytes} bytes does not fit a lane whose largest free span is {largest}",
                remedy="split the chunk, or send it on the direct path" if size > 0 else "ask for at least one byte",
                nbytes=nbytes,
                max_nbytes=largest,
            )
        cursor = self._first_fit(size)
        return cursor if cursor + size <= self.watermark + 2 * self.capacity else None

    def grant(self, nbytes: int) -> int | None:
        """The cursor of a new lease of `nbytes` (rounded up to 256). None if it must wait; then nothing changed.

        Raises `UsageError` if `nbytes` is below 1 or above `largest()`: such a lease would wait for ever.
        """
        cursor = self.cursor_of_next(nbytes)
        if cursor is None:
            return None
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._ahead[cursor] = _Lease(cursor, size, LeasePhase.GRANTED)
        self.head = cursor + size
        self._advance()  # past the padding in front, if the lane was idle
        return cursor

    def is_open(self, cursor: int, nbytes: int) -> bool:
        """Whether a writer may start to write a lease: the bytes one lap before it are all free."""
        return cursor + nbytes <= self.watermark + self.capacity

    def land(self, cursor: int) -> None:
        """A granted lease was written: granted -> landed."""
        self._lease(cursor, LeasePhase.GRANTED).state = LeasePhase.LANDED

    def release(self, cursor: int) -> bool:
        """Nothing will write or read the lease any more. Returns whether the watermark advanced."""
        lease = self._lease(cursor, LeasePhase.GRANTED, LeasePhase.LANDED, LeasePhase.QUARANTINED)
        (self._ahead if cursor in self._ahead else self._passed).pop(cursor)
        if lease.state == LeasePhase.QUARANTINED:
            self._gaps = None
        return self._advance()

    def quarantine(self, cursor: int) -> bool:
        """A granted lease is not needed, but its writer may still write: granted -> quarantined, carved out.

        Returns whether the watermark advanced. Call `in_the_way` next: those leases hold the watermark until they
        return.
        """
        self._lease(cursor, LeasePhase.GRANTED).state = LeasePhase.QUARANTINED
        self._gaps = None
        return self._advance()

    def in_the_way(self) -> list[int]:
        """Granted leases that have a quarantined lease's bytes one lap on. All are closed, so they can be recalled."""
        quarantined = [lease for lease in self._ahead.values() if lease.state == LeasePhase.QUARANTINED]
        if not quarantined:
            return []
        ends = [lease.end + self.capacity for lease in quarantined]  # disjoint and ascending, as the cursors are
        found = []
        for lease in self._ahead.values():
            at = bisect_right(ends, lease.cursor) if lease.state == LeasePhase.GRANTED else len(ends)
            if at < len(ends) and self._on_next_lap(quarantined[at], lease):
                found.append(lease.cursor)
        return found

    def leases(self) -> Iterator[tuple[int, int, LeasePhase]]:
        """(cursor, nbytes rounded up to 256, state) of every unreleased lease, cursors ascending."""
        for lease in sorted((*self._passed.values(), *self._ahead.values()), key=lambda lease: lease.cursor):
            yield lease.cursor, lease.nbytes, lease.state

    def _lease(self, cursor: int, *states: LeasePhase) -> _Lease:
        lease = self._ahead.get(cursor) or self._passed.get(cursor)
        if lease is None or lease.state not in states:
            raise UsageError(
                f"the lease at cursor {cursor} is {lease.state if lease else 'not held'}",
                remedy=f"this needs one that is {' or '.join(states)}",
                cursor=cursor,
            )
        return lease

    def _first_fit(self, size: int) -> int:
        """The lowest cursor from the head on whose `size` bytes are contiguous and not carved out."""
        lap = self.head // self.capacity * self.capacity
        for base in (
            lap,
            lap + self.capacity,
        ):  # the second lap has every gap whole, so the largest is found there
            for start, stop in self._gaps or self._find_gaps():
                cursor = max(self.head, base + start)
                if cursor + size <= base + stop:
                    return cursor
        raise AssertionError(f"no gap of {size} bytes in {self._find_gaps()}")

    def _on_next_lap(self, old: _Lease, lease: _Lease) -> bool:
        """Whether `lease` has bytes of `old`, one lap on."""
        return lease.cursor < old.end + self.capacity and old.cursor + self.capacity < lease.end

    def _find_gaps(self) -> list[tuple[int, int]]:
        """The spans of the lane's memory that are not carved out, ascending.

        Computed on demand, since many leases are quarantined at once. Quarantined spans may overlap, one lap apart.
        """
        if self._gaps is not None:
            return self._gaps
        held = (lease for leases in (self._ahead, self._passed) for lease in leases.values())
        spans = sorted(
            (lease.cursor % self.capacity, lease.nbytes) for lease in held if lease.state == LeasePhase.QUARANTINED
        )
        gaps, at = [], 0
        for start, nbytes in spans:
            if start > at:
                gaps.append((at, start))
            at = max(at, start + nbytes)
        if at < self.capacity:
            gaps.append((at, self.capacity))
        self._gaps, self._largest = gaps, max((stop - start for start, stop in gaps), default=0)
        return gaps

    def _is_blocked(self, old: _Lease) -> bool:
        """Whether a live lease has the bytes of `old` one lap on. Such leases are the last ones in `_ahead`."""
        for lease in reversed(self._ahead.values()):
            if lease.end <= old.cursor + self.capacity:
                return False
            if lease.state != LeasePhase.QUARANTINED and self._on_next_lap(old, lease):
                return True
        return False

    def _advance(self) -> bool:
        """Moves the watermark as far as it may go; True if it moved."""
        before = self.watermark
        while self._ahead:
            first = next(iter(self._ahead.values()))
            if first.state != LeasePhase.QUARANTINED or self._is_blocked(first):
                break
            self._passed[first.cursor] = self._ahead.pop(first.cursor)
        self.watermark = next(iter(self._ahead), self.head)
        return self.watermark > before

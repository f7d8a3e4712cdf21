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

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdstage.protocol.state import LEASE, LeaseEvent, LeasePhase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdstage.layout.topology import Range
    from pdstage.plan import Rects
    from pdstage.protocol.session import Session

ALIGNMENT = 256


def rounded(nbytes: int) -> int:
    """What a lease of `nbytes` takes of its lane."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True, eq=False)
class Lease:
    """Staging memory for one attempt of one chunk: asked for, and then lent, `nbytes` from `cursor` on."""

    session: Session
    epoch: int
    chunk: int
    attempt: int
    nbytes: int
    rects: Rects
    """None of a lease in advance whose tag has not come."""
    priority: int
    lane: int = 0
    cursor: int = 0
    end: int = 0
    """Where its bytes in the lane end; they are multiples of 256."""
    granted_at: float = 0.0
    phase: LeasePhase = LeasePhase.WAITING
    said_written: bool = False
    """Its writer's CloseOk lists it as written, so its tag is on the way. Set by `decode_chunks`."""
    recalled: bool = False


class Lane:
    """The leases of one ring of `capacity` bytes, a positive multiple of 256.

    Every lease starts at a multiple of 256 and occupies a multiple of 256 bytes. Between grant and release it is
    exactly one of "granted", "landed" and "quarantined" (I15). Memory is proportional to unreleased leases (I14).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.head = 0
        """The cursor the next grant starts from, before any padding."""
        self.watermark = 0
        """The cursor below which everything is released or carved out. Never falls (I4); equals `head` in an idle lane.
        """
        self.moved_at = 0.0
        """When the watermark last rose, or the lane was idle."""
        self._ahead: OrderedDict[int, Lease] = OrderedDict()  # unreleased, from the watermark on; cursors rise
        self._passed: dict[int, Lease] = {}  # quarantined and passed by the watermark
        self._gaps: list[Range] | None = [(0, capacity)]  # of `_find_gaps`; None once outdated

    @property
    def idle(self) -> bool:
        """All leases in it are carved out, and keep nobody waiting."""
        return self.head == self.watermark

    @property
    def quarantined_nbytes(self) -> int:
        """Bytes of the lane that are carved out."""
        return self.capacity - sum(stop - start for start, stop in self._find_gaps())

    def largest(self) -> int:
        """The largest lease that the lane can grant now: its largest span that is not carved out."""
        return max((stop - start for start, stop in self._find_gaps()), default=0)

    def place(self, nbytes: int) -> int | None:
        """The cursor that a lease of `nbytes` would have now; None if it must wait, or is larger than `largest()`."""
        size = rounded(nbytes)
        lap = self.head // self.capacity * self.capacity
        # The second lap has every gap whole, so the largest is found there.
        for base in (lap, lap + self.capacity):
            for start, stop in self._find_gaps():
                cursor = max(self.head, base + start)
                if cursor + size <= base + stop:
                    return cursor if cursor + size <= self.watermark + 2 * self.capacity else None
        return None

    def grant(self, lease: Lease, cursor: int, now: float) -> None:
        """Lends a lease that waits the bytes from `cursor` on, which `place` has said."""
        LEASE.move(lease, LeaseEvent.GRANT)
        if self.idle:
            self.moved_at = now
        lease.cursor, lease.granted_at = cursor, now
        self._ahead[cursor] = lease
        self.head = lease.end = cursor + rounded(lease.nbytes)
        self._advance(now)  # past the padding in front, if the lane was idle

    def is_open(self, end: int) -> bool:
        """Whether a writer may start to write a lease up to `end`: the bytes one lap before it are all free."""
        return end <= self.watermark + self.capacity

    def release(self, lease: Lease, now: float) -> None:
        """Nothing will write or read the lease any more."""
        (self._ahead if lease.cursor in self._ahead else self._passed).pop(lease.cursor)
        if lease.phase is LeasePhase.QUARANTINED:
            self._gaps = None
        LEASE.move(lease, LeaseEvent.RELEASE)
        self._advance(now)

    def quarantine(self, lease: Lease, now: float) -> None:
        """A granted lease is not needed, but its writer may still write: it is carved out. Call `in_the_way` next:
        those leases hold the watermark until they return.
        """
        LEASE.move(lease, LeaseEvent.QUARANTINE)
        self._gaps = None
        self._advance(now)

    def in_the_way(self) -> set[Lease]:
        """Leases that have a quarantined lease's bytes one lap on. All are closed, so they can be recalled."""
        return {
            later
            for lease in self._ahead.values()
            if lease.phase is LeasePhase.QUARANTINED
            for later in self._one_lap_on(lease)
        }

    def leases(self) -> list[Lease]:
        """Every unreleased lease, cursors ascending."""
        return sorted((*self._passed.values(), *self._ahead.values()), key=lambda lease: lease.cursor)

    def at(self, cursor: int) -> Lease | None:
        return self._ahead.get(cursor) or self._passed.get(cursor)

    def _find_gaps(self) -> list[Range]:
        """The spans of the lane's memory that are not carved out, ascending.

        Computed on demand, since many leases are quarantined at once. Quarantined spans may overlap, one lap apart.
        """
        if self._gaps is not None:
            return self._gaps
        carved = [
            (lease.cursor % self.capacity, lease.end - lease.cursor)
            for lease in self.leases()
            if lease.phase is LeasePhase.QUARANTINED
        ]
        self._gaps, at = [], 0
        for start, nbytes in (*sorted(carved), (self.capacity, 0)):
            if start > at:
                self._gaps.append((at, start))
            at = max(at, start + nbytes)
        return self._gaps

    def _one_lap_on(self, old: Lease) -> Iterator[Lease]:
        """Live leases that have bytes of `old` one lap on. Such leases are the last ones in `_ahead`."""
        for lease in reversed(self._ahead.values()):
            if lease.end <= old.cursor + self.capacity:
                return
            if lease.phase is not LeasePhase.QUARANTINED and lease.cursor < old.end + self.capacity:
                yield lease

    def _advance(self, now: float) -> None:
        """Moves the watermark as far as it may go."""
        before = self.watermark
        while self._ahead:
            first = next(iter(self._ahead.values()))
            if first.phase is not LeasePhase.QUARANTINED or any(self._one_lap_on(first)):
                break
            self._passed[first.cursor] = self._ahead.pop(first.cursor)
        self.watermark = next(iter(self._ahead), self.head)
        if self.watermark > before:
            self.moved_at = now

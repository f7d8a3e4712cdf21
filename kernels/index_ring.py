"""Uploads item lists from the host to a device, in the caller's stream and without waiting.

A ring of slots, each a piece of pinned host memory with as much device memory and an event. A list is copied to the
next slot whose last kernel has run. Its upload is enqueued in the caller's stream, and the event is recorded after the
kernel that reads it.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from ..errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray

ALIGNMENT = 16
SLOT_NBYTES = 64 << 10


class Runtime(Protocol):
    """The calls of a device's runtime that this package needs; streams and events are integers or the runtime's
    objects. Any thread may make them, also while another thread records a graph.
    """

    def current(self) -> AbstractContextManager[None]:
        """Inside, the device and its context are current in the calling thread, and its calls break no other thread's
        recording of a graph. At the end the previous state is restored. It is for all code that calls the device: a
        node's turn, its transport, an engine's events.
        """

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory."""

    flushes: bool
    """Whether kernels see a NIC's writes to the device's memory only after `flush`."""

    def flush(self) -> None: ...

    def page_lock(self, ptr: int, nbytes: int) -> bool:
        """Lets kernels read and write host memory in place, until `page_unlock(ptr)`; false if they can already.

        Raises `UsageError` if that is impossible.
        """

    def page_unlock(self, ptr: int) -> None: ...

    def allocate(self, nbytes: int) -> int:
        """The address of device memory that lives as long as the runtime. NICs can write it; other processes can open
        it.
        """

    def reserve(self) -> None:
        """Plans will follow: allocates what their tables may need, while nothing waits."""

    def event(self) -> object: ...

    def new_stream(self) -> int:
        """A new stream of the highest priority, which lives as long as the runtime."""

    def upload(self, dst_ptr: int, src: NDArray[np.uint8], stream: int) -> None:
        """Enqueues a copy of `src`, which is pinned, to the device."""

    def owns(self, stream: int) -> bool:
        """Whether it comes from `new_stream`."""

    def record(self, event: object, stream: int) -> None: ...

    def wait(self, event: object, stream: int) -> None:
        """Later work of the stream waits for the event's last record; the host does not wait."""

    def done(self, event: object) -> bool:
        """Whether all work before the event's last record has run. Never waits."""

    def stream(self, stream: object) -> int:
        """A caller's stream (cupy, torch, an integer, or None for the current one) as the runtime's handle."""

    def capturing(self, stream: int) -> bool:
        """Whether the stream records a graph: then no upload may use memory that is reused later."""


class Slot:
    """One piece of the ring. One call has it from `put` to `give`, then its kernel has it until the event is done."""

    def __init__(self, runtime: Runtime, nbytes: int) -> None:
        self.nbytes = nbytes
        self.host = runtime.pinned(nbytes)
        self.host_ptr: int = self.host.ctypes.data
        self.ptr = runtime.allocate(nbytes)
        self.event = runtime.event()


class IndexRing:
    """Slots of one device, safe to use from several threads. Never waits: where no slot is free it grows by one.

    What it holds is bounded by the most calls that were under way at once.
    """

    def __init__(self, runtime: Runtime, n_slots: int = 16, slot_nbytes: int = SLOT_NBYTES) -> None:
        self._runtime = runtime
        self._slot_nbytes = slot_nbytes
        self._slots = deque(Slot(runtime, slot_nbytes) for _ in range(n_slots))
        self._lock = threading.Lock()

    def put(self, lists: Sequence[tuple[int, int]], stream: int) -> tuple[Slot, list[int]]:
        """Uploads host lists, given by address and bytes, in the stream. Returns their device addresses, which are
        valid for kernels put in the stream before `give`.

        Raises `UsageError` while the stream is captured: a graph would read the slot's later contents.
        """
        if self._runtime.capturing(stream):
            raise UsageError(
                "items in host memory cannot be captured in a graph",
                remedy="give lists that lie on the device, and write the items there before each replay",
            )
        starts, needed = [], 0
        for _, nbytes in lists:
            starts.append(needed)
            needed += -(-nbytes // ALIGNMENT) * ALIGNMENT
        slot = self._take(needed)
        try:
            for start, (ptr, nbytes) in zip(starts, lists, strict=True):
                ctypes.memmove(slot.host_ptr + start, ptr, nbytes)
            self._runtime.upload(slot.ptr, slot.host[:needed], stream)
        except BaseException:
            self.give(slot, stream)
            raise
        return slot, [slot.ptr + start for start in starts]

    def give(self, slot: Slot, stream: int) -> None:
        """Behind the last kernel that reads what `put` uploaded, in the same stream."""
        self._runtime.record(slot.event, stream)
        with self._lock:
            self._slots.append(slot)

    def _take(self, nbytes: int) -> Slot:
        """The longest-used slot that is free and large enough, or another one."""
        with self._lock:
            for slot in self._slots:
                if slot.nbytes >= nbytes and self._runtime.done(slot.event):
                    self._slots.remove(slot)
                    return slot
        return Slot(self._runtime, max(self._slot_nbytes, 1 << (nbytes - 1).bit_length()))

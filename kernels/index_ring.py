"""Lists of items on their way from the host to a device, in the caller's stream and without waiting.

A ring of slots, each a piece of pinned host memory beside as much device memory and an event. A list is copied to the
next slot whose last kernel has run, its upload is put in the caller's stream, and the event is recorded behind the
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
    """The few calls of a device's runtime that this package needs; streams and events are integers or its own objects.
    All may be made in any thread, and while another one records a graph.
    """

    def current(self) -> AbstractContextManager[None]:
        """Inside, the device is the calling thread's with its context, and no call of this thread breaks another
        thread's recording of a graph; then both are as before. For whatever may call the device: a node's turn, its
        transport, an engine's events.
        """

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory."""

    flushes: bool
    """Whether kernels see what a NIC wrote to the device's memory only after `flush`."""

    def flush(self) -> None: ...

    def page_lock(self, ptr: int, nbytes: int) -> bool:
        """Lets kernels read and write host memory, where it is, until `page_unlock(ptr)`; false where they may already.

        Raises `UsageError` where they could not.
        """

    def page_unlock(self, ptr: int) -> None: ...

    def allocate(self, nbytes: int) -> int:
        """Device memory, held as long as the runtime; its address. NICs write it, and other processes may open it."""

    def reserve(self) -> None:
        """Plans are to come, and nobody waits yet: allocates what their tables may need."""

    def event(self) -> object: ...

    def new_stream(self) -> int:
        """A stream of its own, of the highest priority, as long as the runtime."""

    def upload(self, dst_ptr: int, src: NDArray[np.uint8], stream: int) -> None:
        """Copies `src`, pinned, to the device, in the stream."""

    def owns(self, stream: int) -> bool:
        """Whether it is of `new_stream`."""

    def record(self, event: object, stream: int) -> None: ...

    def wait(self, event: object, stream: int) -> None:
        """What comes in the stream comes after all before the event's last record; the host waits for nothing."""

    def done(self, event: object) -> bool:
        """Whether everything before the event's last record has run; never waits."""

    def stream(self, stream: object) -> int:
        """A caller's stream (cupy, torch, an integer, or None for the current one) as the runtime's handle."""

    def capturing(self, stream: int) -> bool:
        """Whether the stream records a graph: then nothing may be uploaded whose memory is used again later."""

    def push_range(self, name: str) -> None:
        """Begins an NVTX range of the calling thread, for a profiler; `pop_range` ends the latest."""

    def pop_range(self) -> None: ...


class Slot:
    """One piece of the ring: belongs to one call from `put` to `give`, and to its kernel until the event is done."""

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
        """Uploads host lists, by address and bytes, in the stream; their device addresses.

        The addresses are good for kernels put in the stream before `give`.

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

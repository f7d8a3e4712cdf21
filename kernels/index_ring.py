"""Lists of items on their way from the host to a device, in the caller's stream and without waiting.

Layer 3. Must not know plans or tables.

A ring of slots, each a piece of pinned host memory beside as much device memory and an event. A list is copied to the
next slot whose last kernel has run, its upload is put in the caller's stream, and the event is recorded behind the
kernel that reads it.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ..tables import memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


class Runtime(Protocol):
    """The few calls of a device's runtime that the ring needs; streams and events are integers or its own objects."""

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory."""

    def allocate(self, nbytes: int) -> int:
        """Device memory, held as long as the runtime; its address."""

    def event(self) -> object: ...

    def upload(self, dst_ptr: int, src: NDArray[np.uint8], stream: int) -> None:
        """Copies `src`, pinned, to the device, in the stream."""

    def record(self, event: object, stream: int) -> None: ...

    def done(self, event: object) -> bool:
        """Whether everything before the event's last record has run; never waits."""

    def stream(self, stream: object) -> int:
        """A caller's stream (cupy, torch, an integer, or None for the current one) as the runtime's handle."""

    def capturing(self, stream: int) -> bool:
        """Whether the stream records a graph: then nothing may be uploaded whose memory is used again later."""


class _Slot(NamedTuple):
    host: NDArray[np.uint8]
    device: int
    event: object


class IndexRing:
    """Slots of one size class grow with what calls bring, and are taken again when their last kernel has run."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._slots: list[_Slot] = []

    @contextmanager
    def lend(self, lists: Sequence[tuple[int, int]], stream: int) -> Iterator[list[int]]:
        """Uploads `(address, nbytes)` lists in `stream`; their device addresses hold for kernels launched inside."""
        starts = np.cumsum([0, *(-(-nbytes // 16) * 16 for _, nbytes in lists)]).tolist()
        with self._lock:
            slot = self._take(starts[-1], stream)
        for start, (ptr, nbytes) in zip(starts, lists, strict=False):
            slot.host[start : start + nbytes] = memory(ptr, nbytes)
        self._runtime.upload(slot.device, slot.host[: starts[-1]], stream)
        try:
            yield [slot.device + start for start in starts[:-1]]
        finally:
            self._runtime.record(slot.event, stream)
            if not self._runtime.capturing(stream):
                with self._lock:
                    self._slots.append(slot)

    def _take(self, nbytes: int, stream: int) -> _Slot:
        if not self._runtime.capturing(stream):
            for number, slot in enumerate(self._slots):
                if slot.host.size >= nbytes and self._runtime.done(slot.event):
                    return self._slots.pop(number)
        size = max(1 << 16, 1 << (nbytes - 1).bit_length())
        return _Slot(self._runtime.pinned(size), self._runtime.allocate(size), self._runtime.event())

"""Lists of items on their way from the host to a device, in the caller's stream and without waiting.

Layer 3. Must not know plans or tables.

A ring of slots, each a piece of pinned host memory beside as much device memory and an event. A list is copied to the
next slot whose last kernel has run, its upload is put in the caller's stream, and the event is recorded behind the
kernel that reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Runtime(Protocol):
    """The few calls of a device's runtime that the ring needs; streams and events are integers or its own objects."""

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory."""

    def allocate(self, nbytes: int) -> int:
        """Device memory, held as long as the runtime; its address."""

    def event(self) -> object: ...

    def new_stream(self) -> int:
        """A stream of its own, of the highest priority."""

    def upload(self, dst_ptr: int, src: NDArray[np.uint8], stream: int) -> None:
        """Copies `src`, pinned, to the device, in the stream."""

    def record(self, event: object, stream: int) -> None: ...

    def done(self, event: object) -> bool:
        """Whether everything before the event's last record has run; never waits."""

    def stream(self, stream: object) -> int:
        """A caller's stream (cupy, torch, an integer, or None for the current one) as the runtime's handle."""

    def capturing(self, stream: int) -> bool:
        """Whether the stream records a graph: then nothing may be uploaded whose memory is used again later."""

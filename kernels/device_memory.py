"""The driver's part of a runtime: a device's memory, and host memory that its kernels can reach."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from .. import environment
from ..errors import UsageError
from . import virtual_memory

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from .driver import Library


class DeviceMemory(ABC):
    """Memory of one device."""

    _library: Library

    @abstractmethod
    def current(self) -> AbstractContextManager[None]:
        """See `index_ring.Runtime.current`."""

    def allocate(self, nbytes: int) -> int:
        # Not from CuPy's or torch's pool: its memory may still be used for earlier work of the stream that was current
        # then, and other processes may not be able to open it.
        with self.current():
            if environment.DEVICE_MEMORY.read() == "cuMemCreate":
                return virtual_memory.allocate(self._library, nbytes)
            return self._library.allocate(nbytes)

    def page_lock(self, ptr: int, nbytes: int) -> bool:
        """See `index_ring.Runtime.page_lock`."""
        last = ptr + nbytes - 1
        with self.current():
            if locks := not self._library.seen_at(ptr):
                self._library.page_lock(ptr, nbytes)
            if (self._library.seen_at(ptr), self._library.seen_at(last)) == (ptr, last):
                return locks
            if locks:
                self._library.page_unlock(ptr)
        raise UsageError(
            f"{nbytes} bytes at {ptr:#x} are not all page-locked", remedy="page-lock all of it, or nothing"
        )

    def page_unlock(self, ptr: int) -> None:
        with self.current():
            self._library.page_unlock(ptr)

    def flush(self) -> None:
        with self.current():
            self._library.flush()

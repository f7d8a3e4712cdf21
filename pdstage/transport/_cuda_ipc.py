"""CUDA IPC: maps a GPU allocation of one process into another, and copies in a stream of this process.

This is the only module here that calls CUDA, by `pdstage.kernels.driver`.

The rules come from cudaIpcGetMemHandle, cudaIpcOpenMemHandle and cudaIpcCloseMemHandle in the CUDA runtime's reference,
and from the driver's header (cuda.h 13):

* A handle covers a whole allocation and is taken at its base.
* Only other processes can open it, and each asks the driver for it once: older drivers refuse a second time, newer ones
  count.
* The memory may lie on a device that the opening process cannot see.
* The opener closes it before its owner frees the memory.
* Memory of cuMemCreate and of cudaMallocAsync has no such handle (CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE).
  `_segments` handles the first kind.

UCX (src/uct/cuda/cuda_ipc) finds base and capability the same way.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from pdstage.errors import TransportError, UsageError
from pdstage.kernels import driver, virtual_memory
from pdstage.transport import _segments
from pdstage.transport._segments import Export

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.kernels.driver import Cuda as Library
    from pdstage.kernels.virtual_memory import Calls
    from pdstage.plan.spans import Spans

log = logging.getLogger(__name__)

_REMEDY = (
    "leave staging memory to the node, or give memory of cudaMalloc (torch without cudaMallocAsync), or let auto take "
    "another transport"
)


class Cuda:
    """CUDA as this transport uses it. Devices are this process's numbers; streams, events and addresses integers."""

    def __init__(self, library: Library, calls: Calls) -> None:
        self.driver = library
        self._calls = calls
        self._lock = threading.RLock()  # the garbage collector may release a mapping while another is being opened
        self._open: dict[tuple[int, bytes], _Opened] = {}
        self.has_batches = library.has_batches
        """One call can enqueue many copies: the driver supports it and has not refused it yet."""
        self._contexts: dict[int, int] = {}

    def on(self, device: int) -> driver.Current:
        """Makes the device current. Only this makes its context, which takes hundreds of MiB."""
        context = self._contexts.get(device)
        if context is None:
            context = self._contexts[device] = self.driver.primary(device)
        return driver.Current(self.driver, context)

    def export(self, base: int, nbytes: int) -> Export:
        """Exports memory of this process so that another can open it. The caller closes it.

        Raises `UsageError` with the reason if the memory cannot be exported.
        """
        attribute = self.driver.attribute
        start, whole, why = attribute(driver.RANGE_START, base), attribute(driver.RANGE_NBYTES, base), ""
        capable = bool(attribute(driver.IPC_CAPABLE, base))
        if under_mps():
            why = "belongs to a process under MPS, where writes of a killed process may land after its end"
        elif attribute(driver.IS_MANAGED, base):
            why = "is managed memory (cudaMallocManaged)"
        elif attribute(driver.MEMPOOL, base):
            why = "belongs to a stream's pool (cudaMallocAsync)"
        elif capable and not start <= base < base + nbytes <= start + whole:
            why = f"lies in more than one allocation (this one is {start:#x}..{start + whole:#x})"
        if why:
            raise UsageError(f"device memory at {base:#x} {why}", remedy=_REMEDY, base=base)
        device = attribute(driver.ORDINAL, base)
        uuid = self.driver.uuid(device)
        with self.on(device):
            if not capable:
                return _segments.export(self.driver, self._calls, uuid, base, nbytes)
            try:
                handle = self.driver.ipc_handle(start)
            except driver.DriverError as error:
                what = f"device memory at {base:#x} cannot be exported: {error}"
                raise UsageError(what, remedy=_REMEDY) from error
        return Export(handle, uuid, start, [whole])

    def ordinal(self, uuid: bytes) -> int | None:
        """This process's number of a GPU; None if it is not visible, as with CUDA_VISIBLE_DEVICES of one GPU."""
        every = range(self.driver.n_devices())
        return next((device for device in every if self.driver.uuid(device) == uuid), None)

    def can_access(self, device: int, peer: int) -> bool:
        return device == peer or self.driver.can_access(device, peer)

    def allow(self, device: int, peer: int, base: int, nbytes: int) -> None:
        """Lets kernels on `device` write memory of this process on `peer`."""
        with self.on(device):
            self.driver.enable_peer(peer)
            if not self.driver.attribute(driver.IPC_CAPABLE, base):  # virtual mappings are given access range by range
                for start, whole in _segments.ranges(self.driver, base, nbytes):
                    self._calls.allow(start, whole, device)

    def open(self, export: Export, device: int, fetch: Callable[[int], int]) -> Mapping:
        """Maps another process's memory for kernels and copies of `device`. Memory that is open already is shared.
        `fetch` turns a descriptor number of that process into a descriptor of this one.

        Raises `TransportError` if the driver refuses.
        """
        key = device, export.name
        with self._lock:
            opened = self._open.get(key)
            if opened is None:
                try:
                    with self.on(device):
                        opened = self._map_segments(export, device, fetch) if export.handles else self._map(export)
                except driver.DriverError as error:
                    remedy = "see cuda.h; fabric handles need one IMEX channel for both processes"
                    raise TransportError(f"the driver does not map it: {error.what}", remedy=remedy) from error
                self._open[key] = opened
            opened.n_users += 1
        return Mapping(opened.address, partial(self._give_back, device, key))

    def _map_segments(self, export: Export, device: int, fetch: Callable[[int], int]) -> _Opened:
        address = _segments.map_here(self._calls, export, device, fetch)
        return _Opened(address, lambda: virtual_memory.unmap_all(self._calls, address, export.sizes))

    def _map(self, export: Export) -> _Opened:
        address, (nbytes,) = self.driver.ipc_open(export.name), export.sizes
        whole = self.driver.attribute(driver.RANGE_NBYTES, address)  # 0 if the driver does not report it
        if (address - export.base) % 256 or 0 < whole < nbytes:
            self.driver.ipc_close(address)
            what = f"{whole} bytes at {address:#x} for a block of {nbytes} at {export.base:#x}"
            raise TransportError(f"the driver maps {what}", remedy="the peer described another allocation")
        return _Opened(address, lambda: self.driver.ipc_close(address))

    def _give_back(self, device: int, key: tuple[int, bytes]) -> None:
        with self._lock:
            opened = self._open[key]
            opened.n_users -= 1
            if not opened.n_users:
                del self._open[key]
                try:
                    with self.on(device):
                        opened.close()
                except driver.DriverError as error:  # the device failed: the process's end closes it
                    log.warning("mapped device memory is not closed: %s", error)

    def copy_batch(self, spans: Spans, stream: int) -> bool:
        """Enqueues many copies by one call. False if the driver refuses; some copies may have begun then."""
        status = self.driver.copy_batch(spans, stream)
        self.has_batches = status == 0
        if status:
            log.info("the driver refuses batches of copies (CUresult %d): copies are enqueued one by one", status)
        return self.has_batches


class _Opened:
    """Memory that is open in this process. The driver is asked once, however many users there are."""

    def __init__(self, address: int, close: Callable[[], None]) -> None:
        self.address, self.close = address, close
        self.n_users = 0


class Mapping:
    """Another process's memory in this one. It is released with the last reference to this object."""

    def __init__(self, address: int, give_back: Callable[[], None]) -> None:
        self.address = address
        weakref.finalize(self, give_back).atexit = False  # at exit the driver may be gone already


@cache
def is_here() -> bool:
    """Whether device memory can be used: the driver's library is installed. Initialises nothing, since a process that
    has touched CUDA cannot fork workers that use it.
    """
    try:
        driver.cuda()
    except OSError:
        return False
    return True


@cache
def here() -> Cuda:
    """The process's CUDA. Raises `UsageError` if CUDA cannot be used."""
    try:
        library = driver.cuda()
        library.n_devices()
    except (OSError, driver.DriverError) as error:
        raise UsageError(f"CUDA cannot be used here: {error}", remedy="install NVIDIA's driver") from error
    return Cuda(library, virtual_memory.VirtualMemory(library))


def under_mps() -> bool:
    """Whether this process's work runs in the server of CUDA's Multi-Process Service, which may outlive the process."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(pipes, "control").exists()

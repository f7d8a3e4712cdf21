"""CUDA IPC: maps a GPU allocation of one process into another, and copies in a stream of this process.

This is the only module here that calls CUDA: through CuPy's runtime, and through the driver (`pdstage.kernels.driver`)
for calls that CuPy lacks.

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

import importlib.util
import logging
import os
import threading
import weakref
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pdstage.errors import TransportError, UsageError
from pdstage.kernels import driver, virtual_memory
from pdstage.kernels.cupy_runtime import Current
from pdstage.transport import _segments
from pdstage.transport._segments import Segments

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.kernels.driver import Cuda as Library
    from pdstage.kernels.virtual_memory import Calls
    from pdstage.plan.spans import Spans

log = logging.getLogger(__name__)

_NOT_READY = 600  # cudaErrorNotReady
_REMEDY = (
    "leave staging memory to the node, or give memory of cudaMalloc (torch without cudaMallocAsync), or let auto take "
    "another transport"
)


class Block(NamedTuple):
    """An allocation that another process may open: a handle of 64 bytes, the GPU's UUID, its base and size here."""

    handle: bytes
    uuid: bytes
    base: int
    nbytes: int


class Cuda:
    """CUDA as this transport uses it. Devices are this process's numbers; streams, events and addresses integers."""

    def __init__(self, runtime: Any, library: Library, calls: Calls) -> None:  # noqa: ANN401  (a module without types)
        self._runtime = runtime
        self._driver = library
        self._calls = calls
        self._lock = threading.RLock()  # the garbage collector may release a mapping while another is being opened
        self._open: dict[tuple[int, bytes], _Opened] = {}
        self._batches = library.has_batches
        self.error: type[Exception] = runtime.CUDARuntimeError

    def on(self, device: int) -> Current:
        return Current(self._runtime, device, self._driver)

    def export(self, base: int, nbytes: int) -> Block | Segments:
        """Exports memory of this process so that another can open it. The caller closes the descriptors of `Segments`.

        Raises `UsageError` with the reason if the memory cannot be exported.
        """
        attribute = self._driver.attribute
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
        uuid = self._driver.uuid(device)
        with self.on(device):
            if not capable:
                return _segments.export(self._driver, self._calls, uuid, base, nbytes)
            try:
                handle = bytes(self._runtime.ipcGetMemHandle(start))
            except self.error as error:
                what = f"device memory at {base:#x} cannot be exported: {error}"
                raise UsageError(what, remedy=_REMEDY) from error
        return Block(handle, uuid, start, whole)

    def ordinal(self, uuid: bytes) -> int | None:
        """This process's number of a GPU; None if it is not visible, as with CUDA_VISIBLE_DEVICES of one GPU."""
        every = range(self._runtime.getDeviceCount())
        return next((device for device in every if self._driver.uuid(device) == uuid), None)

    def can_access(self, device: int, peer: int) -> bool:
        return device == peer or bool(self._runtime.deviceCanAccessPeer(device, peer))

    def allow(self, device: int, peer: int, base: int, nbytes: int) -> None:
        """Lets kernels on `device` write memory of this process on `peer`."""
        with self.on(device):
            try:
                self._runtime.deviceEnablePeerAccess(peer)
            except self.error as error:
                if getattr(error, "status", 0) != 704:  # cudaErrorPeerAccessAlreadyEnabled
                    raise
            if not self._driver.attribute(driver.IPC_CAPABLE, base):  # virtual mappings are given access range by range
                for start, whole in _segments.ranges(self._driver, base, nbytes):
                    self._calls.allow(start, whole, device)

    def open(self, exported: Block | Segments, device: int, fetch: Callable[[int], int]) -> Mapping:
        """Maps another process's memory for kernels and copies of `device`. Memory that is open already is shared.
        `fetch` turns a descriptor number of that process into a descriptor of this one.

        Raises `TransportError` if the driver refuses.
        """
        key = device, exported.name if isinstance(exported, Segments) else exported.handle
        with self._lock:
            opened = self._open.get(key)
            if opened is None:
                opened = self._open[key] = (
                    self._map_segments(exported, device, fetch)
                    if isinstance(exported, Segments)
                    else self._map(exported, device)
                )
            opened.n_users += 1
        return Mapping(opened.address, partial(self._give_back, device, key))

    def _map_segments(self, segments: Segments, device: int, fetch: Callable[[int], int]) -> _Opened:
        try:
            with self.on(device):
                address = _segments.map_here(self._calls, segments, device, fetch)
        except driver.DriverError as error:
            remedy = "see the driver's documentation; fabric handles need one IMEX channel for both processes"
            raise TransportError(f"the driver does not map it: {error.what}", remedy=remedy) from error
        return _Opened(address, lambda: virtual_memory.unmap_all(self._calls, address, segments.sizes))

    def _map(self, block: Block, device: int) -> _Opened:
        try:
            with self.on(device):
                flags = self._runtime.cudaIpcMemLazyEnablePeerAccess
                address = int(self._runtime.ipcOpenMemHandle(block.handle, flags))
        except self.error as error:
            raise TransportError(f"the driver does not map it: {error}", remedy="see the driver's message") from error
        opened = _Opened(address, lambda: self._runtime.ipcCloseMemHandle(address))
        whole = self._driver.attribute(driver.RANGE_NBYTES, address)  # 0 if the driver does not report it
        if (address - block.base) % 256 or 0 < whole < block.nbytes:
            self._unmap(device, opened)
            what = f"{whole} bytes at {address:#x} for a block of {block.nbytes} at {block.base:#x}"
            raise TransportError(f"the driver maps {what}", remedy="the peer described another allocation")
        return opened

    def _give_back(self, device: int, key: tuple[int, bytes]) -> None:
        with self._lock:
            opened = self._open[key]
            opened.n_users -= 1
            if not opened.n_users:
                del self._open[key]
                self._unmap(device, opened)

    def _unmap(self, device: int, opened: _Opened) -> None:
        try:
            with self.on(device):
                opened.close()
        except (self.error, driver.DriverError) as error:  # the device failed: the process's end closes it
            log.warning("mapped device memory is not closed: %s", error)

    def new_stream(self, device: int) -> int:
        with self.on(device):
            return int(self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking))

    def new_event(self, device: int) -> int:
        with self.on(device):
            return int(self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming))

    def free(self, stream: int, events: list[int]) -> None:
        """Releases a stream and events whose work is done."""
        for event in events:
            self._runtime.eventDestroy(event)
        self._runtime.streamDestroy(stream)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Enqueues a copy. The driver finds the memory kind from the address (unified addressing)."""
        self._runtime.memcpyAsync(dst, src, nbytes, self._runtime.memcpyDefault, stream)

    @property
    def has_batches(self) -> bool:
        """Whether one call can enqueue many copies: the driver supports it and has not refused it yet."""
        return self._batches

    def copy_batch(self, spans: Spans, stream: int) -> bool:
        """Enqueues many copies by one call. False if the driver refuses; some copies may have begun then."""
        status = self._driver.copy_batch(spans, stream)
        self._batches = status == 0
        if status:
            log.info("the driver refuses batches of copies (CUresult %d): copies are enqueued one by one", status)
        return self._batches

    def record(self, event: int, stream: int) -> None:
        self._runtime.eventRecord(event, stream)

    def done(self, event: int) -> bool:
        """Whether everything enqueued before the event's record has run. Never waits."""
        status = self._runtime.eventQuery(event)
        if status == _NOT_READY:
            return False
        self._runtime.check_status(status)
        return True


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
    """Whether device memory can be used: CuPy and the driver's library are installed. Initialises nothing, since a
    process that has touched CUDA cannot fork workers that use it.
    """
    if importlib.util.find_spec("cupy") is None:
        return False
    try:
        driver.cuda()
    except OSError:
        return False
    return True


@cache
def here() -> Cuda:
    """The process's CUDA. Raises `UsageError` if CUDA cannot be used."""
    try:
        from cupy.cuda import runtime  # noqa: PLC0415  (half a second, and only for memory on a device)

        library = driver.cuda()
        cuda = Cuda(runtime, library, virtual_memory.VirtualMemory(library))
        runtime.getDeviceCount()
    except (ImportError, OSError, RuntimeError) as error:  # CuPy's own errors are RuntimeErrors
        raise UsageError(f"CUDA cannot be used here: {error}", remedy="install pdstage[cuda13] and a driver") from error
    return cuda


def under_mps() -> bool:
    """Whether this process's work runs in the server of CUDA's Multi-Process Service, which may outlive the process."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(pipes, "control").exists()

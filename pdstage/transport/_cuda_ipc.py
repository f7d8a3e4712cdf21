"""CUDA IPC: an allocation on a GPU of one process mapped into another, and copies in a stream of this one's.

The one module here that calls CUDA: through CuPy's runtime, and for what CuPy has no words for through the driver
(`pdstage.kernels.driver`).

The rules are those of cudaIpcGetMemHandle, cudaIpcOpenMemHandle and cudaIpcCloseMemHandle in the CUDA runtime's
reference, and of the driver's header (cuda.h 13): a handle is of a whole allocation and is taken of its base; it opens
in other processes only, where the driver may be asked for the same handle once (older ones refuse it the second time,
later ones count); a device that the opening process cannot see may hold the memory; what was opened is closed before
its owner frees it. Memory of cuMemCreate and of cudaMallocAsync has no such handle
(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE). UCX (src/uct/cuda/cuda_ipc) finds base and capability the same way.
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
from pdstage.kernels import driver
from pdstage.kernels.cupy_runtime import Current

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.kernels.driver import Cuda as Library
    from pdstage.spans import Spans

log = logging.getLogger(__name__)

_NOT_READY = 600  # cudaErrorNotReady
_REMEDY = (
    "leave staging memory to the node, or give memory of cudaMalloc (torch without expandable_segments and without "
    "cudaMallocAsync), or let auto take another transport"
)


class Block(NamedTuple):
    """An allocation as another process may open it: 64 bytes of handle, the GPU's UUID, its base and size here."""

    handle: bytes
    uuid: bytes
    base: int
    nbytes: int


class Cuda:
    """CUDA as this transport uses it. Devices are this process's numbers; streams, events and addresses integers."""

    def __init__(self, runtime: Any, library: Library) -> None:  # noqa: ANN401  (a module without types)
        self._runtime = runtime
        self._driver = library
        self._lock = threading.RLock()  # a mapping may be given up by the collector, while another is being opened
        self._open: dict[tuple[int, bytes], _Opened] = {}
        self._batches = library.has_batches
        self.error: type[Exception] = runtime.CUDARuntimeError

    def on(self, device: int) -> Current:
        return Current(self._runtime, device, self._driver)

    def export(self, base: int, nbytes: int) -> Block:
        """What opens memory of this process in another. Raises `UsageError`, saying why, where nothing does."""
        attribute = self._driver.attribute
        why = self._why_not(base) if not attribute(driver.IPC_CAPABLE, base) else ""
        start, whole = attribute(driver.RANGE_START, base), attribute(driver.RANGE_NBYTES, base)
        if not why and not start <= base < base + nbytes <= start + whole:
            why = f"lies in more than one allocation (this one is {start:#x}..{start + whole:#x})"
        if not why and under_mps():
            why = "is of a process under MPS, where what a killed process wrote may land after its end"
        if why:
            raise UsageError(f"device memory at {base:#x} {why}", remedy=_REMEDY, base=base)
        device = attribute(driver.ORDINAL, base)
        try:
            with self.on(device):
                handle = bytes(self._runtime.ipcGetMemHandle(start))
        except self.error as error:
            raise UsageError(f"device memory at {base:#x} cannot be exported: {error}", remedy=_REMEDY) from error
        return Block(handle, self._driver.uuid(device), start, whole)

    def _why_not(self, base: int) -> str:
        if self._driver.attribute(driver.IS_MANAGED, base):
            return "is managed memory (cudaMallocManaged)"
        if self._driver.attribute(driver.MEMPOOL, base):
            return "is of a stream's pool (cudaMallocAsync)"
        return "is mapped virtual memory (cuMemCreate, as torch's expandable_segments), or no device memory"

    def ordinal(self, uuid: bytes) -> int | None:
        """This process's number of a GPU; None if it does not see it, as with CUDA_VISIBLE_DEVICES of one."""
        every = range(self._runtime.getDeviceCount())
        return next((device for device in every if self._driver.uuid(device) == uuid), None)

    def can_access(self, device: int, peer: int) -> bool:
        return device == peer or bool(self._runtime.deviceCanAccessPeer(device, peer))

    def allow(self, device: int, peer: int) -> None:
        """Lets kernels on `device` write memory that this same process has on `peer`."""
        with self.on(device):
            try:
                self._runtime.deviceEnablePeerAccess(peer)
            except self.error as error:
                if getattr(error, "status", 0) != 704:  # cudaErrorPeerAccessAlreadyEnabled
                    raise

    def open(self, block: Block, device: int) -> Mapping:
        """Maps another process's block for kernels and copies of `device`; one that is open already is shared.

        Raises `TransportError` where the driver refuses.
        """
        with self._lock:
            opened = self._open.get((device, block.handle))
            if opened is None:
                opened = self._open[device, block.handle] = _Opened(self._map(block, device))
            opened.n_users += 1
        return Mapping(opened.address, partial(self._give_back, device, block.handle))

    def _map(self, block: Block, device: int) -> int:
        try:
            with self.on(device):
                flags = self._runtime.cudaIpcMemLazyEnablePeerAccess
                address = int(self._runtime.ipcOpenMemHandle(block.handle, flags))
        except self.error as error:
            raise TransportError(f"the driver does not map it: {error}", remedy="see the driver's words") from error
        whole = self._driver.attribute(driver.RANGE_NBYTES, address)  # 0 where the driver does not say
        if (address - block.base) % 256 or 0 < whole < block.nbytes:
            self._unmap(device, address)
            what = f"{whole} bytes at {address:#x} for a block of {block.nbytes} at {block.base:#x}"
            raise TransportError(f"the driver maps {what}", remedy="the peer describes another allocation")
        return address

    def _give_back(self, device: int, handle: bytes) -> None:
        with self._lock:
            opened = self._open[device, handle]
            opened.n_users -= 1
            if not opened.n_users:
                del self._open[device, handle]
                self._unmap(device, opened.address)

    def _unmap(self, device: int, address: int) -> None:
        try:
            with self.on(device):
                self._runtime.ipcCloseMemHandle(address)
        except self.error as error:  # of a device that failed: the process's end closes it
            log.warning("mapped device memory is not closed: %s", error)

    def new_stream(self, device: int) -> int:
        with self.on(device):
            return int(self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking))

    def new_event(self, device: int) -> int:
        with self.on(device):
            return int(self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming))

    def free(self, stream: int, events: list[int]) -> None:
        """Gives up a stream and events whose work is done."""
        for event in events:
            self._runtime.eventDestroy(event)
        self._runtime.streamDestroy(stream)

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Puts a copy in the stream; where the memory lies the driver knows by itself (unified addressing)."""
        self._runtime.memcpyAsync(dst, src, nbytes, self._runtime.memcpyDefault, stream)

    @property
    def has_batches(self) -> bool:
        """Whether many copies may be put in a stream by one call: the driver has it, and did not refuse it yet."""
        return self._batches

    def copy_batch(self, spans: Spans, stream: int) -> bool:
        """Puts many copies in the stream by one call; False where the driver refuses. Then some may have begun."""
        status = self._driver.copy_batch(spans, stream)
        self._batches = status == 0
        if status:
            log.info("the driver refuses batches of copies (CUresult %d): they go one by one", status)
        return self._batches

    def record(self, event: int, stream: int) -> None:
        self._runtime.eventRecord(event, stream)

    def done(self, event: int) -> bool:
        """Whether all that was in the stream before the event's record has run; never waits."""
        status = self._runtime.eventQuery(event)
        if status == _NOT_READY:
            return False
        self._runtime.check_status(status)
        return True


class _Opened:
    """A block that is open in this process: the driver is asked for one once, whoever uses it."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.n_users = 0


class Mapping:
    """Another process's block in this one; given back with the value's last reference."""

    def __init__(self, address: int, give_back: Callable[[], None]) -> None:
        self.address = address
        weakref.finalize(self, give_back).atexit = False  # at exit the driver itself may be gone


@cache
def is_here() -> bool:
    """Whether device memory may come: CuPy and the driver's library are there. Initialises nothing: a process that has
    touched CUDA cannot fork workers that use it.
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
    """The process's CUDA. Raises `UsageError` where none can be used."""
    try:
        from cupy.cuda import runtime  # noqa: PLC0415  (half a second, and only for memory on a device)

        cuda = Cuda(runtime, driver.cuda())
        runtime.getDeviceCount()
    except (ImportError, OSError, RuntimeError) as error:  # CuPy's own errors are RuntimeErrors
        raise UsageError(f"CUDA cannot be used here: {error}", remedy="install pdstage[cuda13] and a driver") from error
    return cuda


def under_mps() -> bool:
    """Whether work of this process runs in the server of CUDA's Multi-Process Service, which may outlive it."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(pipes, "control").exists()

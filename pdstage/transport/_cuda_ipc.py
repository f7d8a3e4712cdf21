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

UCX (src/uct/cuda/cuda_ipc) finds base and capability the same way.

Memory of cuMemCreate, such as torch's expandable segments, is exported otherwise. A region of it lies in several
physical allocations, mapped one behind the other. Its owner exports each of them, and a peer maps them in the same
order in one range of its own addresses. Each travels as a descriptor of its owner, which the peer duplicates by
pidfd_getfd(2); opening it by its name in /proc would open another file. Memory that has no descriptors travels as
fabric handles. The owner keeps its descriptors, and so the memory, open while its transport lives. A number in a
description therefore never names another allocation.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from pdstage import environment
from pdstage.errors import TransportError, UsageError
from pdstage.kernels import driver, virtual_memory
from pdstage.kernels.virtual_memory import DESCRIPTOR, FABRIC, Calls
from pdstage.plan.spans import Spans, split
from pdstage.transport._peer import under_mps

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.kernels.driver import Cuda as Library

log = logging.getLogger(__name__)

MAX_BATCH, STUCK_S = 512, 5.0

_REMEDY = (
    "leave staging memory to the node, or give memory of cudaMalloc (torch without cudaMallocAsync), or let auto take "
    "another transport"
)


_REMEDY_OF_SEGMENTS = (
    "start the engine with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or with a torch whose segments other "
    'processes may open, or choose path="staged", whose memory is the node\'s own'
)
_MAX_NBYTES, _HANDLE_NBYTES = 1 << 48, 64


class Export(NamedTuple):
    """Device memory that another process may map: allocations of `sizes` bytes, one behind the other from `base` on at
    their owner, on the GPU `uuid`. `name` is one export's: the handle of CUDA IPC, or for memory of cuMemCreate, which
    has a descriptor or a fabric handle for each allocation in `handles`, something random.
    """

    name: Annotated[bytes, Meta(min_length=16, max_length=64)]
    uuid: bytes
    base: int
    sizes: list[Annotated[int, Meta(gt=0, lt=_MAX_NBYTES)]]
    handles: list[
        Annotated[int, Meta(ge=0, lt=1 << 31)]
        | Annotated[bytes, Meta(min_length=_HANDLE_NBYTES, max_length=_HANDLE_NBYTES)]
    ] = []  # noqa: RUF012  (nobody appends to it)

    def holds(self, base: int, nbytes: int) -> bool:
        """Whether it is consistent, fits the address space, and has all these bytes of its owner's."""
        whole = sum(self.sizes)
        n = len(self.handles) or len(self.name) // _HANDLE_NBYTES
        return n == len(self.sizes) and whole < _MAX_NBYTES and self.base <= base <= base + nbytes <= self.base + whole

    def close(self) -> None:
        """The owner closes its descriptors. No process can map the memory any more; existing mappings stay."""
        for handle in self.handles:
            if isinstance(handle, int):
                os.close(handle)


class Cuda:
    """CUDA as this transport uses it. Devices are this process's numbers; streams, events and addresses integers."""

    def __init__(self, library: Library, calls: Calls) -> None:
        self.driver = library
        self._calls = calls
        self._lock = threading.RLock()  # the garbage collector may release a mapping while another is being opened
        self._open: dict[tuple[int, bytes], _Opened] = {}
        self.has_batches = library.has_batches and environment.COPY_BATCHES.read() != "no"
        """One call can enqueue many copies: the driver supports it and has not refused it yet."""
        self._batches: dict[int, float] = {}  # when the present call of each thread began
        self._watch: threading.Timer | None = None
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
                return _export_segments(self.driver, self._calls, uuid, base, nbytes)
            try:
                handle = self.driver.ipc_handle(start)
            except driver.DriverError as error:
                raise UsageError(f"device memory at {base:#x} cannot be exported: {error}", remedy=_REMEDY) from error
        return Export(handle, uuid, start, [whole])

    def ordinal(self, uuid: bytes) -> int | None:
        """This process's number of a GPU; None if it is not visible, as with CUDA_VISIBLE_DEVICES of one GPU."""
        every = range(self.driver.n_devices())
        return next((device for device in every if self.driver.uuid(device) == uuid), None)

    def allow(self, device: int, peer: int, base: int, nbytes: int) -> None:
        """Lets kernels on `device` write memory of this process on `peer`."""
        with self.on(device):
            self.driver.enable_peer(peer)
            if not self.driver.attribute(driver.IPC_CAPABLE, base):  # virtual mappings are given access range by range
                for start, whole in _ranges(self.driver, base, nbytes):
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
                    raise TransportError(
                        f"the driver does not map it: {error.what}",
                        remedy="see cuda.h; fabric handles need one IMEX channel for both processes",
                    ) from error
                self._open[key] = opened
            opened.n_users += 1
        return Mapping(opened.address, partial(self._give_back, device, key))

    def _map_segments(self, export: Export, device: int, fetch: Callable[[int], int]) -> _Opened:
        """Maps the allocations one behind the other. Raises what `fetch` raises, or `DriverError`; nothing stays mapped
        then.
        """

        def handle_of(place: int) -> int:
            exported = export.handles[place]
            if isinstance(exported, bytes):
                return self._calls.adopt(exported)
            descriptor = fetch(exported)
            try:
                return self._calls.adopt(descriptor)
            finally:
                os.close(descriptor)

        address = virtual_memory.map_all(self._calls, device, export.sizes, handle_of)
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
        """Enqueues many copies, up to `MAX_BATCH` by a call. False if the driver refuses; some copies may have begun
        then. A call that does not return, as with the driver 580.159 (vllm#49276), is named in the log.
        """
        this, status = threading.get_ident(), 0
        self._batches[this] = time.monotonic()
        if self._watch is None or not self._watch.is_alive():  # a thread's start takes longer than a batch
            self._watch = threading.Timer(STUCK_S, self._look)
            self._watch.daemon = True
            self._watch.start()
        try:
            for part in split(spans, MAX_BATCH):
                status = status or self.driver.copy_batch(part, stream)
        finally:
            del self._batches[this]
        if status:
            self.has_batches = False
            log.info("the driver refuses batches of copies (CUresult %d): copies are enqueued one by one", status)
        return not status

    def _look(self) -> None:
        """Ends where no call is under way; the next one starts another."""
        while under_way := list(self._batches.values()):
            if time.monotonic() - min(under_way) >= STUCK_S:
                log.error(
                    "cuMemcpyBatchAsync does not return: end this process, and start it with PDSTAGE_COPY_BATCHES=no"
                )
                return
            time.sleep(STUCK_S / 4)


def _ranges(library: Library, base: int, nbytes: int) -> list[tuple[int, int]]:
    """The mappings that hold a region, each as (address, bytes); [] if the driver knows of none."""
    found: list[tuple[int, int]] = []
    at = base
    while at < base + nbytes:
        start, size = library.mapping(at)
        if not (start <= at < start + size and (not found or start == at)):
            return []
        found.append((start, size))
        at = start + size
    return found


def _export_segments(library: Library, calls: Calls, uuid: bytes, base: int, nbytes: int) -> Export:
    """What another process needs to map a region. Raises `UsageError` with the reason if it cannot be exported."""
    found, types = _ranges(library, base, nbytes), DESCRIPTOR | FABRIC
    if not found:
        raise UsageError(f"device memory at {base:#x} is not all mapped", remedy="give memory of a GPU", base=base)
    for start, _ in found:
        types &= library.attribute(driver.HANDLE_TYPES, start)
    if not types:
        why = "is memory of cuMemCreate (torch's expandable_segments?) without handles for other processes"
        raise UsageError(f"device memory at {base:#x} {why}", remedy=_REMEDY_OF_SEGMENTS, base=base)
    made = Export(secrets.token_bytes(16), uuid, found[0][0], [size for _, size in found], [])
    try:
        for start, _ in found:
            handle = calls.retain(start)
            try:
                exported = calls.export(handle, DESCRIPTOR if types & DESCRIPTOR else FABRIC)
            finally:
                calls.release(handle)
            made.handles.append(exported)
            if isinstance(exported, int):
                os.set_inheritable(exported, False)
    except driver.DriverError as error:
        made.close()
        which = f"allocation {len(made.handles) + 1} of {len(found)} of device memory at {base:#x}"
        raise UsageError(
            f"{which} cannot be exported: {error.what}",
            remedy=f"allow a descriptor for each (ulimit -n), or {_REMEDY_OF_SEGMENTS}",
            base=base,
        ) from error
    return made


@dataclass(slots=True, eq=False)
class _Opened:
    """Memory that is open in this process. The driver is asked once, however many users there are."""

    address: int
    close: Callable[[], None]
    n_users: int = 0


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

"""A GPU driver's library by ctypes: all of CUDA's calls that this package makes, and of HIP's those that torch lacks.

Signatures and numbers are those of cuda.h (CUDA 13.1) and hip_runtime_api.h (ROCm 7).

A thread's *stream capture mode* says which of its calls are forbidden while another thread records a CUDA graph. By
default (cudaStreamCaptureModeGlobal, which torch.cuda.graph uses too) every call that allocates, frees, waits or
queries an event is forbidden while any thread records; a forbidden call breaks that recording. In relaxed mode it is
allowed. So all calls of this package are made inside `Relaxed`, as those of torch's allocator and NCCL's watchdog are.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ..errors import PdstageError, TransportError

if TYPE_CHECKING:
    from ..plan.spans import Spans

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, hipStreamCaptureModeRelaxed
# CUpointer_attribute
MEMORY_TYPE, IS_MANAGED, ORDINAL, IPC_CAPABLE, RANGE_START, RANGE_NBYTES, MEMPOOL = 2, 8, 9, 10, 11, 12, 17
HANDLE_TYPES, _MAPPING_NBYTES, _MAPPING_START = 14, 18, 19  # those of memory of cuMemCreate
# CUdevice_attribute
_RDMA_SUPPORTED, _RDMA_FLUSH_OPTIONS, _RDMA_ORDERING = 116, 117, 118
_FLUSH_BY_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_OWNER = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
# CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, _COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR
N_SMS, _MAJOR, _MINOR = 16, 75, 76
_PORTABLE_AND_MAPPED = 3  # CU_MEMHOSTREGISTER_PORTABLE | _DEVICEMAP, and HIP's
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
_NON_BLOCKING, _DISABLE_TIMING = 1, 2  # CU_STREAM_NON_BLOCKING, CU_EVENT_DISABLE_TIMING
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_
_IPC_NBYTES = 64  # CU_IPC_HANDLE_SIZE
_NOT_READY, _ALREADY_ENABLED = 600, 704  # CUDA_ERROR_NOT_READY, _PEER_ACCESS_ALREADY_ENABLED
_ADDRESS, _SIZE, _POINTER, _UINT = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint


class Library(Protocol):
    """The calls needed of either driver."""

    def capture_mode(self, mode: int) -> int:
        """Sets the calling thread's mode, and returns the previous one; -1 if it cannot be set, as on a failed device.
        The next call then raises.
        """

    def context(self) -> int:
        """The calling thread's context, 0 for none."""

    def bind(self, context: int) -> None:
        """Makes it the calling thread's context, 0 for none."""

    def primary(self, device: int) -> int:
        """The device's context, which CUDA's runtime and torch use. Created if missing, and kept for this process."""

    def allocate(self, nbytes: int) -> int:
        """Memory of the current device, as from cudaMalloc: other processes can open it, and NICs can write it."""

    def upload(self, dst_ptr: int, src_ptr: int, nbytes: int, stream: int) -> None:
        """Enqueues a copy of page-locked host memory to the device."""

    def seen_at(self, ptr: int) -> int:
        """The address by which kernels reach a byte of page-locked host memory; 0 for other memory."""

    def page_lock(self, ptr: int, nbytes: int) -> None: ...

    def page_unlock(self, ptr: int) -> None: ...

    def flushes(self, device: int) -> bool:
        """Whether kernels may not see a NIC's writes to the device's memory until `flush`, as on Ampere."""

    def flush(self) -> None:
        """Waits until the current device sees all earlier writes by NICs."""


class Kernel(NamedTuple):
    """A function of CUDA's driver, the threads of its CTA and their dynamic shared memory."""

    function: int
    threads: int
    shared_nbytes: int


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes; its hints of location are for managed and pageable memory."""

    _fields_ = (
        ("source_order", ctypes.c_int), ("source_hint", ctypes.c_int * 2), ("destination_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )  # fmt: skip


# The source is read in stream order, preferably by the copy engines, beside the multiprocessors' work.
_IN_STREAM_ORDER, _PREFER_OVERLAP = 1, 1


class _Thread(threading.local):
    relaxed = False


thread = _Thread()
"""`relaxed`: the calling thread is inside `Relaxed` or a runtime's `current`."""


def relax(library: Library) -> int:
    """Relaxes the calling thread's capture mode. Returns the argument for `restore`. Costs no call if nested."""
    before = -1 if thread.relaxed else library.capture_mode(RELAXED)
    if before >= 0:
        thread.relaxed = True
    return before


def restore(library: Library, before: int) -> None:
    """A Ctrl-C between any two steps of `relax` and `restore` leaves the thread relaxed at worst, which is harmless."""
    if before >= 0:
        thread.relaxed = False
        library.capture_mode(before)


class Relaxed:
    """Inside, the calling thread's capture mode is relaxed; at the end it is restored."""

    __slots__ = ("_before", "_library")

    def __init__(self, library: Library) -> None:
        self._library = library

    def __enter__(self) -> None:
        self._before = relax(self._library)

    def __exit__(self, *error: object) -> None:
        restore(self._library, self._before)


class Current:
    """Makes a context current, and restores the previous one at the end. Inside, the calling thread's calls break no
    recording of a graph by another thread.
    """

    __slots__ = ("_before", "_context", "_library", "_mode_before")

    def __init__(self, library: Library, context: int) -> None:
        self._library, self._context = library, context

    def __enter__(self) -> None:
        self._before = self._library.context()
        if self._before != self._context:
            self._library.bind(self._context)
        self._mode_before = relax(self._library)

    def __exit__(self, *error: object) -> None:
        restore(self._library, self._mode_before)
        if self._before != self._context:
            self._library.bind(self._before)


class _Ipc(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * _IPC_NBYTES),)


class Cuda:
    """libcuda. Raises `OSError` without a driver. Streams, events, modules and functions are integers."""

    def __init__(self, path: str = "libcuda.so.1") -> None:
        # Calls that return at once keep the GIL: releasing it costs a node in a busy process milliseconds.
        self._quick, self._slow = ctypes.PyDLL(path), ctypes.CDLL(path)
        self._launch = self._quick.cuLaunchKernel
        self._launch.argtypes = (_POINTER, *(_UINT,) * 7, _POINTER, _POINTER, _POINTER)
        # cuda.h: the batch call of 12.8 also reports which copy failed; that of 13.0 has another name and does not.
        self._batch = getattr(self._slow, "cuMemcpyBatchAsync_v2", None)
        self._fault: tuple[object, ...] = ()
        if self._batch is None:
            self._batch = getattr(self._slow, "cuMemcpyBatchAsync", None)
            self._fault = (ctypes.byref(ctypes.c_size_t()),)

    def capture_mode(self, mode: int) -> int:
        swapped = ctypes.c_int(mode)
        return -1 if self._quick.cuThreadExchangeStreamCaptureMode(ctypes.byref(swapped)) else swapped.value

    def context(self) -> int:
        found = ctypes.c_void_p()
        check("cuCtxGetCurrent", self._quick.cuCtxGetCurrent(ctypes.byref(found)))
        return found.value or 0

    def bind(self, context: int) -> None:
        check("cuCtxSetCurrent", self._quick.cuCtxSetCurrent(ctypes.c_void_p(context)))

    def primary(self, device: int) -> int:
        found = ctypes.c_void_p()
        check("cuInit", self._slow.cuInit(0))
        check("cuDevicePrimaryCtxRetain", self._slow.cuDevicePrimaryCtxRetain(ctypes.byref(found), device))
        return found.value or 0

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function of cuda.h by its name in the library. Raises `DriverError`."""
        check(name, getattr(self._slow, name)(*arguments))

    def n_devices(self) -> int:
        """Raises `DriverError` if the driver cannot be used."""
        found = ctypes.c_int()
        check("cuInit", self._slow.cuInit(0))
        check("cuDeviceGetCount", self._quick.cuDeviceGetCount(ctypes.byref(found)))
        return found.value

    def version(self) -> int:
        """Of CUDA, such as 12010 for 12.1."""
        found = ctypes.c_int()
        check("cuDriverGetVersion", self._quick.cuDriverGetVersion(ctypes.byref(found)))
        return found.value

    def capability(self, device: int) -> int:
        """The device's compute capability, such as 90."""
        return 10 * self.device_attribute(_MAJOR, device) + self.device_attribute(_MINOR, device)

    def _made(self, name: str, *arguments: object) -> int:
        """Calls a function whose first argument is where it writes a handle or an address."""
        found = _POINTER()
        check(name.partition("_v")[0], getattr(self._slow, name)(ctypes.byref(found), *arguments))
        return found.value or 0

    def allocate(self, nbytes: int) -> int:
        return self._made("cuMemAlloc_v2", _SIZE(nbytes))

    def pinned(self, nbytes: int) -> int:
        """Page-locked host memory."""
        return self._made("cuMemHostAlloc", _SIZE(nbytes), _PORTABLE)

    # Streams and events, of the current device.

    def new_stream(self) -> int:
        """Of the highest priority; it does not wait for the default stream."""
        least, greatest = ctypes.c_int(), ctypes.c_int()
        found = self._slow.cuCtxGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest))
        check("cuCtxGetStreamPriorityRange", found)
        return self._made("cuStreamCreateWithPriority", _NON_BLOCKING, greatest)

    def free_stream(self, stream: int) -> None:
        check("cuStreamDestroy", self._slow.cuStreamDestroy_v2(_POINTER(stream)))

    def capturing(self, stream: int) -> bool:
        found = ctypes.c_int()
        check("cuStreamIsCapturing", self._quick.cuStreamIsCapturing(_POINTER(stream), ctypes.byref(found)))
        return bool(found.value)

    def new_event(self) -> int:
        return self._made("cuEventCreate", _DISABLE_TIMING)

    def free_event(self, event: int) -> None:
        check("cuEventDestroy", self._slow.cuEventDestroy_v2(_POINTER(event)))

    def record(self, event: int, stream: int) -> None:
        check("cuEventRecord", self._quick.cuEventRecord(_POINTER(event), _POINTER(stream)))

    def wait(self, event: int, stream: int) -> None:
        check("cuStreamWaitEvent", self._quick.cuStreamWaitEvent(_POINTER(stream), _POINTER(event), 0))

    def done(self, event: int) -> bool:
        """Whether all work before the event's last record has run. Never waits. Raises `DriverError` on a failed
        device, and for 900: a thread records a graph that forbids this query, which has broken that recording. In
        relaxed mode it is not forbidden.
        """
        status = self._quick.cuEventQuery(_POINTER(event))
        if status == _NOT_READY:
            return False
        check("cuEventQuery", status)
        return True

    # Kernels.

    def module(self, image: bytes) -> int:
        """Machine code or PTX, loaded for the current device."""
        return self._made("cuModuleLoadData", image)

    def function(self, module: int, name: str, shared_nbytes: int) -> int:
        """A kernel of a module, which may have up to `shared_nbytes` of dynamic shared memory."""
        function = self._made("cuModuleGetFunction", _POINTER(module), name.encode())
        if shared_nbytes:
            kind = _MAX_DYNAMIC_SHARED_SIZE_BYTES
            check("cuFuncSetAttribute", self._slow.cuFuncSetAttribute(_POINTER(function), kind, shared_nbytes))
        return function

    def launch(self, kernel: Kernel, grid: int, stream: int, params: int) -> None:
        """`params` is the address of an array with the addresses of the kernel's arguments, which are read at once."""
        function, threads, shared = kernel
        check("cuLaunchKernel", self._launch(function, grid, 1, 1, threads, 1, 1, shared, stream, params, None))

    # Copies, and memory of other processes and devices.

    def copy(self, dst_ptr: int, src_ptr: int, nbytes: int, stream: int) -> None:
        """Enqueues a copy. The driver finds the memory's kind from the address (unified addressing)."""
        what = (_ADDRESS(dst_ptr), _ADDRESS(src_ptr), _SIZE(nbytes), _POINTER(stream))
        check("cuMemcpyAsync", self._quick.cuMemcpyAsync(*what))

    def ipc_handle(self, base: int) -> bytes:
        """By which another process opens an allocation."""
        found = _Ipc()
        check("cuIpcGetMemHandle", self._slow.cuIpcGetMemHandle(ctypes.byref(found), _ADDRESS(base)))
        return bytes(found)

    def ipc_open(self, handle: bytes) -> int:
        """The address at which another process's allocation is mapped for the current device."""
        return self._made("cuIpcOpenMemHandle_v2", _Ipc.from_buffer_copy(handle), _LAZY_PEER_ACCESS)

    def ipc_close(self, address: int) -> None:
        check("cuIpcCloseMemHandle", self._slow.cuIpcCloseMemHandle(_ADDRESS(address)))

    def can_access(self, device: int, peer: int) -> bool:
        """Whether kernels on `device` can access memory of `peer`, another one."""
        found = ctypes.c_int()
        check("cuDeviceCanAccessPeer", self._quick.cuDeviceCanAccessPeer(ctypes.byref(found), device, peer))
        return bool(found.value)

    def enable_peer(self, peer: int) -> None:
        """Lets kernels of the current device access memory of `peer`'s cuMemAlloc."""
        status = self._slow.cuCtxEnablePeerAccess(_POINTER(self.primary(peer)), 0)
        if status != _ALREADY_ENABLED:
            check("cuCtxEnablePeerAccess", status)

    def upload(self, dst_ptr: int, src_ptr: int, nbytes: int, stream: int) -> None:
        what = (_ADDRESS(dst_ptr), ctypes.c_void_p(src_ptr), _SIZE(nbytes), ctypes.c_void_p(stream))
        check("cuMemcpyHtoDAsync", self._quick.cuMemcpyHtoDAsync_v2(*what))

    @property
    def has_batches(self) -> bool:
        return self._batch is not None

    def copy_batch(self, spans: Spans, stream: int) -> int:
        """Enqueues independent copies in a stream of the current device by one call; returns its CUresult."""
        assert self._batch is not None
        columns = [np.ascontiguousarray(column, np.int64) for column in (spans.dst, spans.src, spans.nbytes)]
        attributes, first = _Attributes(_IN_STREAM_ORDER, flags=_PREFER_OVERLAP), _SIZE(0)
        return int(
            self._batch(
                *(ctypes.c_void_p(column.ctypes.data) for column in columns), _SIZE(len(columns[0])),
                ctypes.byref(attributes), ctypes.byref(first), _SIZE(1), *self._fault, ctypes.c_void_p(stream),
            )
        )  # fmt: skip

    def seen_at(self, ptr: int) -> int:
        found = _ADDRESS()
        failed = self._quick.cuMemHostGetDevicePointer_v2(ctypes.byref(found), ctypes.c_void_p(ptr), 0)
        return 0 if failed else found.value

    def page_lock(self, ptr: int, nbytes: int) -> None:
        what = (ctypes.c_void_p(ptr), _SIZE(nbytes), _PORTABLE_AND_MAPPED)
        check("cuMemHostRegister", self._slow.cuMemHostRegister_v2(*what))

    def page_unlock(self, ptr: int) -> None:
        check("cuMemHostUnregister", self._slow.cuMemHostUnregister(ctypes.c_void_p(ptr)))

    def attribute(self, which: int, address: int) -> int:
        """A CUpointer_attribute as an integer; 0 if the driver does not know the address or the attribute."""
        found = ctypes.c_uint64()  # no attribute is longer; shorter ones leave the upper bytes 0
        failed = self._quick.cuPointerGetAttribute(ctypes.byref(found), which, _ADDRESS(address))
        return 0 if failed else found.value

    def mapping(self, address: int) -> tuple[int, int]:
        """The start and bytes of the one mapping of cuMemMap that holds an address; (0, 0) if there is none."""
        start, nbytes = self.attribute(_MAPPING_START, address), self.attribute(_MAPPING_NBYTES, address)
        if nbytes:
            return start, nbytes
        # cuda.h refers to these: RANGE_START and RANGE_NBYTES describe the reservation.
        found, size = _ADDRESS(), _SIZE()
        failed = self._quick.cuMemGetAddressRange_v2(ctypes.byref(found), ctypes.byref(size), _ADDRESS(address))
        return (0, 0) if failed else (found.value, size.value)

    def uuid(self, device: int) -> bytes:
        """The 16 bytes that identify a GPU, or a MIG instance, in all processes."""
        handle, found = ctypes.c_int(), ctypes.create_string_buffer(16)
        call = self._quick
        if call.cuDeviceGet(ctypes.byref(handle), device) or call.cuDeviceGetUuid_v2(found, handle):
            raise TransportError(f"the driver does not name device {device}", remedy="see that nvidia-smi -L does")
        return found.raw

    def pci_address(self, device: int) -> str:
        """Such as 0000:1b:00.0, as this process numbers its devices. Raises `DriverError` for none."""
        found = ctypes.create_string_buffer(32)
        check("cuInit", self._slow.cuInit(0))
        check("cuDeviceGetPCIBusId", self._quick.cuDeviceGetPCIBusId(found, len(found), device))
        return found.value.decode()

    def in_use(self, device: int) -> bool:
        """Whether this process has a context on the device."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        failed = self._quick.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
        return not failed and bool(active.value)

    def flushes(self, device: int) -> bool:
        supported, options, ordering = (
            self.device_attribute(which, device) for which in (_RDMA_SUPPORTED, _RDMA_FLUSH_OPTIONS, _RDMA_ORDERING)
        )
        return bool(supported) and ordering < _OWNER and bool(options & _FLUSH_BY_HOST)

    def device_attribute(self, which: int, device: int) -> int:
        """A CUdevice_attribute; 0 if the driver does not know it."""
        found = ctypes.c_int()
        return 0 if self._quick.cuDeviceGetAttribute(ctypes.byref(found), which, device) else found.value

    def flush(self) -> None:
        check("cuFlushGPUDirectRDMAWrites", self._slow.cuFlushGPUDirectRDMAWrites(0, _OWNER))


class Hip:
    """libamdhip64, by default the copy that torch has loaded. Its devices have no contexts to bind."""

    def __init__(self, path: str = "") -> None:
        """Raises `OSError` without the library."""
        if not path:
            loaded = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
            path = next((name for name in loaded if "libamdhip64.so" in name), "libamdhip64.so")
        self._quick, self._slow = ctypes.PyDLL(path), ctypes.CDLL(path)

    def capture_mode(self, mode: int) -> int:
        swapped = ctypes.c_int(mode)
        return -1 if self._quick.hipThreadExchangeStreamCaptureMode(ctypes.byref(swapped)) else swapped.value

    def context(self) -> int:
        return 0

    def bind(self, context: int) -> None:
        pass

    def primary(self, device: int) -> int:
        return 0

    def allocate(self, nbytes: int) -> int:
        found = ctypes.c_void_p()
        check("hipMalloc", self._slow.hipMalloc(ctypes.byref(found), _SIZE(nbytes)))
        return found.value or 0

    def upload(self, dst_ptr: int, src_ptr: int, nbytes: int, stream: int) -> None:
        what = (ctypes.c_void_p(dst_ptr), ctypes.c_void_p(src_ptr), _SIZE(nbytes), ctypes.c_void_p(stream))
        check("hipMemcpyHtoDAsync", self._quick.hipMemcpyHtoDAsync(*what))

    def seen_at(self, ptr: int) -> int:
        found = ctypes.c_void_p()
        failed = self._quick.hipHostGetDevicePointer(ctypes.byref(found), ctypes.c_void_p(ptr), 0)
        return 0 if failed else found.value or 0

    def page_lock(self, ptr: int, nbytes: int) -> None:
        what = (ctypes.c_void_p(ptr), _SIZE(nbytes), _PORTABLE_AND_MAPPED)
        check("hipHostRegister", self._slow.hipHostRegister(*what))

    def page_unlock(self, ptr: int) -> None:
        check("hipHostUnregister", self._slow.hipHostUnregister(ctypes.c_void_p(ptr)))

    def flushes(self, device: int) -> bool:
        return False

    def flush(self) -> None:
        pass


def check(call: str, status: int) -> None:
    """Raises `DriverError` for a failed call."""
    if status:
        raise DriverError(call, status)


class DriverError(PdstageError, RuntimeError):
    """A call of the driver failed; `status` is its CUresult or hipError_t."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} failed with {status}", remedy="see the driver's documentation", status=status)
        self.status = status


@cache
def cuda() -> Cuda:
    """The process's one instance. Raises `OSError` without a driver."""
    return Cuda()

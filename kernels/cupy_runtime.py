"""One CUDA device through CuPy: memory, streams, events, modules and launches.

Only this module calls CuPy's runtime.

Addresses, streams and kernels are integers, as in the driver: a launch is one call and builds no object. Every call is
made inside `Current`.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ..errors import UsageError
from . import driver, nvrtc
from .arena import Arena
from .cuda_tables import LISTED, LISTED_LARGE
from .device import ordinal
from .device_memory import DeviceMemory
from .index_ring import IndexRing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from .arena import Table


# cudaErrorNotReady. Error 900 is different from "not yet": a thread records a graph that forbids this query, and the
# query has broken that recording. Inside `Current` the query is not forbidden.
_NOT_READY = 600
# Kernels take more than 4 KiB of parameters from these on: CUDA 12.1, and Volta.
_LARGE_CUDA, _LARGE_CAPABILITY = 12010, 70


class Bulk(NamedTuple):
    """A warp's ring in shared memory: 48 KiB; two thirds of it are being filled."""

    stages: int = 6
    stage_nbytes: int = 8192

    @property
    def nbytes(self) -> int:
        return self.stages * self.stage_nbytes


class Kernel(NamedTuple):
    """A function of the driver, the threads of its CTA and their dynamic shared memory."""

    function: int
    threads: int
    shared_nbytes: int


class Library(driver.Library, Protocol):
    """The driver's calls that CUDA devices need; `driver.Cuda` implements them."""

    def in_use(self, device: int) -> bool: ...


class Current:
    """Makes a device and its context current, and restores the previous one at the end. Inside, the calling thread's
    calls break no recording of a graph by another thread.

    An unused previous device is not restored: a new thread has device 0, and going back would create a context there.
    Every rank of a node would take its hundreds of MiB from the first rank's device.
    """

    __slots__ = ("_cuda", "_device", "_device_before", "_library", "_mode_before")

    def __init__(self, cuda: Any, device: int, library: Library) -> None:  # noqa: ANN401  (a module without types)
        self._cuda, self._device, self._library = cuda, device, library

    def __enter__(self) -> None:
        self._device_before = self._cuda.getDevice()
        if self._device_before != self._device or not driver.thread.relaxed:
            # Since CUDA 12 this creates the context and makes it the thread's. An outer one has done so already.
            self._cuda.setDevice(self._device)
        self._mode_before = driver.relax(self._library)

    def __exit__(self, *error: object) -> None:
        driver.restore(self._library, self._mode_before)
        if self._device_before != self._device and self._library.in_use(self._device_before):
            self._cuda.setDevice(self._device_before)


class CupyRuntime(DeviceMemory):
    """A device by its number. Several threads may use it. It holds everything it allocates."""

    threads = 512
    bulk = Bulk()
    _library: Library

    def __init__(self, device: int) -> None:
        from cupy.cuda import Event, Stream, function, pinned_memory, runtime  # noqa: PLC0415
        from cupy.cuda import device as devices  # noqa: PLC0415
        from cupy.cuda import driver as cupy_driver  # noqa: PLC0415

        self._cuda, self._library = runtime, driver.cuda()
        self._driver = cupy_driver
        self._function, self._pinned, self._event, self._stream = function, pinned_memory, Event, Stream
        self.device = device
        with self.current():
            found = devices.Device(device)
            self.n_sms: int = found.attributes["MultiProcessorCount"]
            self.capability = int(found.compute_capability)
        self.architecture = nvrtc.architecture_of(self.capability)
        self.widest = nvrtc.widest_access(self.architecture)
        large = self.capability >= _LARGE_CAPABILITY and min(nvrtc.version(), runtime.driverGetVersion()) >= _LARGE_CUDA
        self.listed: tuple[int, ...] = (LISTED, LISTED_LARGE) if large else (LISTED,)
        self._held: list[Any] = []
        self._kernels: dict[Any, Kernel] = {}
        self._lock = threading.Lock()
        self._own: set[int] = set()
        self.flushes = self._library.flushes(device)
        self.tables = Arena(self)

    def current(self) -> Current:
        return Current(self._cuda, self.device, self._library)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        with self.current():
            held = self._pinned.PinnedMemoryPointer(self._pinned.PinnedMemory(nbytes), 0)
        return np.frombuffer(held, np.uint8, nbytes)

    def event(self) -> object:
        with self.current():  # an event can be recorded only in streams of its own device
            return self._event(block=False, disable_timing=True)

    def upload(self, dst_ptr: int, src: NDArray[np.uint8], stream: int) -> None:
        address = src.__array_interface__["data"][0]
        self._cuda.memcpyAsync(dst_ptr, address, src.nbytes, self._cuda.memcpyHostToDevice, stream)

    def record(self, event: object, stream: int) -> None:
        with self.current():
            self._cuda.eventRecord(event.ptr, stream)  # type: ignore[attr-defined]

    def done(self, event: object) -> bool:
        # Not CuPy's own `done`, which reports a failed device as busy for ever.
        with self.current():  # in a new thread the query itself creates a context, on whatever device is current
            status = self._cuda.eventQuery(event.ptr)  # type: ignore[attr-defined]
        if status == _NOT_READY:
            return False
        self._cuda.check_status(status)
        return True

    def stream(self, stream: object) -> int:
        """See `Runtime.stream`. None is CuPy's current stream; if that is the default one, torch's current one."""
        if stream is None:
            from cupy.cuda import get_current_stream  # noqa: PLC0415

            stream = get_current_stream().ptr
            torch = sys.modules.get("torch")
            if not stream and torch is not None and torch.cuda.is_initialized():
                stream = torch.cuda.current_stream(self.device).cuda_stream
        handle = getattr(stream, "ptr", getattr(stream, "cuda_stream", stream))
        if not isinstance(handle, int):
            raise UsageError(f"{stream!r} is not a stream", remedy="give a cupy or torch stream, its handle, or None")
        return handle

    def capturing(self, stream: int) -> bool:
        return bool(self._cuda.streamIsCapturing(stream))

    def push_range(self, name: str) -> None:
        from cupy.cuda import nvtx  # noqa: PLC0415

        nvtx.RangePush(name)

    def pop_range(self) -> None:
        from cupy.cuda import nvtx  # noqa: PLC0415

        nvtx.RangePop()

    def new_stream(self) -> int:
        with self.current():
            stream = self._stream(non_blocking=True, priority=-1000)  # the runtime clamps it to the highest priority
        self._held.append(stream)
        self._own.add(int(stream.ptr))
        return int(stream.ptr)

    def reserve(self) -> None:
        self.tables.reserve()

    def owns(self, stream: int) -> bool:
        return stream in self._own

    def wait(self, event: object, stream: int) -> None:
        self._cuda.streamWaitEvent(stream, event.ptr)  # type: ignore[attr-defined]

    def kernel(self, name: str, macros: Mapping[str, int], threads: int, shared_nbytes: int = 0) -> Kernel:
        """The kernel of csrc/cuda/`name`, compiled and loaded once. Slow the first time."""
        key = (name, tuple(sorted(macros.items())))
        with self._lock:
            if key not in self._kernels:
                image = nvrtc.compile_kernel(name, macros, self.architecture)
                with self.current():
                    module = self._function.Module()
                    module.load(image)
                    found = module.get_function("pdstage_copy")
                    if shared_nbytes:
                        attribute = self._driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                        self._driver.funcSetAttribute(found.ptr, attribute, shared_nbytes)
                self._held.append((module, found))
                self._kernels[key] = Kernel(int(found.ptr), threads, shared_nbytes)
            return self._kernels[key]

    def launch(self, kernel: Kernel, grid: int, stream: int, params: int, table: Table) -> None:
        """`params` is the address of an array with the address of the kernel's one argument, which is read before this
        returns. `table` is the plan's table that the kernel reads.
        """
        table.before(stream)
        self._driver.launchKernel(
            kernel.function, grid, 1, 1, kernel.threads, 1, 1, kernel.shared_nbytes, stream, params, 0
        )
        table.after(stream)


@lru_cache(maxsize=64)
def held_runtime(device: str) -> tuple[CupyRuntime, IndexRing]:
    """The process's one runtime and ring of a device. Raises `UsageError` if the device does not exist."""
    from cupy.cuda import runtime as cuda  # noqa: PLC0415

    runtime = CupyRuntime(ordinal(device, cuda.getDeviceCount()))
    with runtime.current():
        return runtime, IndexRing(runtime)


def missing() -> str:
    """Why no device can be used here; empty if one can."""
    try:
        from cupy.cuda import runtime  # noqa: PLC0415
    except (ImportError, OSError) as error:
        return f"install pdstage[cuda13] or pdstage[cuda12] ({error})"
    if runtime.is_hip:
        return "CuPy is built for AMD; use backend triton"
    try:
        n_devices = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"no CUDA device: {error}"
    return nvrtc.missing() if n_devices else "no CUDA device"


class Arguments:
    """A kernel's one argument: a structure of `nbytes`, followed by room for `n_listed` items.

    `params` is the address of the array with its address, as launches take it.
    """

    def __init__(self, nbytes: int, n_listed: int = 0) -> None:
        self.buffer = (ctypes.c_uint8 * (nbytes + 4 * n_listed))()
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.buffer))
        self.params = ctypes.addressof(self._pointers)
        self.listed = np.ctypeslib.as_array(self.buffer)[nbytes:].view(np.int32)

"""One CUDA device through its driver: memory, streams, events, modules and launches.

Addresses, streams, events and kernels are integers, as in the driver: a launch is one call and builds no object. Every
call is made inside `driver.Current`, and CuPy only brings NVRTC.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import UsageError
from . import driver, nvrtc
from .arena import Arena
from .cuda_tables import LISTED, LISTED_LARGE
from .device import ordinal
from .device_memory import DeviceMemory
from .driver import Kernel
from .index_ring import IndexRing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from .arena import Table


# Kernels take more than 4 KiB of parameters from these on: CUDA 12.1, and Volta.
_LARGE_CUDA, _LARGE_CAPABILITY = 12010, 70


class Bulk(NamedTuple):
    """A warp's ring in shared memory: 48 KiB; two thirds of it are being filled."""

    stages: int = 6
    stage_nbytes: int = 8192

    @property
    def nbytes(self) -> int:
        return self.stages * self.stage_nbytes


class CudaRuntime(DeviceMemory):
    """A device by its number. Several threads may use it. It holds everything it allocates."""

    threads = 512
    bulk = Bulk()
    _library: driver.Cuda

    def __init__(self, device: int) -> None:
        library = self._library = driver.cuda()
        self.device, self._context = device, library.primary(device)
        self.n_sms = library.device_attribute(driver.N_SMS, device)
        self.capability = library.capability(device)
        self.architecture = nvrtc.architecture_of(self.capability)
        self.widest = nvrtc.widest_access(self.architecture)
        large = self.capability >= _LARGE_CAPABILITY and min(nvrtc.version(), library.version()) >= _LARGE_CUDA
        self.listed: tuple[int, ...] = (LISTED, LISTED_LARGE) if large else (LISTED,)
        self._kernels: dict[Any, Kernel] = {}
        self._lock = threading.Lock()
        self._own: set[int] = set()
        self.flushes = library.flushes(device)
        self.tables = Arena(self)

    def current(self) -> driver.Current:
        return driver.Current(self._library, self._context)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """It lives as long as the process."""
        with self.current():
            address = self._library.pinned(nbytes)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def event(self) -> int:
        """It lives as long as the process. Those who drop one give it to others."""
        with self.current():  # an event can be recorded only in streams of its own device
            return self._library.new_event()

    def upload(self, dst_ptr: int, src: NDArray[np.uint8], stream: int) -> None:
        with self.current():
            self._library.upload(dst_ptr, src.__array_interface__["data"][0], src.nbytes, stream)

    def record(self, event: object, stream: int) -> None:
        assert isinstance(event, int)
        with self.current():
            self._library.record(event, stream)

    def done(self, event: object) -> bool:
        assert isinstance(event, int)
        with driver.Relaxed(self._library):
            return self._library.done(event)

    def stream(self, stream: object) -> int:
        """See `Runtime.stream`. None is CuPy's current stream; if that is the default one, torch's current one."""
        if stream is None:
            cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
            stream = cupy.cuda.get_current_stream().ptr if cupy is not None else 0
            if not stream and torch is not None and torch.cuda.is_initialized():
                stream = torch.cuda.current_stream(self.device).cuda_stream
        handle = getattr(stream, "ptr", getattr(stream, "cuda_stream", stream))
        if not isinstance(handle, int):
            raise UsageError(f"{stream!r} is not a stream", remedy="give a cupy or torch stream, its handle, or None")
        return handle

    def capturing(self, stream: int) -> bool:
        with self.current():  # 0 is a stream of every device
            return self._library.capturing(stream)

    def new_stream(self) -> int:
        with self.current():
            stream = self._library.new_stream()
        self._own.add(stream)
        return stream

    def reserve(self) -> None:
        self.tables.reserve()

    def owns(self, stream: int) -> bool:
        return stream in self._own

    def wait(self, event: object, stream: int) -> None:
        assert isinstance(event, int)
        with self.current():
            self._library.wait(event, stream)

    def kernel(self, name: str, macros: Mapping[str, int], threads: int, shared_nbytes: int = 0) -> Kernel:
        """The kernel of csrc/cuda/`name`, compiled and loaded once. Slow the first time."""
        key = (name, tuple(sorted(macros.items())))
        with self._lock:
            if key not in self._kernels:
                image = nvrtc.compile_kernel(name, macros, self.architecture)
                with self.current():
                    function = self._library.function(self._library.module(image), "pdstage_copy", shared_nbytes)
                self._kernels[key] = Kernel(function, threads, shared_nbytes)
            return self._kernels[key]

    def launch(self, kernel: Kernel, grid: int, stream: int, params: int, table: Table) -> None:
        """`params` is the address of an array with the address of the kernel's one argument, which is read before this
        returns. `table` is the plan's table that the kernel reads.
        """
        table.before(stream)
        self._library.launch(kernel, grid, stream, params)
        table.after(stream)


@lru_cache(maxsize=64)
def held_runtime(device: str) -> tuple[CudaRuntime, IndexRing]:
    """The process's one runtime and ring of a device. Raises `UsageError` if the device does not exist."""
    runtime = CudaRuntime(ordinal(device, driver.cuda().n_devices()))
    with runtime.current():
        return runtime, IndexRing(runtime)


def missing() -> str:
    """Why no device can be used here; empty if one can."""
    try:
        n_devices = driver.cuda().n_devices()
    except OSError as error:
        return f"no CUDA driver: {error}"
    except driver.DriverError as error:
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

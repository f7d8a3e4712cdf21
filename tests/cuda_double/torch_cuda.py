"""`torch.cuda` of a torch without CUDA: the double's devices, streams and events. Tensors are `torch_backend.cpp`'s."""

from __future__ import annotations

import ctypes
import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tests.cuda_double import HERE, build, double, folder, header

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.kernels.driver import Cuda


class Event:
    """`torch.cuda.Event`."""

    def __init__(self, *_: object, **__: object) -> None:
        self._event = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with stream.current():
            self._event = self._event or driver().new_event()
            driver().record(self._event, stream.cuda_stream)

    def query(self) -> bool:
        return not self._event or driver().done(self._event)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        if self._event:
            driver().call("cuEventSynchronize", ctypes.c_void_p(self._event))


class Stream:
    """`torch.cuda.Stream`."""

    def __init__(self, device: Any = None, priority: int = 0, stream_ptr: int | None = None) -> None:
        del priority
        self.device = torch.device("cuda", _index(device))
        if stream_ptr is None:
            with self.current():
                stream_ptr = driver().new_stream()
        self.cuda_stream = stream_ptr

    def current(self) -> Any:
        return double().on(self.device.index)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event._event:
            with self.current():
                driver().wait(event._event, self.cuda_stream)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        with self.current():
            driver().call("cuStreamSynchronize", ctypes.c_void_p(self.cuda_stream))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.device, self.cuda_stream) == (other.device, other.cuda_stream)

    def __hash__(self) -> int:
        return hash((self.device, self.cuda_stream))


class _In:
    """`torch.cuda.stream(...)`."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before = current_stream(self._stream.device)
            set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            set_stream(self._before)


class _Device:
    """`torch.cuda.device(...)`."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, *_: object) -> None:
        set_device(self._before)


def driver() -> Cuda:
    return double().driver


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def current_device() -> int:
    return int(_library().torch_double_device())


def set_device(device: Any) -> None:
    _library().torch_double_set_device(_index(device))


def current_stream(device: Any = None) -> Stream:
    index = _index(device)
    return Stream(index, stream_ptr=int(_library().torch_double_stream(index) or 0))


def set_stream(stream: Stream) -> None:
    _library().torch_double_set_stream(stream.device.index, ctypes.c_void_p(stream.cuda_stream))


def synchronize(device: Any = None) -> None:
    with double().on(_index(device)):
        driver().call("cuCtxSynchronize")


@functools.cache
def _library() -> ctypes.CDLL:
    found = torch.__path__[0]
    path = build(
        "torch-backend.so", f"-I{header()}", f"-I{found}/include", f"-I{found}/include/torch/csrc/api/include",
        "-Wno-unknown-pragmas", str(HERE / "torch_backend.cpp"), f"-L{found}/lib", "-lc10", "-ltorch_cpu",
        f"-L{folder() / 'lib'}", "-l:libcuda.so.1",
    )  # fmt: skip
    torch.ops.load_library(str(path))
    library = ctypes.CDLL(str(path))
    library.torch_double_stream.restype = ctypes.c_void_p
    return library


def install(*, available: bool = True) -> None:
    """For the rest of the process, after `tests.cuda_double.install`. Not `available`: libraries that ask torch whether
    it has CUDA, such as Triton, which cannot run here, hear that it has not.
    """
    assert not torch.cuda.is_available(), "a GPU is here"
    _library()
    here: dict[str, object] = {
        "_lazy_init": lambda: None, "is_initialized": lambda: True, "is_available": lambda: available,
        "device_count": driver().n_devices, "current_device": current_device, "set_device": set_device,
        "device": _Device, "current_stream": current_stream, "set_stream": set_stream,
        "default_stream": lambda device=None: Stream(_index(device), stream_ptr=0), "stream": _In, "Stream": Stream,
        "ExternalStream": lambda handle, device=None: Stream(device, stream_ptr=handle), "Event": Event,
        "synchronize": synchronize, "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "double of a GPU", "empty_cache": lambda: None,
        "get_device_properties": lambda device=None: SimpleNamespace(
            name="double of a GPU", major=9, minor=0, total_memory=double()["memory"], multi_processor_count=4
        ),
        "is_current_stream_capturing": lambda: driver().capturing(current_stream().cuda_stream),
    }  # fmt: skip
    for name, what in here.items():
        setattr(torch.cuda, name, what)
    torch.storage._to = functools.partial(_storage_to, torch.storage._to)


def _storage_to(real: Callable[..., Any], storage: Any, device: Any, non_blocking: bool = False) -> Any:
    """`torch.storage._to`: a torch without CUDA makes no storage on one."""
    if torch.device(device).type != "cuda":
        return real(storage, device, non_blocking)
    made = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    made.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
    return made.untyped_storage()

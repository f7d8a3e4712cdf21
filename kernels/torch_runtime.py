"""A device's runtime through torch: pinned memory, streams and events without CuPy, on AMD's GPUs too.

Imports torch only when created. Implements `index_ring.Runtime`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from ..errors import UsageError
from . import driver
from .arena import Arena
from .device_memory import DeviceMemory

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np
    import torch
    from numpy.typing import NDArray

# cudaStreamLegacy: torch writes this stream as 0, and reads 1 as another stream.
_LEGACY = 1


class Current:
    """See `cuda_runtime.Current`. Torch binds no context for a device that is current by number already, such as device
    0 in a new thread; so the driver binds the context.
    """

    __slots__ = ("_context", "_context_before", "_device", "_library", "_mode_before")

    def __init__(self, device: AbstractContextManager[None], context: int, library: driver.Library) -> None:
        self._device, self._context, self._library = device, context, library

    def __enter__(self) -> None:
        self._device.__enter__()
        self._context_before = self._library.context()
        if self._context_before != self._context:
            self._library.bind(self._context)
        self._mode_before = driver.relax(self._library)

    def __exit__(self, *error: object) -> None:
        driver.restore(self._library, self._mode_before)
        if self._context_before != self._context:
            self._library.bind(self._context_before)
        self._device.__exit__(None, None, None)


class TorchRuntime(DeviceMemory):
    """The runtime of "cuda:1", or of "cuda", the current device. Streams are `cudaStream_t` or `hipStream_t` as
    integers.
    """

    def __init__(self, device: str) -> None:
        import torch  # noqa: PLC0415

        self._torch = torch
        index = torch.device(device).index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self._library: driver.Library = driver.Hip() if torch.version.hip else driver.cuda()
        self._context = self._library.primary(self.device.index)
        self._own: dict[int, torch.cuda.Stream] = {}
        self._streams: dict[int, torch.cuda.Stream] = {0: torch.cuda.default_stream(self.device)}
        self.flushes = self._library.flushes(self.device.index)
        self.tables = Arena(self)

    def current(self) -> Current:
        return Current(self._torch.cuda.device(self.device), self._context, self._library)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        # The array's base is the tensor, which it keeps alive.
        with self.current():
            held: NDArray[np.uint8] = self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True).numpy()
        return held

    def event(self) -> torch.cuda.Event:
        return self._torch.cuda.Event()  # type: ignore[no-untyped-call]

    def new_stream(self) -> int:
        with self.current():
            made = self._torch.cuda.Stream(priority=-1000)  # type: ignore[no-untyped-call]  # clamped to the greatest
        self._own[int(made.cuda_stream)] = made
        return int(made.cuda_stream)

    def reserve(self) -> None:
        self.tables.reserve()

    def owns(self, stream: int) -> bool:
        return stream in self._own

    def wait(self, event: object, stream: int) -> None:
        assert isinstance(event, self._torch.cuda.Event)
        self._stream(stream).wait_event(event)

    def upload(self, dst_ptr: int, src: NDArray[np.uint8], stream: int) -> None:
        with self.current():
            self._library.upload(dst_ptr, src.__array_interface__["data"][0], src.nbytes, stream)

    def record(self, event: object, stream: int) -> None:
        assert isinstance(event, self._torch.cuda.Event)
        with driver.Relaxed(self._library):
            event.record(self._stream(stream))

    def done(self, event: object) -> bool:
        assert isinstance(event, self._torch.cuda.Event)
        with driver.Relaxed(self._library):
            return bool(event.query())  # type: ignore[no-untyped-call]

    def stream(self, stream: object) -> int:
        """The handle of a torch or cupy stream, an integer, or None for torch's current stream of the device.

        Raises `UsageError` for an object that is not a stream, and for a stream of another device.
        """
        if stream is None:
            return int(self._torch.cuda.current_stream(self.device).cuda_stream)
        if isinstance(stream, int):
            return 0 if stream == _LEGACY else stream
        device = getattr(stream, "device", self.device)
        if device != self.device:
            raise UsageError(f"a stream of {device} for memory on {self.device}", remedy="give a stream of that device")
        handle = getattr(stream, "cuda_stream", getattr(stream, "ptr", None))
        if not isinstance(handle, int):
            raise UsageError(
                f"a {type(stream).__name__} is no stream", remedy="give a torch or cupy stream, its handle, or None"
            )
        return 0 if handle == _LEGACY else handle

    def capturing(self, stream: int) -> bool:
        with self._current(stream):
            return bool(self._torch.cuda.is_current_stream_capturing())

    def _current(self, handle: int) -> AbstractContextManager[object]:
        """Inside, the stream is the current one. Switching costs microseconds, so it happens only if needed."""
        current = self._torch.cuda.current_stream()
        if (current.device, current.cuda_stream) == (self.device, handle):  # 0 is a stream of every device
            return nullcontext()
        return self._torch.cuda.stream(self._stream(handle))

    def _stream(self, handle: int) -> torch.cuda.Stream:
        """Torch's object for a handle. Streams are few and reused, but a process may create them without end."""
        stream = self._streams.get(handle)
        if stream is None:
            if len(self._streams) > 64:
                self._streams = {0: self._streams[0]}
            external = self._torch.cuda.ExternalStream
            stream = self._streams[handle] = external(handle, device=self.device)  # type: ignore[no-untyped-call]
        return stream

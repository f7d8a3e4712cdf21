"""Device memory for plans' tables, so that making or dropping a plan does not allocate, free or wait.

An arena consists of slabs of device memory, each with as much page-locked host memory. A table is written to its place
in the host half and uploaded from there, in the arena's own stream. Until the upload is known to be done, launches wait
for it on the device. The place of a dropped table is reused once everything launched with it has run.

It has one slab from the start. `reserve`, called when there is time, ensures that half a slab is free. Making a plan
allocates another slab only if that was not enough, and a separate slab for a larger table.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .index_ring import Runtime

SLAB_NBYTES = 1 << 20
_LEAST_NBYTES = 1 << 10
_MAX_STREAMS = 64


class _Slab:
    def __init__(self, runtime: Runtime, nbytes: int) -> None:
        self.ptr, self.host = runtime.allocate(nbytes), runtime.pinned(nbytes)
        self.nbytes, self.used = nbytes, 0


class _Place:
    """A piece of a slab, and the streams its table was launched in. `uploaded` is None once the upload is done."""

    def __init__(self, slab: _Slab, nbytes: int) -> None:
        self.ptr = slab.ptr + slab.used
        self.host = slab.host[slab.used : slab.used + nbytes]
        self.nbytes = nbytes
        slab.used += nbytes
        self.clear()

    def clear(self) -> None:
        self.uploaded: object = None
        self.own: set[int] = set()
        self.events: dict[int, object] = {}
        self.captured = False


class Table:
    """A table on the device, at `ptr`. A launch that reads it calls `before` and `after` with its stream. Dropping it
    makes no call, since the garbage collector may drop it anywhere.
    """

    __slots__ = ("_arena", "_place", "ptr")

    def __init__(self, arena: Arena, place: _Place) -> None:
        self._arena, self._place, self.ptr = arena, place, place.ptr

    def before(self, stream: int) -> None:
        if self._place.uploaded is not None:
            self._arena._follow(self._place, stream)

    def after(self, stream: int) -> None:
        if stream not in self._place.own:
            self._arena._launched(self._place, stream)

    def __del__(self) -> None:
        self._arena._dropped.append(self._place)


class _Gone:
    """Dropped places, and events after everything launched with them."""

    def __init__(self, places: list[_Place], events: list[object]) -> None:
        self.places, self.events = places, events


class Arena:
    """The tables of one device. Several threads may use it."""

    def __init__(self, runtime: Runtime, slab_nbytes: int = SLAB_NBYTES) -> None:
        self._runtime, self._slab_nbytes = runtime, slab_nbytes
        self._stream = runtime.new_stream()
        self._slabs = [_Slab(runtime, slab_nbytes)]  # those with room left
        self._free: dict[int, list[_Place]] = {}
        self._dropped: deque[_Place] = deque()
        self._gone: list[_Gone] = []
        self._spare: list[object] = [runtime.event() for _ in range(8)]
        self._lock = threading.Lock()

    def put(self, table: NDArray[np.uint8]) -> Table:
        """A copy of the bytes of `table` on the device."""
        runtime = self._runtime
        with runtime.current(), self._lock:
            place = self._take(max(_LEAST_NBYTES, 1 << (table.nbytes - 1).bit_length()))
            place.host[: table.nbytes] = table
            event = self._event()
            runtime.upload(place.ptr, place.host[: table.nbytes], self._stream)
            runtime.record(event, self._stream)
            place.uploaded = event
        return Table(self, place)

    def reserve(self) -> None:
        """See `Runtime.reserve`. Without enough memory it does nothing; a plan that needs some will raise."""
        with self._runtime.current():
            with self._lock:
                self._sweep()
                left = sum(slab.nbytes - slab.used for slab in self._slabs)
            if left >= self._slab_nbytes // 2:
                return
            with contextlib.suppress(RuntimeError, MemoryError):  # raised by CuPy, torch and the driver
                slab = _Slab(self._runtime, self._slab_nbytes)  # without the lock, which a launch may wait for
                with self._lock:
                    self._slabs.append(slab)

    def _take(self, nbytes: int) -> _Place:
        self._sweep()
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        slab = next((slab for slab in self._slabs if slab.nbytes - slab.used >= nbytes), None)
        if slab is None:
            slab = _Slab(self._runtime, max(self._slab_nbytes, nbytes))
            self._slabs.append(slab)
        place = _Place(slab, nbytes)
        self._slabs = [slab for slab in self._slabs if slab.nbytes - slab.used >= _LEAST_NBYTES]
        return place

    def _sweep(self) -> None:
        """Finds the places that are free by now."""
        if self._dropped:
            self._gone.append(self._collect())
        waiting, self._gone = self._gone, []
        for gone in waiting:
            while gone.events and self._runtime.done(gone.events[-1]):
                self._spare.append(gone.events.pop())
            if gone.events:
                self._gone.append(gone)
                continue
            for place in gone.places:
                if place.uploaded is not None:
                    self._spare.append(place.uploaded)
                place.clear()
                self._free.setdefault(place.nbytes, []).append(place)

    def _collect(self) -> _Gone:
        """The dropped places, except those that graphs were recorded with: these may be launched at any time."""
        places: list[_Place] = []
        events: list[object] = []
        streams = {self._stream}
        while self._dropped:
            place = self._dropped.popleft()
            if not place.captured:
                places.append(place)
                events += place.events.values()
                streams |= place.own
        for stream in streams:  # these live as long as the runtime
            events.append(self._event())
            self._runtime.record(events[-1], stream)
        return _Gone(places, events)

    def _event(self) -> object:
        return self._spare.pop() if self._spare else self._runtime.event()

    def _follow(self, place: _Place, stream: int) -> None:
        """Orders later work of the stream after the upload."""
        runtime = self._runtime
        with self._lock:
            event = place.uploaded
            if event is None:
                return
            if stream != self._stream and runtime.capturing(stream):
                while not runtime.done(event):  # a graph cannot wait for it; an upload takes microseconds
                    pass
            if runtime.done(event):
                place.uploaded = None
                self._spare.append(event)
            else:
                runtime.wait(event, stream)

    def _launched(self, place: _Place, stream: int) -> None:
        """Notes the stream. For a foreign stream, which may be destroyed, it records an event after the launch."""
        runtime = self._runtime
        if runtime.owns(stream):
            place.own.add(stream)
        elif runtime.capturing(stream):
            place.captured = True
        else:
            with self._lock:
                event = place.events.get(stream)
                if event is None:
                    self._forget_done(place)
                    event = place.events[stream] = self._event()
            runtime.record(event, stream)

    def _forget_done(self, place: _Place) -> None:
        """Streams are few and reused, but a process may create them without end."""
        if len(place.events) >= _MAX_STREAMS:
            for stream, event in list(place.events.items()):
                if self._runtime.done(event):
                    self._spare.append(place.events.pop(stream))

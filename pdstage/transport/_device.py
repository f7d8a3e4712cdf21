"""Device memory in transport `local`: the memory that peers may open, where theirs is mapped here, and copies in
flight.

A copy runs in a stream of this transport, followed by an event. `poll` queries the event; nothing waits for it. The
destination stays mapped until the event is done, even if the peer or the transport goes first.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from pdstage.errors import PeerError, TransportError, UsageError
from pdstage.kernels.driver import DriverError
from pdstage.layout import Region
from pdstage.transport._cuda_ipc import Cuda, Export, Mapping  # noqa: TC001  (msgspec resolves it at run time)
from pdstage.transport.base import Mapped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdstage.plan.spans import Spans
    from pdstage.transport.base import Ints

log = logging.getLogger(__name__)

KIND = "cuda"
ON_DEVICE: dict[str, Any] = {
    "kinds": frozenset({"cpu", KIND}), "max_descriptors": 4096, "post_blocks": False, "stops_reads": False,
    "bytes_per_s": 50e9, "descriptor_s": 3e-6, "post_s": 20e-6,
}  # fmt: skip
"""Traits that differ for a peer whose device memory is written. The figures are guesses: no GPU was there to measure.
"""
_OTHER_WAY = "use another transport between the two (auto does), or fix the reason above"


class ExportedRegion(msgspec.Struct, frozen=True, array_like=True):
    """One region as its owner describes it. `export` is what holds it, or `why_not` says why it cannot be opened."""

    base: int
    nbytes: Annotated[int, Meta(gt=0)]
    device: int
    export: Export | None = None
    why_not: str = ""

    def region(self) -> Region:
        return Region(self.base, self.nbytes, KIND, self.device)


class _View(NamedTuple):
    """A peer's region here: bytes at `base` there lie at `base + shift` here while `held` lives."""

    base: int
    nbytes: int
    shift: int
    held: Mapping | None


class Views(list[_View]):
    """Where the prepared device memory of one peer is mapped."""

    def mapped(self, address: int, nbytes: int) -> Mapped | None:
        for view in self:
            if view.base <= address and address + nbytes <= view.base + view.nbytes:
                return Mapped(address + view.shift, view.held, KIND)
        return None

    def here(self, addresses: Ints) -> tuple[Ints, list[Mapping | None]]:
        """Addresses of the peer as addresses here, and the mappings that keep them valid. They must lie in prepared
        regions.
        """
        shifted = addresses.copy()
        held = []
        for view in self:
            inside = (addresses >= view.base) & (addresses < view.base + view.nbytes)
            if inside.any():
                shifted[inside] += view.shift
                held.append(view.held)
        return shifted, held


class Devices:
    """The device memory of one transport. `load` returns CUDA; it is called when device memory first appears."""

    def __init__(self, load: Callable[[], Cuda]) -> None:
        self._load = load
        self._regions: dict[Region, ExportedRegion] = {}
        self._exports: list[Export] = []
        """Includes regions that were unregistered: a description in use elsewhere may still name their descriptors."""
        self._copies: Copies | None = None
        self._said: set[str] = set()

    def register(self, region: Region) -> None:
        """Memory that cannot be exported can still be read by our posts; peers are told why they cannot write it."""
        export, why_not = None, ""
        try:
            export = self._load().export(region.base, region.nbytes)
            self._exports.append(export)
        except (UsageError, TransportError) as error:
            why_not = str(error)
            log.info("peers cannot map %s: %s", region, error)
        self._regions[region] = ExportedRegion(region.base, region.nbytes, region.device, export, why_not)

    def unregister(self, region: Region) -> None:
        self._regions.pop(region, None)

    def exported(self) -> list[ExportedRegion]:
        return list(self._regions.values())

    def views(
        self,
        peer: str,
        offered: Sequence[ExportedRegion],
        regions: Sequence[Region],
        fetch: Callable[[int], int] | None,
    ) -> Views:
        """Maps the device memory among `regions`. `fetch` turns a descriptor number of the peer's process into a
        descriptor of this one; None: the peer is this process. Raises `PeerError` with the reason if a region cannot be
        written.
        """
        wanted = [region for region in regions if region.kind == KIND]
        if not wanted and not self._regions:
            return Views()
        ours = {region.device for region in self._regions}
        if not wanted or len(ours) != 1:
            what = f"this rank has registered memory on {len(ours)} devices, and peer {peer!r} {len(wanted)} regions"
            raise PeerError(f"{what} of device memory", remedy="local needs one device here, and device memory there")
        (device,) = ours
        holders = [self._holder(peer, region, offered) for region in wanted]
        cuda = self._load()
        try:
            distinct = {(one.base, one.nbytes): one for one in holders}.values()
            views = [self._view(peer, one, cuda, device, fetch) for one in distinct]
            self._copies = self._copies or Copies(cuda, device)
        except DriverError as error:
            raise self._refused(peer, str(error)) from error
        return Views(views)

    def _holder(self, peer: str, region: Region, offered: Sequence[ExportedRegion]) -> ExportedRegion:
        for one in offered:
            if one.base <= region.base and region.base + region.nbytes <= one.base + one.nbytes:
                return one
        raise PeerError(f"peer {peer!r} has no device memory at {region}", remedy="stop using that peer", peer=peer)

    def _view(
        self, peer: str, offered: ExportedRegion, cuda: Cuda, device: int, fetch: Callable[[int], int] | None
    ) -> _View:
        if fetch is None:
            if offered.device != device:
                self._check_access(peer, cuda, device, offered.device)
                cuda.allow(device, offered.device, offered.base, offered.nbytes)
            return _View(offered.base, offered.nbytes, 0, None)
        export = offered.export
        if export is None:
            raise self._refused(peer, offered.why_not or "it exports no device memory")
        if not export.holds(offered.base, offered.nbytes):
            raise PeerError(f"peer {peer!r} describes memory outside its allocation", remedy="stop using that peer")
        seen = cuda.ordinal(export.uuid)
        if seen is not None:  # else only the driver knows, when it maps the memory
            self._check_access(peer, cuda, device, seen)
        try:
            mapping = cuda.open(export, device, fetch)
        except TransportError as error:
            raise self._refused(peer, str(error)) from error
        return _View(offered.base, offered.nbytes, mapping.address - export.base, mapping)

    def _check_access(self, peer: str, cuda: Cuda, device: int, other: int) -> None:
        if device != other and not cuda.driver.can_access(device, other):
            raise self._refused(peer, f"device {device} cannot access device {other}")

    def _refused(self, peer: str, why: str) -> PeerError:
        if why not in self._said:
            self._said.add(why)
            log.warning("device memory of peers is not mapped: %s", why)
        return PeerError(f"device memory of peer {peer!r} is not mapped: {why}", remedy=_OTHER_WAY, peer=peer)

    def start(self, word: object, spans: Spans, views: Views) -> None:
        """Starts a copy of device memory; `ended` returns `word`. Raises `TransportError` if nothing is copied."""
        assert self._copies is not None, "device memory was prepared"
        dst, held = views.here(spans.dst)
        self._copies.start(word, spans._replace(dst=dst), held)

    def ended(self) -> list[Copy]:
        return self._copies.ended() if self._copies is not None else []

    def under_way(self) -> bool:
        return self._copies is not None and bool(self._copies.running)

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()
        for export in self._exports:
            export.close()
        self._copies = None
        self._regions.clear()
        self._exports.clear()


class Copy(NamedTuple):
    """One in flight, or one that has ended. Not `settled`: the device failed, and bytes may still land."""

    word: Any
    event: int
    held: object
    error: TransportError | None
    settled: bool = True


_orphans: list[Copies] = []
"""Copies in flight of closed transports: their mappings stay until the copies end."""
_orphans_lock = threading.Lock()


class Copies:
    """Copies in one stream of one device, in order."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        self._cuda, self._device = cuda, device
        self.running: deque[Copy] = deque()
        self._spare: list[int] = []
        with cuda.on(device):
            self._stream = cuda.driver.new_stream()
        reap()

    def start(self, word: object, spans: Spans, held: object) -> None:
        """Starts independent copies: by one call if the driver supports that, else one call per span.

        Raises `TransportError` if nothing is copied. A fault after the first span is reported when the copy ends.
        """
        cuda, failed, begun = self._cuda, None, False
        try:
            with cuda.on(self._device):
                event = self._spare.pop() if self._spare else cuda.driver.new_event()
                # Spans that a refused batch has begun are copied again, after it.
                begun = len(spans.nbytes) > 1 and cuda.has_batches
                if not begun or not cuda.copy_batch(spans, self._stream):
                    try:
                        for src, dst, nbytes in zip(*map(np.ndarray.tolist, spans), strict=True):
                            cuda.driver.copy(dst, src, nbytes, self._stream)
                            begun = True
                    except DriverError as error:
                        failed = _failed(error)
                        if not begun:
                            raise
                cuda.driver.record(event, self._stream)
        except DriverError as error:
            if not begun:
                raise _failed(error) from error
            failed, event = _failed(error), 0
        self.running.append(Copy(word, event, held, failed))

    def ended(self) -> list[Copy]:
        if not self.running:
            return []
        ended = []
        try:
            with self._cuda.on(self._device):
                while self.running and self.running[0].event and self._cuda.driver.done(self.running[0].event):
                    ended.append(self.running.popleft())
                    self._spare.append(ended[-1].event)
            failed = self.running[0].error if self.running and not self.running[0].event else None
        except DriverError as error:
            failed = _failed(error)
        if failed:  # a failed device never answers again
            ended += [one._replace(error=one.error or failed, settled=False) for one in self.running]
            self.running.clear()
        return ended

    def close(self) -> None:
        """Releases the stream, or leaves that to `reap` while copies are in flight."""
        if self.running:
            with _orphans_lock:
                _orphans.append(self)
            return
        try:
            with self._cuda.on(self._device):
                for event in self._spare:
                    self._cuda.driver.free_event(event)
                self._cuda.driver.free_stream(self._stream)
        except DriverError as error:
            log.warning("a stream is not released: %s", error)


def reap() -> None:
    """Releases the streams and mappings of closed transports whose copies have ended."""
    with _orphans_lock:
        left, _orphans[:] = _orphans[:], []
    for copies in left:
        copies.ended()
        copies.close()


def _failed(error: Exception) -> TransportError:
    return TransportError(f"a copy on the device failed: {error}", remedy="see the device's log; restart this process")

"""Memory of cuMemCreate, such as torch's expandable segments: exported to another process and mapped there.

A region of such memory lies in several physical allocations, mapped one behind the other. Its owner exports each of
them, and a peer maps them in the same order in one range of its own addresses. Each travels as a descriptor of its
owner, which the peer duplicates by pidfd_getfd(2); opening it by its name in /proc would open another file. Memory that
has no descriptors travels as fabric handles. The owner keeps its descriptors, and so the memory, open while its
transport lives. A number in a description therefore never names another allocation.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from pdstage.errors import UsageError
from pdstage.kernels import driver, virtual_memory
from pdstage.kernels.virtual_memory import DESCRIPTOR, FABRIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pdstage.kernels.driver import Cuda
    from pdstage.kernels.virtual_memory import Calls

NO_HANDLES = "is memory of cuMemCreate (torch's expandable_segments?) without handles for other processes"
_REMEDY = (
    "start the engine with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or with a torch whose segments other "
    'processes may open, or choose path="staged", whose memory is the node\'s own'
)


_MAX_NBYTES = 1 << 48


class Segments(NamedTuple):
    """Allocations of `sizes` bytes, to be mapped one behind the other by another process. `name` is unique to this
    export, `uuid` is the GPU's, and `base` is where the first allocation lies at its owner. One of the two lists of
    handles has as many entries.
    """

    name: Annotated[bytes, Meta(min_length=16, max_length=16)]
    uuid: bytes
    base: int
    sizes: list[Annotated[int, Meta(gt=0, lt=_MAX_NBYTES)]]
    descriptors: list[Annotated[int, Meta(ge=0, lt=1 << 31)]]
    fabric: list[Annotated[bytes, Meta(min_length=64, max_length=64)]]

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    @property
    def is_whole(self) -> bool:
        """Whether it is consistent: one handle per size, and a total that fits the address space."""
        return len(self.handles) == len(self.sizes) > 0 and self.nbytes < _MAX_NBYTES

    @property
    def handles(self) -> list[int] | list[bytes]:
        return self.descriptors or self.fabric


def ranges(library: Cuda, base: int, nbytes: int) -> list[tuple[int, int]]:
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


def export(library: Cuda, calls: Calls, uuid: bytes, base: int, nbytes: int) -> Segments:
    """What another process needs to map a region. Raises `UsageError` with the reason if it cannot be exported."""
    found, types = ranges(library, base, nbytes), DESCRIPTOR | FABRIC
    if not found:
        raise UsageError(f"device memory at {base:#x} is not all mapped", remedy="give memory of a GPU", base=base)
    for start, _ in found:
        types &= library.attribute(driver.HANDLE_TYPES, start)
    if not types:
        raise UsageError(f"device memory at {base:#x} {NO_HANDLES}", remedy=_REMEDY, base=base)
    descriptors: list[int] = []
    fabric: list[bytes] = []
    try:
        for start, _ in found:
            handle = calls.retain(start)
            try:
                exported = calls.export(handle, DESCRIPTOR if types & DESCRIPTOR else FABRIC)
            finally:
                calls.release(handle)
            if isinstance(exported, int):
                descriptors.append(exported)
                os.set_inheritable(exported, False)
            else:
                fabric.append(exported)
    except driver.DriverError as error:
        close_descriptors(descriptors)
        place = len(descriptors or fabric) + 1
        what = f"allocation {place} of {len(found)} of device memory at {base:#x} cannot be exported: {error.what}"
        raise UsageError(what, remedy=f"allow a descriptor for each (ulimit -n), or {_REMEDY}", base=base) from error
    return Segments(secrets.token_bytes(16), uuid, found[0][0], [size for _, size in found], descriptors, fabric)


def close_descriptors(descriptors: Iterable[int]) -> None:
    """Closes exported descriptors. No process can map the memory any more; existing mappings stay."""
    for descriptor in descriptors:
        os.close(descriptor)


def map_here(calls: Calls, segments: Segments, device: int, fetch: Callable[[int], int]) -> int:
    """Maps the segments for kernels and copies of `device`, and returns the address here. `fetch` turns a descriptor
    number of the owner into a descriptor of this process.

    Raises what `fetch` raises, or `DriverError`; nothing stays mapped then.
    """
    handles = segments.handles

    def handle_of(place: int) -> int:
        exported = handles[place]
        if isinstance(exported, bytes):
            return calls.adopt(exported)
        descriptor = fetch(exported)
        try:
            return calls.adopt(descriptor)
        finally:
            os.close(descriptor)

    return virtual_memory.map_all(calls, device, segments.sizes, handle_of)

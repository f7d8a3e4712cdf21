"""Memory of cuMemCreate, as torch's expandable segments are, told to another process and mapped there.

A region of such memory lies in several physical allocations, each mapped behind the one before. Its owner exports every
one of them; a peer maps them in the same order at one range of its own addresses. Each travels as a descriptor of its
owner, which the peer takes over (pidfd_getfd(2): to open it anew by its name in /proc would open another file), or,
where the memory was made with none, as a fabric handle. The owner keeps its descriptors open, and with them the memory,
for as long as its transport lives: so a number that a description names is never another allocation's meanwhile.
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

NO_HANDLES = "is of cuMemCreate (torch's expandable_segments?) without a kind of handle that other processes open"
_REMEDY = (
    "start the engine with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, or with a torch whose segments other "
    'processes may open, or choose path="staged", whose memory is the node\'s own'
)


_MAX_NBYTES = 1 << 48


class Segments(NamedTuple):
    """Allocations of `sizes` bytes, as another process may map them one behind the other. `name` is this export's
    alone, `uuid` the GPU's; `base` is where the first lies at their owner. One of the lists of handles is as long.
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
        """Whether it says no nonsense: a handle for each size, and together no more than addresses have room for."""
        return len(self.handles) == len(self.sizes) > 0 and self.nbytes < _MAX_NBYTES

    @property
    def handles(self) -> list[int] | list[bytes]:
        return self.descriptors or self.fabric


def ranges(library: Cuda, base: int, nbytes: int) -> list[tuple[int, int]]:
    """Where the mappings lie, each address and bytes, that hold a region; [] where the driver knows of none."""
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
    """What maps a region in another process. Raises `UsageError`, saying why, where nothing does."""
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
    """Of what was exported: no process can map it any more, and where it is mapped it stays so."""
    for descriptor in descriptors:
        os.close(descriptor)


def map_here(calls: Calls, segments: Segments, device: int, fetch: Callable[[int], int]) -> int:
    """Its address in this process, for kernels and copies of `device`. `fetch` gives a descriptor of its owner as one
    of this process.

    Raises what `fetch` raises, or `DriverError`; then nothing is left.
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

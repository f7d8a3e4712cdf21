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
    from collections.abc import Callable

    from pdstage.kernels.driver import Cuda
    from pdstage.kernels.virtual_memory import Calls

NO_HANDLES = "is memory of cuMemCreate (torch's expandable_segments?) without handles for other processes"
_REMEDY = (
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


def export(library: Cuda, calls: Calls, uuid: bytes, base: int, nbytes: int) -> Export:
    """What another process needs to map a region. Raises `UsageError` with the reason if it cannot be exported."""
    found, types = ranges(library, base, nbytes), DESCRIPTOR | FABRIC
    if not found:
        raise UsageError(f"device memory at {base:#x} is not all mapped", remedy="give memory of a GPU", base=base)
    for start, _ in found:
        types &= library.attribute(driver.HANDLE_TYPES, start)
    if not types:
        raise UsageError(f"device memory at {base:#x} {NO_HANDLES}", remedy=_REMEDY, base=base)
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
        what = f"{which} cannot be exported: {error.what}"
        raise UsageError(what, remedy=f"allow a descriptor for each (ulimit -n), or {_REMEDY}", base=base) from error
    return made


def map_here(calls: Calls, export: Export, device: int, fetch: Callable[[int], int]) -> int:
    """Maps the allocations for kernels and copies of `device`, and returns the address here. `fetch` turns a descriptor
    number of the owner into a descriptor of this process.

    Raises what `fetch` raises, or `DriverError`; nothing stays mapped then.
    """

    def handle_of(place: int) -> int:
        exported = export.handles[place]
        if isinstance(exported, bytes):
            return calls.adopt(exported)
        descriptor = fetch(exported)
        try:
            return calls.adopt(descriptor)
        finally:
            os.close(descriptor)

    return virtual_memory.map_all(calls, device, export.sizes, handle_of)

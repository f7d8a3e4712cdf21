"""GPU memory of cuMemCreate: physical allocations, mapped at reserved addresses, that other processes can map too.

Torch's expandable segments are such memory: many allocations of 2 or 20 MiB, one behind the other. A node's own memory
is too, with `PDSTAGE_DEVICE_MEMORY`. An allocation is exported as a descriptor, or as a fabric handle: 64 bytes that
are valid in all processes of an IMEX domain. Its creation decides which of the two. Names, numbers and structures are
those of cuda.h (CUDA 13.0), where none of these functions has a second version.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, Protocol

from ..errors import UsageError
from . import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

DESCRIPTOR, FABRIC = 1, 8  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, _FABRIC: bits
_FABRIC_NBYTES = 64  # CU_IPC_HANDLE_SIZE
# CUdevice_attribute
_SUPPORTED, _HAS_DESCRIPTORS, _HAS_GPU_DIRECT, _HAS_FABRIC = 102, 103, 110, 128
_REFUSED = {800, 801}  # CUDA_ERROR_NOT_PERMITTED, _NOT_SUPPORTED: fabric handles of a process without an IMEX channel
_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_, _LOCATION_TYPE_, _ACCESS_FLAGS_PROT_
_RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
_U64, _SIZE, _INT = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
_NONE = _U64(0)  # of flags


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", _INT), ("handle_types", _INT), ("location_type", _INT), ("location", _INT),
        ("win32", ctypes.c_void_p), ("compression", ctypes.c_ubyte), ("gpu_direct", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 4),
    )  # fmt: skip


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location_type", _INT), ("location", _INT), ("flags", _INT))


class Calls(Protocol):
    """The functions of cuda.h, one by one; `VirtualMemory` implements them."""

    def retain(self, address: int) -> int:
        """A handle of the allocation mapped there; the caller releases it."""

    def export(self, handle: int, handle_type: int) -> int | bytes:
        """A descriptor, which the caller closes, or a fabric handle."""

    def adopt(self, exported: int | bytes) -> int:
        """A handle of what another process exported; the caller releases it, and still owns a descriptor."""

    def release(self, handle: int) -> None:
        """Existing mappings stay."""

    def reserve(self, nbytes: int) -> int: ...

    def free(self, address: int, nbytes: int) -> None: ...

    def map(self, address: int, nbytes: int, handle: int) -> None: ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmaps exactly what one `map` mapped."""

    def allow(self, address: int, nbytes: int, device: int) -> None:
        """Lets the device's kernels and copies read and write there."""


class VirtualMemory:
    """`Calls` of libcuda. They raise `DriverError`."""

    def __init__(self, library: driver.Cuda) -> None:
        self._library = library
        self._call = library.call

    def device(self) -> int:
        """The number of the calling thread's device."""
        found = _INT()
        self._call("cuCtxGetDevice", ctypes.byref(found))
        return found.value

    def properties(self, device: int) -> Properties:
        """The properties of memory with the most uses: for NICs, and for other processes by either handle.

        Raises `UsageError` if the device has no such memory.
        """
        has = self._library.device_attribute
        if not has(_SUPPORTED, device):
            raise UsageError(
                f"device {device} has no memory of cuMemCreate", remedy="set PDSTAGE_DEVICE_MEMORY=cudaMalloc"
            )
        handles = (DESCRIPTOR * bool(has(_HAS_DESCRIPTORS, device))) | (FABRIC * bool(has(_HAS_FABRIC, device)))
        gpu_direct = bool(has(_HAS_GPU_DIRECT, device))
        return Properties(_PINNED, handles, _ON_DEVICE, device, gpu_direct=gpu_direct)

    def granularity(self, properties: Properties) -> int:
        found = _SIZE()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(properties), _RECOMMENDED)
        return found.value

    def create(self, nbytes: int, properties: Properties) -> int:
        found = _U64()
        self._call("cuMemCreate", ctypes.byref(found), _SIZE(nbytes), ctypes.byref(properties), _NONE)
        return found.value

    def retain(self, address: int) -> int:
        found = _U64()
        self._call("cuMemRetainAllocationHandle", ctypes.byref(found), ctypes.c_void_p(address))
        return found.value

    def export(self, handle: int, handle_type: int) -> int | bytes:
        found = _INT(-1) if handle_type == DESCRIPTOR else ctypes.create_string_buffer(_FABRIC_NBYTES)
        self._call("cuMemExportToShareableHandle", ctypes.byref(found), _U64(handle), handle_type, _NONE)
        return found.value if isinstance(found, _INT) else found.raw

    def adopt(self, exported: int | bytes) -> int:
        found = _U64()
        if isinstance(exported, int):  # passed in place of the pointer
            what, handle_type = ctypes.c_void_p(exported), DESCRIPTOR
        else:
            held = ctypes.create_string_buffer(exported, _FABRIC_NBYTES)
            what, handle_type = ctypes.cast(held, ctypes.c_void_p), FABRIC
        self._call("cuMemImportFromShareableHandle", ctypes.byref(found), what, handle_type)
        return found.value

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", _U64(handle))

    def reserve(self, nbytes: int) -> int:
        found = _U64()
        self._call("cuMemAddressReserve", ctypes.byref(found), _SIZE(nbytes), _SIZE(0), _U64(0), _NONE)
        return found.value

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", _U64(address), _SIZE(nbytes))

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._call("cuMemMap", _U64(address), _SIZE(nbytes), _SIZE(0), _U64(handle), _NONE)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", _U64(address), _SIZE(nbytes))

    def allow(self, address: int, nbytes: int, device: int) -> None:
        access = Access(_ON_DEVICE, device, _READ_AND_WRITE)
        self._call("cuMemSetAccess", _U64(address), _SIZE(nbytes), ctypes.byref(access), _SIZE(1))


def allocate(library: driver.Library, nbytes: int) -> int:
    """Memory of the current device that is never freed: NICs write it, and other processes can map it.

    Raises `UsageError` if the device has none of this kind, `DriverError` if there is not enough.
    """
    if not isinstance(library, driver.Cuda):
        raise UsageError("memory of cuMemCreate is CUDA's", remedy="unset PDSTAGE_DEVICE_MEMORY")
    memory = VirtualMemory(library)
    device = memory.device()
    properties = memory.properties(device)
    unit = memory.granularity(properties)
    nbytes = -(-nbytes // unit) * unit
    return map_all(memory, device, [nbytes], lambda _: _create(memory, nbytes, properties))


def _create(memory: VirtualMemory, nbytes: int, properties: Properties) -> int:
    try:
        return memory.create(nbytes, properties)
    except driver.DriverError as error:
        if not properties.handle_types & FABRIC or error.status not in _REFUSED:
            raise
        log.warning("device memory has no fabric handles, for lack of an IMEX channel: %s", error.what)
        properties.handle_types &= ~FABRIC
        return memory.create(nbytes, properties)


def map_all(calls: Calls, device: int, sizes: Sequence[int], handle_of: Callable[[int], int]) -> int:
    """Maps allocations of `sizes` bytes, one behind the other, for one device. Returns the address of the first.

    `handle_of` returns the handle of each by its index in the list; it is released here. Raises what `handle_of`
    raises, or `DriverError`; then nothing stays mapped.
    """
    address = at = calls.reserve(sum(sizes))
    n_mapped = 0
    try:
        for place, nbytes in enumerate(sizes):
            handle = handle_of(place)
            try:
                calls.map(at, nbytes, handle)
            finally:
                calls.release(handle)
            n_mapped, at = n_mapped + 1, at + nbytes
        calls.allow(address, sum(sizes), device)
    except BaseException:
        _unmap(calls, address, sizes, n_mapped)
        raise
    return address


def unmap_all(calls: Calls, address: int, sizes: Sequence[int]) -> None:
    """Unmaps what `map_all` mapped; nothing may be using it."""
    _unmap(calls, address, sizes, len(sizes))


def _unmap(calls: Calls, address: int, sizes: Sequence[int], n_mapped: int) -> None:
    at = address
    for nbytes in sizes[:n_mapped]:
        calls.unmap(at, nbytes)
        at += nbytes
    calls.free(address, sum(sizes))

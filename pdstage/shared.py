"""Host memory that other processes of this host can map: an unnamed file (memfd_create(2)) that cannot shrink.

Mapped memory is never reused while a mapping is left. A peer that writes after the owner released it writes into pages
that nobody else has.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Backing(NamedTuple):
    """Where memory comes from: bytes `[offset, offset + nbytes)` of the file that is open here as `fd`."""

    fd: int
    inode: int
    offset: int
    nbytes: int


class _Held(NamedTuple):
    base: int
    nbytes: int
    fd: int
    inode: int


_held: dict[int, _Held] = {}


def allocate(nbytes: int) -> NDArray[np.uint8]:
    """`nbytes` of zeros, page-aligned; the file is closed with the array's last reference.

    Raises `OSError` if the system has no such files.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, "memfd_create exists on Linux only")
    fd = os.memfd_create("pdstage", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        held = mmap.mmap(fd, nbytes)
        inode = os.fstat(fd).st_ino
    except OSError:
        os.close(fd)
        raise
    memory = touched(held)
    base = memory.ctypes.data
    _held[base] = _Held(base, nbytes, fd, inode)
    weakref.finalize(memory, _let_go, base)  # not `held`: it is unmapped first, and other memory may lie there by then
    return memory


def touched(held: mmap.mmap) -> NDArray[np.uint8]:
    """`held` in huge pages where the kernel has them, all of it touched: first writes do not pay for the pages."""
    with contextlib.suppress(OSError):
        held.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(held, np.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return memory


def backing(base: int, nbytes: int) -> Backing | None:
    """The backing of `[base, base + nbytes)`, if it was allocated here."""
    for one in list(_held.values()):
        if one.base <= base and base + nbytes <= one.base + one.nbytes:
            return Backing(one.fd, one.inode, base - one.base, nbytes)
    return None


def attach(pid: int, described: Backing, *, at_once: bool = False) -> NDArray[np.uint8]:
    """Maps memory of process `pid` by the backing that it describes; unmapped with the array's last reference.

    `at_once`: all of its pages now; else a few at a time, as they are first written. Raises `OSError` if it is absent,
    of another kind, or not accessible. A file that its owner could shrink would crash this process, and a file with a
    name may be anybody's.
    """
    path = Path(f"/proc/{pid}/fd/{described.fd}")
    strange = FileNotFoundError(f"{path} is not the memory described")
    if not _is_its(path.stat(), described):  # before opening: opening some files has side effects
        raise strange
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        if not _is_its(os.fstat(fd), described) or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise strange
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if at_once else 0)
        whole = mmap.mmap(fd, described.offset + described.nbytes, flags=flags)
    finally:
        os.close(fd)
    return np.frombuffer(whole, np.uint8)[described.offset :]


def _is_its(found: os.stat_result, described: Backing) -> bool:
    """Whether no directory holds it (so that a later name makes no difference), and its size is as described."""
    same = found.st_ino == described.inode and found.st_nlink == 0
    return same and 0 <= described.offset < described.offset + described.nbytes <= found.st_size


def _let_go(base: int) -> None:
    os.close(_held.pop(base).fd)

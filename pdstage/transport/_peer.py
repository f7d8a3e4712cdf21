"""The processes that a transport meets: their identity, whether they live, and writes into the memory of those here.

Shared memory of another process of this host is mapped; its other memory is written by process id.

A pid alone identifies no process, since the kernel reuses it. A process is a pid with its start time. Once identified
it is held by a pidfd, which turns readable when that very process ends (pidfd_open(2)).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import select
import time
import weakref
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta

from pdstage import native, shared
from pdstage.errors import PeerError, TransportError, UsageError
from pdstage.transport.base import Mapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from pdstage.layout import Region
    from pdstage.plan.spans import Spans
    from pdstage.shared import Backing
    from pdstage.transport.base import Ints

log = logging.getLogger(__name__)

_AT_ONCE_NBYTES = 1 << 30
_PR_SET_PTRACER = 0x59616D61
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_PIDFD_GETFD = 438  # of Linux 5.6; the same on all its processors
_NO_PROCESS = {errno.ESRCH, errno.EINVAL, errno.ENOENT}  # the last two: a thread has its number by now
_NAMESPACES = ("pid", "user", "net")  # in which a pid, a uid and an abstract socket name mean the same thing


class Identity(msgspec.Struct, frozen=True):
    """One process in one boot of one host. Two are equal only if they are the very same process."""

    boot_id: Annotated[str, Meta(max_length=64)]
    namespaces: Annotated[dict[str, Annotated[str, Meta(max_length=64)]], Meta(max_length=8)]
    pid: Annotated[int, Meta(gt=0, lt=1 << 31)]
    started: Annotated[int, Meta(ge=0)]  # clock ticks after boot

    def check_reachable_from(self, here: Identity, peer: str) -> None:
        """Raises `PeerError` if `here` cannot write to this process."""
        if self.boot_id != here.boot_id:
            raise PeerError(
                f"peer {peer!r} runs on another host", remedy="use a transport that crosses hosts", boot_id=self.boot_id
            )
        apart = [name for name in _NAMESPACES if self.namespaces.get(name) != here.namespaces[name]]
        if apart:
            raise PeerError(
                f"peer {peer!r} runs in another container (another {' and '.join(apart)} namespace)",
                remedy=f"share the {' and '.join(apart)} namespace, or use another transport",
                namespaces=apart,
            )


def own_identity() -> Identity:
    """Raises `UsageError` without a Linux /proc."""
    try:
        return Identity(
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            {name: str(Path(f"/proc/self/ns/{name}").readlink()) for name in _NAMESPACES},
            os.getpid(),
            _started(os.getpid()),
        )
    except OSError as error:
        raise UsageError(f"cannot identify this process: {error}", remedy="mount /proc of a Linux host") from error


class Target:
    """One process, or a stand-in for one. By itself: one that runs elsewhere, where its end is never known."""

    def gone(self) -> bool:
        """Whether it has ended, which is final."""
        return False

    def close(self) -> None:
        """It is not asked about any more."""


class Process(Target):
    """Another process, held so that a successor with its pid is never taken for it, and its shared memory that is
    mapped here.
    """

    def __init__(self, identity: Identity, peer: str) -> None:
        """Raises `TransportError` if the process has ended, and `OSError` if that cannot be told."""
        self.pid, self._peer = identity.pid, peer
        self._views: list[tuple[int, NDArray[np.uint8]]] = []
        try:
            self._pidfd = os.pidfd_open(identity.pid)
        except OSError as error:
            if error.errno not in _NO_PROCESS:
                raise
            raise self._gone() from error
        self._ended = select.poll()
        self._ended.register(self._pidfd, select.POLLIN)
        try:  # the pidfd is seen alive after the start time is read, so both belong to one process
            same = _started(identity.pid) == identity.started and not self.gone()
        except OSError:
            same = False
            if not self.gone():  # it cannot be looked at
                self.close()
                raise
        if not same:
            self.close()
            raise self._gone()

    def check_holds(self, inbox: str) -> None:
        """Raises `PeerError` unless this process holds the abstract socket `inbox`, or `TransportError` if it has
        ended.

        A description can name any process, also one that never offered its memory. Only the kernel says who holds a
        socket.
        """
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
        sockets = {f"socket:[{line.split()[6]}]" for line in lines if line.endswith(f" @{inbox}")}
        if not any(held in sockets for held in _open_files(self.pid)):
            if self.gone():
                raise self._gone()
            raise PeerError(
                f"process {self.pid} of peer {self._peer!r} does not hold the socket its description names",
                remedy="run both processes as one user; else stop using that peer",
                pid=self.pid,
            )

    def gone(self) -> bool:
        if self._pidfd >= 0 and (
            native.ext.is_readable(self._pidfd) if native.ext is not None else self._ended.poll(0)
        ):
            self.close()
        return self._pidfd < 0

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def unmap(self) -> None:
        """Releases the mappings, except those that `mapped` has handed out."""
        self._views = []

    def map(self, backings: Iterable[tuple[int, Backing]], regions: Iterable[Region]) -> None:
        """Maps the shareable ones of `regions` instead of the previous ones; `backings`: base and backing file.

        All of their pages, up to `_AT_ONCE_NBYTES`: the other rooms of a node wait meanwhile.
        """
        self._views, left = [], _AT_ONCE_NBYTES
        for base, backing in backings:
            if not any(base <= region.base < base + backing.nbytes for region in regions):
                continue
            try:
                at_once = backing.nbytes <= left
                self._views.append((base, shared.attach(self.pid, backing, at_once=at_once)))
                left -= backing.nbytes if at_once else 0
            except OSError as error:  # it is then written as unshared memory
                log.info("memory of process %s is not mapped: %s", self.pid, error)

    def mapped(self, address: int, nbytes: int) -> Mapped | None:
        for base, view in self._views:
            if base <= address and address + nbytes <= base + view.nbytes:
                return Mapped(view.ctypes.data + address - base, view)
        return None

    def write(self, spans: Spans) -> tuple[int, TransportError | None]:
        """Writes the spans in order. Returns the bytes that landed, and the error that stopped it."""
        if self._views and len(spans.nbytes) == 1:
            here = self.mapped(int(spans.dst[0]), int(spans.nbytes[0]))
            if here is not None:
                copy(spans._replace(dst=np.array([here.address], np.int64)))
                return int(spans.nbytes[0]), None
        write = native.ext.write_peer if native.ext is not None else _write_peer
        written, code = write(self.pid, *spans)
        if self.gone():  # if it ended during the call, only that matters
            return written, self._gone()
        return written, self._reason(code) if code else None

    def why_not_written(self, address: int) -> TransportError | None:
        """Why this process may not write there. None if it may, or if only `write` can tell. Reads one byte."""
        byte = np.empty(1, np.uint8)
        local, remote = (np.array([at, 1], np.uint64) for at in (byte.ctypes.data, address))
        if _libc().process_vm_readv(self.pid, local.ctypes.data, 1, remote.ctypes.data, 1, 0) == 1:
            return None
        code = ctypes.get_errno()
        return self._reason(code) if code in (errno.EPERM, errno.ENOSYS) else None

    def descriptor(self, number: int) -> int:
        """That process's open file `number` as a new descriptor of this process (pidfd_getfd(2)); the caller closes it.

        Raises `TransportError`.
        """
        descriptor = _libc().syscall(*map(ctypes.c_long, (_PIDFD_GETFD, self._pidfd, number, 0)))
        if descriptor >= 0:
            return int(descriptor)
        code = ctypes.get_errno()
        if self.gone():
            raise self._gone()
        raise self._failed(
            f"taking over descriptor {number} of process {self.pid} of peer {self._peer!r}",
            code,
            "pidfd_getfd",
            "reconnect with new descriptions of both sides",
        )

    def _gone(self) -> TransportError:
        return TransportError(
            f"process {self.pid} of peer {self._peer!r} has ended",
            remedy="fail its rooms; it may connect again",
            pid=self.pid,
        )

    def _reason(self, code: int) -> TransportError:
        what = f"writing to process {self.pid} of peer {self._peer!r}"
        return self._failed(
            what, code, "process_vm_writev", "the peer freed memory before its sessions were quiet; fail its rooms"
        )

    def _failed(self, what: str, code: int, call: str, remedy: str) -> TransportError:
        if code == errno.EPERM:
            scope = _PTRACE_SCOPE.read_text().strip() if _PTRACE_SCOPE.exists() else "absent"
            remedy = (
                f"run both processes as one user; {_PTRACE_SCOPE} (now {scope}) must be 0 or 1; in a container add the "
                "capability SYS_PTRACE, or use another transport"
            )
        elif code == errno.ENOSYS:
            remedy = f"allow {call} in the container's seccomp profile, or use another transport"
        elif code == errno.EMFILE:
            remedy = "let this process open more files (ulimit -n)"
        name = errno.errorcode.get(code, str(code))
        return TransportError(f"{what}: {os.strerror(code)} ({name})", remedy=remedy, pid=self.pid, errno=code)


class Here(Target):
    """A transport of this process. Its life ends with its `close`, which removes it from `lives`."""

    lives: ClassVar[weakref.WeakValueDictionary[str, Any]] = weakref.WeakValueDictionary()

    def __init__(self, life: str) -> None:
        self._life = life

    def gone(self) -> bool:
        return self._life not in self.lives

    def write(self, spans: Spans) -> tuple[int, TransportError | None]:
        error = self.why_not(spans)
        if error is not None:
            return 0, error
        copy(spans)
        return int(spans.nbytes.sum()), None

    def why_not(self, spans: Spans) -> TransportError | None:
        """Checks the spans: a stray write into another process fails safely, but here it would crash this process."""
        try:
            self.lives[self._life].own.find(spans.dst, spans.nbytes)
        except UsageError as error:
            return TransportError(str(error), remedy="the peer unregistered memory that was still being written")
        return None

    def unmap(self) -> None:
        pass

    def mapped(self, address: int, nbytes: int) -> Mapped | None:
        transport = self.lives.get(self._life)
        return Mapped(address, None) if transport is not None and transport.own.holds(address, nbytes) else None


class Met:
    """The processes identified as each peer, to tell when all of them have ended."""

    def __init__(self) -> None:
        self._met: dict[str, list[Target]] = {}
        self._gone_at: dict[str, float] = {}

    def add(self, peer: str, target: Target | None) -> None:
        """None: a process that had ended already."""
        self._gone_at.pop(peer, None)
        every = (*self._met.get(peer, ()), target)
        self._met[peer] = [one for one in every if one is not None and not one.gone()]

    def gone_at(self, peer: str) -> float | None:
        """When all were first found to have ended (monotonic); None if one lives, or none was ever identified."""
        if peer not in self._met or not all(target.gone() for target in self._met[peer]):
            return None
        return self._gone_at.setdefault(peer, time.monotonic())

    def forget(self, peer: str) -> None:
        self._gone_at.pop(peer, None)
        for target in self._met.pop(peer, ()):
            target.close()

    def close(self) -> None:
        for peer in list(self._met):
            self.forget(peer)


def under_mps() -> bool:
    """Whether this process's work runs in the server of CUDA's Multi-Process Service, which may outlive the process."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return Path(pipes, "control").exists()


def allow_writers() -> None:
    """Lets other processes of this user write here under Yama's ptrace_scope 1; has no effect otherwise."""
    _libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)


def copy(spans: Spans) -> None:
    """Copies spans within this process."""
    if native.ext is not None:
        native.ext.copy_spans(*spans)
        return
    for src, dst, nbytes in zip(*map(np.ndarray.tolist, spans), strict=True):
        ctypes.memmove(dst, src, nbytes)


def _open_files(pid: int) -> Iterator[str]:
    """The targets of a process's descriptors; empty if this process may not look."""
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                yield str(entry.readlink())


def _started(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    after_name = stat[stat.rindex(")") + 2 :]  # the name may hold anything
    return int(after_name.split()[19])  # field 22 of proc_pid_stat(5)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, number = ctypes.c_void_p, ctypes.c_ulong
    for call in (libc.process_vm_readv, libc.process_vm_writev):
        call.restype = ctypes.c_ssize_t
        call.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
    libc.syscall.restype = ctypes.c_long
    return libc


def _write_peer(pid: int, src: Ints, dst: Ints, nbytes: Ints) -> tuple[int, int]:
    """The same as csrc/host/peer_memory.hpp, without the extension: a call for each span. Returns the bytes landed, and
    the errno or 0.
    """
    written = 0
    for at, to, left in zip(src.tolist(), dst.tolist(), nbytes.tolist(), strict=True):
        done = 0
        while done < left:
            local, remote = (np.array([base + done, left - done], np.uint64) for base in (at, to))
            copied = _libc().process_vm_writev(pid, local.ctypes.data, 1, remote.ctypes.data, 1, 0)
            code = ctypes.get_errno() if copied < 0 else 0 if copied else errno.EFAULT
            if code not in (0, errno.EINTR):
                return written, code
            done += max(copied, 0)
            written += max(copied, 0)
    return written, 0

"""A double of CUDA for transport `local`: the calls of `cupy.cuda.runtime` and of the driver that _cuda_ipc.py makes.

A GPU cannot be here, so its memory is host memory that processes share, and a copy in a stream runs when somebody asks
for an event behind it: later than it was put there, from the source as it is then. The documented rules of CUDA IPC
hold: who breaks one gets `Broken`, where the real one would corrupt memory or may refuse; what the real one refuses
raises `CUDARuntimeError`, with its number. There is nothing to synchronise with: who wants to wait finds no call.

Memory of cuMemCreate is a file as well; what maps it is at an address that was reserved, in the place of what is there.

It proves that the rules are kept as the documents say; it cannot prove that CUDA does what they say.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import threading
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pdstage.kernels import driver, virtual_memory
from pdstage.transport import _cuda_ipc
from pdstage.transport.local import LocalTransport

N_DEVICES = 2
MALLOC, VIRTUAL, MANAGED, POOL = range(4)
_HANDLE = "<iiQQ"  # pid, descriptor, inode, bytes


class Broken(AssertionError):
    """A rule of CUDA was broken."""


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"cudaError {status}")
        self.status = status


def rule(holds, what):
    if not holds:
        raise Broken(what)


class Memory:
    """An allocation, or another process's as it is mapped here."""

    def __init__(self, fd, nbytes, device, how=MALLOC):
        self.fd, self.nbytes, self.device, self.how = fd, nbytes, device, how
        self.view = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        self.address = self.view.ctypes.data
        self.imported = False


class Reserved:
    """Addresses, and what is mapped there: bytes and handle by address. It is memory once all of it is mapped."""

    how = VIRTUAL
    handle = opener = None  # of cudaIpcOpenMemHandle it is none

    def __init__(self, address, nbytes, device):
        self.address, self.nbytes, self.device = address, nbytes, device
        self.mappings = {}
        self.allowed = set()
        self.imported = False

    @property
    def view(self):
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))


class Allocation(NamedTuple):
    """Of cuMemCreate, by its file; `types` are those that it may be exported as."""

    fd: int
    nbytes: int
    device: int
    types: int
    imported: bool = False


class Stream:
    def __init__(self, device):
        self.device = device
        self.work = deque()


class Runtime:
    """`cupy.cuda.runtime` of one process that sees physical GPUs `visible`; `apart`: none can access another."""

    CUDARuntimeError = CUDARuntimeError
    streamNonBlocking, eventDisableTiming = 1, 2  # noqa: N815  (CuPy's names)
    memcpyDefault, cudaIpcMemLazyEnablePeerAccess = 4, 1  # noqa: N815

    def __init__(self, visible=range(N_DEVICES), apart=False):
        self.visible, self.apart = list(visible), apart
        self.held = False  # streams stand still
        self.broken = 0  # the status that a failed device gives to everything
        self.contexts = set()
        self.memory = {}
        self.handles = {}  # of allocations of cuMemCreate
        self.reserved = {}
        self.calls = Counter()  # of the functions for memory of cuMemCreate
        self.fails_at = None  # such a call, by its name and number: refused with 304
        self.given_up = set()
        self.streams, self.events = {}, {}
        self.enabled = set()
        self.batches = True  # whether its driver has cuMemcpyBatchAsync
        self.refused = 0  # the status that the driver gives to a batch of which it began the first copy
        self.n_batches = 0
        self.n_copies_of = Counter()  # by the address of the memory that was read
        self._number = iter(range(1, 1 << 40))
        self.thread = threading.local()  # its device, and its stream capture mode

    # What tests use.

    def allocate(self, nbytes, device=0, how=MALLOC):
        """Its memory, by whichever call it is to be made."""
        for address in [*self.given_up]:
            if not self._is_used(self.memory[address]):
                self.given_up.remove(address)
                self.free(address)
        fd = os.memfd_create("cuda-double", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        memory = Memory(fd, nbytes, device, how)
        self.memory[memory.address] = memory
        return memory

    def expandable(self, sizes, types=virtual_memory.DESCRIPTOR, device=0):
        """As torch's expandable segments: allocations of `sizes` bytes, mapped one behind the other."""
        calls = Virtual(self)
        address = virtual_memory.map_all(calls, device, sizes, lambda place: calls.create(sizes[place], types, device))
        return self.memory[address]

    def free(self, address):
        memory = self.memory[address]
        rule(not memory.imported, "freed what another process allocated")
        if isinstance(memory, Reserved):  # those who have it mapped keep it
            sizes = [one.nbytes for _, one in sorted(memory.mappings.items())]
            virtual_memory.unmap_all(Virtual(self), address, sizes)
            return
        rule(not is_open_elsewhere(memory), "exported memory was freed while another process has it open")
        del self.memory[address]
        os.close(memory.fd)

    def give_up(self, address):
        """To be freed once nobody has it open and no copy of this process needs it."""
        self.given_up.add(address)

    def _is_used(self, memory):
        elsewhere = isinstance(memory, Memory) and is_open_elsewhere(memory)
        work = [work for stream in self.streams.values() for work in stream.work if not isinstance(work, int)]
        return elsewhere or any(memory in (self.of(dst), self.of(src)) for dst, src, _ in work)

    def of(self, address, nbytes=1):
        """The memory that holds all these bytes, or None."""
        return next(
            (m for m in self.memory.values() if m.address <= address and address + nbytes <= m.address + m.nbytes), None
        )

    def reserved_at(self, address, nbytes):
        found = [
            one
            for one in self.reserved.values()
            if one.address <= address < address + nbytes <= one.address + one.nbytes
        ]
        rule(found, f"{nbytes} bytes at {address:#x}: not reserved")
        return found[0]

    def _check_mode(self):
        """Of calls that CUDA forbids a thread, and that break a recording, while another thread records a graph."""
        rule(getattr(self.thread, "mode", 0) == driver.RELAXED, "a call that breaks another thread's recording")

    def n_open(self):
        return sum(memory.imported for memory in self.memory.values())

    # What CuPy has.

    def getDeviceCount(self):  # noqa: N802  (CuPy's names)
        return len(self.visible)

    def getDevice(self):  # noqa: N802
        return getattr(self.thread, "device", 0)

    def setDevice(self, device):  # noqa: N802
        rule(type(device) is int, f"device {device!r}")
        if not 0 <= device < len(self.visible):
            raise CUDARuntimeError(101)
        self.contexts.add(device)  # since CUDA 12 that makes the context
        self.thread.device = device

    def deviceCanAccessPeer(self, device, peer):  # noqa: N802
        rule(device != peer, "a device is asked for access to itself: the answer is no")
        return 0 if self.apart else 1

    def deviceEnablePeerAccess(self, peer):  # noqa: N802
        self._check_mode()
        if self.apart:
            raise CUDARuntimeError(217)
        if (self.getDevice(), peer) in self.enabled:
            raise CUDARuntimeError(704)
        self.enabled.add((self.getDevice(), peer))

    def ipcGetMemHandle(self, address):  # noqa: N802
        memory = self.memory.get(address)
        rule(memory is not None, "a handle is taken of an allocation's base")
        rule(not memory.imported, "a handle is taken of memory that another process exported")
        if memory.how != MALLOC:
            raise CUDARuntimeError(1)
        packed = struct.pack(_HANDLE, os.getpid(), memory.fd, os.fstat(memory.fd).st_ino, memory.nbytes)
        return (packed + bytes([memory.device])).ljust(64, b"\0")

    def ipcOpenMemHandle(self, handle, flags):  # noqa: N802
        self._check_mode()
        rule(type(handle) is bytes and len(handle) == 64, "a handle is 64 bytes")
        rule(flags == self.cudaIpcMemLazyEnablePeerAccess, "the one flag there is must be given")
        pid, number, inode, nbytes = struct.unpack_from(_HANDLE, handle)
        rule(pid != os.getpid(), "a process opens a handle of its own")
        already = [m for m in self.memory.values() if m.imported and (m.handle, m.opener) == (handle, self.getDevice())]
        rule(not already, "a handle is opened a second time")
        device = handle[struct.calcsize(_HANDLE)]
        if self.apart and self.visible[self.getDevice()] != device:
            raise CUDARuntimeError(217)
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            raise CUDARuntimeError(400) from None  # its owner has ended, or freed it
        if os.fstat(fd).st_ino != inode:
            os.close(fd)
            raise CUDARuntimeError(400)
        fcntl.flock(fd, fcntl.LOCK_SH)
        memory = Memory(fd, nbytes, device)
        memory.imported, memory.handle, memory.opener = True, handle, self.getDevice()
        self.memory[memory.address] = memory
        return memory.address

    def ipcCloseMemHandle(self, address):  # noqa: N802
        self._check_mode()
        memory = self.memory.get(address)
        rule(memory is not None and memory.imported, "only what was opened is closed, by its base")
        rule(memory.opener == self.getDevice(), "closed in another context than it was opened in")
        for stream in self.streams.values():
            for work in stream.work:
                rule(isinstance(work, int) or self.of(work[0]) is not memory, "closed while a copy writes it")
        del self.memory[address]
        os.close(memory.fd)

    def streamCreateWithFlags(self, flags):  # noqa: N802
        self._check_mode()
        rule(flags == self.streamNonBlocking, "a stream that waits for the default one")
        return self._new(self.streams, Stream(self.getDevice()))

    def eventCreateWithFlags(self, flags):  # noqa: N802
        rule(flags == self.eventDisableTiming, "an event that takes the time")
        return self._new(self.events, [self.getDevice(), 0, 0])  # device, the stream, records to come

    def _new(self, among, thing):
        self._check()
        number = next(self._number)
        among[number] = thing
        return number

    def streamDestroy(self, stream):  # noqa: N802
        self._check_mode()
        rule(not self.streams.pop(stream).work, "a stream is given back with work in it")

    def eventDestroy(self, event):  # noqa: N802
        self._check_mode()
        del self.events[event]

    def memcpyAsync(self, dst, src, nbytes, kind, stream):  # noqa: N802
        self._check()
        rule(all(type(value) is int for value in (dst, src, nbytes, kind, stream)), "arguments are integers")
        rule(kind == self.memcpyDefault, "the driver is not to be told where memory lies")
        to, of = self.of(dst, nbytes), self.of(src, nbytes)
        rule(to is not None, f"{nbytes} bytes to {dst:#x}: not device memory")
        rule(of is not None and not of.imported, f"{nbytes} bytes from {src:#x}: not this process's device memory")
        self.streams[stream].work.append((dst, src, nbytes))

    def eventRecord(self, event, stream):  # noqa: N802
        self._check()
        rule(
            self.events[event][0] == self.streams[stream].device == self.getDevice(), "event and stream of two devices"
        )
        self.events[event][1] = stream
        self.events[event][2] += 1
        self.streams[stream].work.append(event)

    def eventQuery(self, event):  # noqa: N802
        """As it was before the question, which moves the stream on."""
        self._check_mode()
        if self.broken:
            return self.broken
        _, stream, coming = self.events[event]
        if coming and not self.held:
            self._run(self.streams[stream])
        return 600 if coming else 0

    def _run(self, stream, most=1024):
        while stream.work and most:
            work, most = stream.work.popleft(), most - 1
            if isinstance(work, int):
                self.events[work][2] -= 1
                return
            rule(self.of(work[0], work[2]) and self.of(work[1], work[2]), "a copy of memory that is gone")
            ctypes.memmove(*work)
            self.n_copies_of[self.of(work[1]).address] += 1

    def check_status(self, status):
        if status:
            raise CUDARuntimeError(status)

    def _check(self):
        self.check_status(self.broken)


class Virtual:
    """What `pdstage.kernels.virtual_memory.VirtualMemory` is, over the same memory. Fabric handles name a file."""

    def __init__(self, runtime):
        self._runtime = runtime

    def _called(self, name):
        runtime = self._runtime
        runtime.calls[name] += 1
        if runtime.fails_at == (name, runtime.calls[name]):
            raise driver.DriverError(name, 304)

    def _handle(self, allocation):
        return self._runtime._new(self._runtime.handles, allocation)

    def create(self, nbytes, types, device):
        self._called("create")
        fd = os.memfd_create("cuda-double", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return self._handle(Allocation(fd, nbytes, device, types))

    def retain(self, address):
        self._called("retain")
        memory = self._runtime.of(address)
        rule(isinstance(memory, Reserved), "a handle is retained of what is no memory of cuMemCreate")
        (mapped,) = [one for at, one in memory.mappings.items() if at <= address < at + one.nbytes]
        return self._handle(mapped._replace(fd=os.dup(mapped.fd)))

    def release(self, handle):
        self._called("release")
        os.close(self._runtime.handles.pop(handle).fd)

    def export(self, handle, handle_type):
        self._called("export")
        allocation = self._runtime.handles[handle]
        rule(allocation.types & handle_type, "exported as what it was not made for")
        if handle_type == virtual_memory.FABRIC:
            stat = os.fstat(allocation.fd)
            held = os.dup(allocation.fd)  # for good: the memory's owner keeps it alive
            packed = struct.pack(_HANDLE, os.getpid(), held, stat.st_ino, stat.st_size)
            return packed.ljust(64, b"\0")
        return os.dup(allocation.fd)

    def adopt(self, exported):
        self._called("adopt")
        if isinstance(exported, bytes):
            pid, number, _, _ = struct.unpack_from(_HANDLE, exported)
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        else:
            fd = os.dup(exported)
        if not str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("/memfd:cuda-double"):
            os.close(fd)
            raise driver.DriverError("cuMemImportFromShareableHandle", 1)
        return self._handle(Allocation(fd, os.fstat(fd).st_size, 0, 0, imported=True))

    def reserve(self, nbytes):
        self._called("reserve")
        address = _mmap(0, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        self._runtime.reserved[address] = Reserved(address, nbytes, 0)
        return address

    def free(self, address, nbytes):
        self._called("free")
        reserved = self._runtime.reserved.pop(address)
        rule(reserved.nbytes == nbytes, "not all that was reserved is freed")
        rule(not reserved.mappings, "addresses are freed that are mapped")
        _LIBC.munmap(address, nbytes)

    def map(self, address, nbytes, handle):
        self._called("map")
        runtime, allocation = self._runtime, self._runtime.handles[handle]
        reserved = runtime.reserved_at(address, nbytes)
        taken = (at < address + nbytes and address < at + one.nbytes for at, one in reserved.mappings.items())
        rule(not any(taken), "mapped where something is mapped")
        if nbytes > allocation.nbytes:
            raise driver.DriverError("cuMemMap", 1)
        _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, allocation.fd)
        reserved.mappings[address] = allocation._replace(fd=os.dup(allocation.fd), nbytes=nbytes)
        reserved.imported, reserved.device = allocation.imported, allocation.device

    def unmap(self, address, nbytes):
        self._called("unmap")
        runtime = self._runtime
        reserved = runtime.reserved_at(address, nbytes)
        mapped = reserved.mappings.pop(address, None)
        rule(mapped is not None and mapped.nbytes == nbytes, "unmapped is what one call mapped")
        for stream in runtime.streams.values():
            for work in stream.work:
                rule(isinstance(work, int) or runtime.of(work[0]) is not reserved, "unmapped while a copy writes it")
        runtime.memory.pop(reserved.address, None)
        _mmap(address, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1)
        os.close(mapped.fd)

    def allow(self, address, nbytes, device):
        self._called("allow")
        runtime = self._runtime
        reserved = runtime.reserved_at(address, nbytes)
        held = sum(one.nbytes for at, one in reserved.mappings.items() if address <= at < address + nbytes)
        rule(held == nbytes, "access to what is not all mapped")
        if runtime.apart and device != reserved.device:
            raise driver.DriverError("cuMemSetAccess", 801)
        reserved.allowed.add(device)
        runtime.memory[reserved.address] = reserved


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED = 0x10  # MAP_FIXED


def _mmap(address, nbytes, protection, flags, fd):
    mapped = _LIBC.mmap(address, nbytes, protection, flags, fd, 0)
    if mapped == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return mapped


class Driver:
    """What `pdstage.kernels.driver.Cuda` is, over the same memory."""

    def __init__(self, runtime):
        self._runtime = runtime

    def attribute(self, which, address):
        memory = self._runtime.of(address)
        if memory is None:
            return 0
        ordinals = self._runtime.visible
        return {
            driver.IS_MANAGED: int(memory.how == MANAGED),
            driver.MEMPOOL: int(memory.how == POOL),
            driver.IPC_CAPABLE: int(memory.how == MALLOC),
            driver.ORDINAL: ordinals.index(memory.device) if memory.device in ordinals else 0,
            driver.RANGE_START: memory.address,
            driver.RANGE_NBYTES: memory.nbytes,
            driver.HANDLE_TYPES: getattr(self._mapped(memory, address)[1], "types", 0),
        }[which]

    def mapping(self, address):
        memory = self._runtime.of(address)
        start, mapped = self._mapped(memory, address) if memory is not None else (0, None)
        return start, mapped.nbytes if mapped is not None else 0

    def _mapped(self, memory, address):
        if not isinstance(memory, Reserved):
            return memory.address, memory
        return next(one for one in memory.mappings.items() if one[0] <= address < one[0] + one[1].nbytes)

    @property
    def has_batches(self):
        return self._runtime.batches

    def copy_batch(self, spans, stream):
        """In no order, and with a NULL stream not at all."""
        runtime = self._runtime
        runtime.n_batches += 1
        if runtime.broken:
            return runtime.broken
        rule(runtime.streams[stream].device == runtime.getDevice(), "a batch in another device's stream")
        columns = [column.tolist() for column in (spans.dst, spans.src, spans.nbytes)]
        for dst, src, nbytes in [*zip(*columns, strict=True)][:: 1 if runtime.refused else -1]:
            rule(nbytes > 0, "a copy of no bytes")
            runtime.memcpyAsync(dst, src, nbytes, runtime.memcpyDefault, stream)
            if runtime.refused:
                break
        return runtime.refused

    def uuid(self, device):
        return b"double-of-GPU" + bytes([0, 0, self._runtime.visible[device]])

    def in_use(self, device):
        return device in self._runtime.contexts

    def capture_mode(self, mode):
        thread = self._runtime.thread
        before, thread.mode = getattr(thread, "mode", 0), mode
        return before


def cuda_of(runtime):
    return _cuda_ipc.Cuda(runtime, Driver(runtime), Virtual(runtime))


RUNTIME = Runtime(
    [int(device) for device in os.environ.get("CUDA_DOUBLE_VISIBLE", "0,1").split(",")],
    apart=bool(os.environ.get("CUDA_DOUBLE_APART")),
)
CUDA = cuda_of(RUNTIME)


class LocalDouble(LocalTransport):
    """`local`, on a machine with the double's GPUs."""

    traits = replace(LocalTransport.traits, name="local-double")
    preference = 0
    _has_cuda = staticmethod(lambda: True)
    _load_cuda = staticmethod(lambda: CUDA)


TRANSPORT = LocalDouble


def is_open_elsewhere(memory):
    """Whether any other process has it open."""
    fd = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False

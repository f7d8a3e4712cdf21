"""A double of CUDA for transport `local`: the calls of `cupy.cuda.runtime` and of the driver that _cuda_ipc.py makes.

A GPU cannot be here, so its memory is host memory that processes share, and a copy in a stream runs when somebody asks
for an event behind it: later than it was put there, from the source as it is then. The documented rules of CUDA IPC
hold: who breaks one gets `Broken`, where the real one would corrupt memory or may refuse; what the real one refuses
raises `CUDARuntimeError`, with its number. There is nothing to synchronise with: who wants to wait finds no call.

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

import numpy as np

from pdstage.kernels import driver
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

    def free(self, address):
        memory = self.memory[address]
        rule(not memory.imported, "freed what another process allocated")
        rule(not is_open_elsewhere(memory), "exported memory was freed while another process has it open")
        del self.memory[address]
        os.close(memory.fd)

    def give_up(self, address):
        """To be freed once nobody has it open and no copy of this process needs it."""
        self.given_up.add(address)

    def _is_used(self, memory):
        work = [work for stream in self.streams.values() for work in stream.work if not isinstance(work, int)]
        return is_open_elsewhere(memory) or any(memory in (self.of(dst), self.of(src)) for dst, src, _ in work)

    def of(self, address, nbytes=1):
        """The memory that holds all these bytes, or None."""
        return next(
            (m for m in self.memory.values() if m.address <= address and address + nbytes <= m.address + m.nbytes), None
        )

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
        }[which]

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
    return _cuda_ipc.Cuda(runtime, Driver(runtime))


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

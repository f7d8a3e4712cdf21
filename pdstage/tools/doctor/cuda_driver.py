"""The CUDA driver, called directly by ctypes: version, devices, access between devices' memory, and CUDA IPC.

Needs no CUDA package; the functions and constants are those of cuda.h (CUDA Driver API).
"""

from __future__ import annotations

import ctypes
import os
import secrets
from multiprocessing import Pipe
from typing import TYPE_CHECKING

from pdstage.errors import TransportError, UsageError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from pdstage.tools.doctor.probes import Say

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_NBYTES = 2 << 20
_WAIT_S = 30.0


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class Driver:
    """libcuda.so.1; every failure is an error with its name."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UsageError(
                f"no CUDA driver here ({error})",
                remedy="install NVIDIA's driver, or give the container the GPUs (docker run --gpus all)",
            ) from error

    def call(self, name: str, *args: object) -> None:
        code = getattr(self._library, name)(*args)
        if code:
            said = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(said))
            what = (said.value or b"unknown error").decode()
            raise TransportError(
                f"{name}: {what} ({code})",
                remedy="see nvidia-smi and dmesg: driver and kernel module must be one release",
            )

    def number(self, name: str, *args: object) -> int:
        """The int that a function writes to its first argument."""
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *args)
        return value.value


def driver(say: Say) -> None:
    """Reports "version" as in cuda.h (13000 is 13.0), "devices", and "peers": which devices may access which memory."""
    say.step("load")
    cuda = Driver()
    say.step("cuInit")
    cuda.call("cuInit", 0)
    say.found(version=cuda.number("cuDriverGetVersion"))
    say.step("devices")
    handles = [cuda.number("cuDeviceGet", i) for i in range(cuda.number("cuDeviceGetCount"))]
    say.found(devices=[_device(cuda, handle) for handle in handles])
    say.step("peer access")
    say.found(
        peers=[
            [one == other or bool(cuda.number("cuDeviceCanAccessPeer", one, other)) for other in handles]
            for one in handles
        ]
    )


def _device(cuda: Driver, handle: int) -> dict[str, object]:
    name, nbytes = ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.call("cuDeviceGetName", name, len(name), handle)
    cuda.call("cuDeviceTotalMem_v2", ctypes.byref(nbytes), handle)
    major, minor = (cuda.number("cuDeviceGetAttribute", one, handle) for one in (_MAJOR, _MINOR))
    address = ctypes.create_string_buffer(32)
    cuda.call("cuDeviceGetPCIBusId", address, len(address), handle)
    return {
        "name": name.value.decode(errors="replace"), "nbytes": nbytes.value, "capability": f"{major}.{minor}",
        "address": address.value.decode(),
    }  # fmt: skip


def ipc(say: Say, *, device: int) -> None:
    """Reads memory of one process in another through an IPC handle, and compares."""
    ours, theirs = Pipe()
    pid = os.fork()  # before the driver is loaded: it does not survive a fork
    if not pid:
        ours.close()
        _lend(theirs, device)
        raise SystemExit
    theirs.close()
    say.step("start")
    cuda = _start(device)
    if not ours.poll(_WAIT_S):
        raise TransportError(f"the other process said nothing for {_WAIT_S:g} s", remedy="see nvidia-smi")
    try:
        why, handle, data = ours.recv()
    except EOFError as error:
        raise TransportError("the other process died", remedy="see nvidia-smi and dmesg") from error
    if why:
        raise TransportError(why, remedy="see nvidia-smi and dmesg")
    say.step("open the handle")
    at, read = ctypes.c_void_p(), ctypes.create_string_buffer(_NBYTES)
    cuda.call("cuIpcOpenMemHandle_v2", ctypes.byref(at), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
    cuda.call("cuMemcpyDtoH_v2", read, at, ctypes.c_size_t(_NBYTES))
    cuda.call("cuIpcCloseMemHandle", at)
    if read.raw != data:
        raise TransportError("other bytes were read than the other process wrote", remedy="do not use CUDA IPC here")
    ours.close()
    os.waitpid(pid, 0)


def _lend(pipe: Connection, device: int) -> None:
    data = secrets.token_bytes(_NBYTES)
    at, handle = ctypes.c_void_p(), _Handle()
    try:
        cuda = _start(device)
        cuda.call("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(_NBYTES))
        cuda.call("cuMemcpyHtoD_v2", at, data, ctypes.c_size_t(_NBYTES))
        cuda.call("cuIpcGetMemHandle", ctypes.byref(handle), at)
    except (TransportError, UsageError) as error:
        pipe.send((error.what, b"", b""))
        return
    pipe.send(("", bytes(handle), data))
    pipe.poll(_WAIT_S)  # until the other end closes the pipe


def _start(device: int) -> Driver:
    cuda, context = Driver(), ctypes.c_void_p()
    cuda.call("cuInit", 0)
    cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), cuda.number("cuDeviceGet", device))
    cuda.call("cuCtxSetCurrent", context)
    return cuda

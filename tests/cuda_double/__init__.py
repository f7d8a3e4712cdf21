"""A double of an NVIDIA GPU: its driver, NVRTC, and torch's CUDA, over host memory. Product code knows nothing of it.

`driver.cpp` is libcuda.so.1. Kernels are this package's own sources of csrc/cuda, compiled by the host's C++ compiler
and run thread by thread (`access.cuh`, `bulk.cuh`), each when it is first launched. `torch_backend.cpp` gives torch
tensors on "cuda:N" whose bytes are the double's. It says nothing of caches, machine code or a GPU's own timing.

`use` puts it in the driver's place for one test of a process, `install` for the rest of a process and its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np

from pdstage.kernels import cuda_runtime, driver, nvrtc, virtual_memory
from pdstage.transport import _cuda_ipc
from tests.cuda_double import compiler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
COMPILER = shutil.which("g++") or shutil.which("c++") or ""
# What a bit mask keeps from being read, the compiler takes for read.
KERNEL_OPTIONS = "-std=c++20 -O1 -fPIC -Wall -Wno-unknown-pragmas -Wno-maybe-uninitialized -Werror"
_LIBRARY = "-std=c++20 -O1 -Wall -shared -fPIC"
MALLOC, VIRTUAL, MANAGED, POOL = range(4)


def header() -> Path | None:
    """The folder of cuda.h that Triton brings."""
    found = importlib.util.find_spec("triton")
    folder = Path(found.origin).parent / "backends/nvidia/include" if found and found.origin else Path()
    return folder if (folder / "cuda.h").exists() else None


def missing() -> str:
    """Why there is no double here; empty if there is one."""
    return "" if COMPILER and header() else "needs g++ and the cuda.h that Triton brings"


@functools.cache
def folder() -> Path:
    """Where what was built from these sources is kept: beside the venv, for all processes."""
    made_of = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(HERE.iterdir()) if path.is_file()))
    held = ROOT / ".venv" if (ROOT / ".venv").is_dir() else Path(tempfile.gettempdir())
    path = held.resolve() / "cuda-double" / made_of.hexdigest()[:16]
    path.mkdir(parents=True, exist_ok=True)
    return path


def build(target: str, *command: str) -> Path:
    """A library, built by the first process that asks for it."""
    path = folder() / target
    with (folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            partial = path.with_name(f"{path.name}.partial")
            subprocess.run([COMPILER, *_LIBRARY.split(), *command, "-o", str(partial)], check=True)
            partial.rename(path)
    return path


def _driver_library(*, for_all: bool) -> Path:
    """`for_all`: under the name by which any library of the process finds it."""
    include = f"-I{header()}"
    if not for_all:
        return build("cuda-double.so", include, str(HERE / "driver.cpp"))
    build("lib/libnvidia-ml.so.1", str(HERE / "management.cpp"), "-Wl,-soname,libnvidia-ml.so.1")
    return build("lib/libcuda.so.1", include, str(HERE / "driver.cpp"), "-Wl,-soname,libcuda.so.1")


class Memory:
    """Memory that a test allocated."""

    def __init__(self, address: int, nbytes: int, device: int) -> None:
        self.address, self.nbytes, self.device = address, nbytes, device

    @property
    def view(self) -> NDArray[np.uint8]:
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.nbytes).from_address(self.address))


class Double:
    """The driver's double of this process. Settings and counts are items: with `["held"] = 1` streams stand still."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = library = ctypes.CDLL(self.path)
        word, long = ctypes.c_size_t, ctypes.c_long
        for name, answer, *given in (
            ("get", long, ctypes.c_char_p), ("set", None, ctypes.c_char_p, long), ("calls", long, ctypes.c_char_p),
            ("fail", None, ctypes.c_char_p, long, ctypes.c_int), ("copies_of", long, word), ("broken", ctypes.c_char_p),
            ("allocate", word, word, ctypes.c_int, ctypes.c_int), ("is_allowed", ctypes.c_int, word, ctypes.c_int),
            ("is_used", ctypes.c_int, word), ("see", None, ctypes.c_void_p, ctypes.c_int),
        ):  # fmt: skip
            function = getattr(library, f"cuda_double_{name}")
            function.restype, function.argtypes = answer, given
        self.driver = driver.Cuda(self.path)
        self._given_up: set[int] = set()
        self._sizes: dict[int, list[int]] = {}

    def __getitem__(self, name: str) -> int:
        return int(self._library.cuda_double_get(name.encode()))

    def __setitem__(self, name: str, value: int) -> None:
        self._library.cuda_double_set(name.encode(), value)

    def reset(self) -> None:
        """All but memory of cuMemAlloc, streams and events is as at the process's start."""
        self._library.cuda_double_reset()
        self._free_given_up()
        for address in list(self._sizes):
            self.free(address)
        self._before = {name: self[name] for name in ("n_handles", "n_mapped", "n_reserved")}

    def new(self, name: str) -> int:
        """How much more there is of what runtimes of this process may keep than at the last `reset`."""
        return self[name] - self._before[name]

    def calls(self, name: str) -> int:
        """How often the process called that function of cuda.h since `forget_calls`."""
        return int(self._library.cuda_double_calls(name.encode()))

    def forget_calls(self) -> None:
        self._library.cuda_double_forget_calls()

    def fail(self, name: str, nth: int, status: int = 304) -> None:
        """The `nth` call of that function from now on answers `status`; none if 0."""
        self._library.cuda_double_fail(name.encode(), nth, status)

    def copies_of(self, address: int) -> int:
        """How many copies have read the allocation with that base."""
        return int(self._library.cuda_double_copies_of(address))

    def broken(self) -> list[str]:
        """The rules of CUDA that were broken since the last call."""
        return str(self._library.cuda_double_broken().decode()).splitlines()

    def see(self, *devices: int) -> None:
        """This process sees those of the machine's GPUs from now on, as by CUDA_VISIBLE_DEVICES."""
        self._library.cuda_double_see((ctypes.c_int * len(devices))(*devices), len(devices))

    def drop_work(self) -> None:
        """All work that waits in streams is gone."""
        self._library.cuda_double_drop_work()

    def is_allowed(self, address: int, device: int) -> bool:
        """Whether cuMemSetAccess let that device in."""
        return bool(self._library.cuda_double_is_allowed(address, device))

    def has_peer(self, device: int, peer: int) -> bool:
        """Whether cuCtxEnablePeerAccess let that device into the memory of `peer`."""
        return bool(self._library.cuda_double_has_peer(device, peer))

    def on(self, device: int) -> driver.Current:
        return driver.Current(self.driver, self.driver.primary(device))

    def allocate(self, nbytes: int, device: int = 0, how: int = MALLOC) -> Memory:
        """Memory of any kind, by whatever call it is made. No context is made for it."""
        self._free_given_up()
        address = int(self._library.cuda_double_allocate(nbytes, device, how))
        assert address
        return Memory(address, nbytes, device)

    def expandable(self, sizes: list[int], types: int = virtual_memory.DESCRIPTOR, device: int = 0) -> Memory:
        """As torch's expandable segments: allocations of `sizes` bytes, mapped one behind the other."""
        calls = virtual_memory.VirtualMemory(self.driver)
        properties = virtual_memory.Properties(1, types, 1, device, gpu_direct=1)
        with driver.Relaxed(self.driver):
            address = virtual_memory.map_all(calls, device, sizes, lambda place: calls.create(sizes[place], properties))
        self._sizes[address] = sizes
        return Memory(address, sum(sizes), device)

    def free(self, address: int) -> None:
        self._given_up.discard(address)
        with driver.Relaxed(self.driver):
            if (sizes := self._sizes.pop(address, None)) is None:
                self.driver.call("cuMemFree_v2", ctypes.c_uint64(address))
            else:
                virtual_memory.unmap_all(virtual_memory.VirtualMemory(self.driver), address, sizes)

    def _free_given_up(self) -> None:
        for unused in [one for one in self._given_up if not self._library.cuda_double_is_used(one)]:
            self.free(unused)

    def give_up(self, address: int) -> None:
        """To be freed once nobody has it open and no copy of this process needs it."""
        self._given_up.add(address)


_doubles: list[Double] = []


def double(*, for_all: bool = False) -> Double:
    """This process's. Other libraries of the process find it only if its first user says `for_all`."""
    if not _doubles:
        _doubles.append(Double(_driver_library(for_all=for_all)))
    return _doubles[0]


_in_use = ExitStack()
_n_users = 0


@contextlib.contextmanager
def use(*, for_all: bool = False) -> Iterator[Double]:
    """Inside, the driver and NVRTC are doubles. `for_all`: for other libraries of the process too, and for good."""
    global _n_users  # noqa: PLW0603
    made = double(for_all=for_all)
    if not _n_users:
        _in_use.enter_context(mock.patch.object(driver, "cuda", lambda: made.driver))
        _in_use.enter_context(mock.patch.object(nvrtc, "_nvrtc", lambda: compiler))
        _in_use.enter_context(mock.patch.object(nvrtc, "cache_folder", lambda: folder() / "images"))
        for cached in (cuda_runtime.held_runtime, _cuda_ipc.is_here, _cuda_ipc.here):
            cached.cache_clear()
            _in_use.callback(cached.cache_clear)
    _n_users += 1
    try:
        yield made
    finally:
        _n_users -= 1
        if not _n_users:
            _in_use.close()


_for_good = ExitStack()


def is_installed() -> bool:
    return "UCX_MEMTYPE_CACHE" in os.environ and _n_users > 0


def install() -> Double:
    """The rest of this process, and its children that call this too, have the double's devices."""
    # UCX knows memory from before its start by what maps NVIDIA's device files; so it asks the driver.
    os.environ["UCX_MEMTYPE_CACHE"] = "n"
    os.environ["LD_LIBRARY_PATH"] = f"{folder() / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    return _for_good.enter_context(use(for_all=True))


def everywhere(site: Path) -> dict[str, str]:
    """The environment of a program that has the double's devices, as have all Pythons that it starts: they import a
    file in the folder `site` first.
    """
    (site / "sitecustomize.py").write_text(
        "from tests import cuda_double\ncuda_double.install()\n"
        "from tests.cuda_double import torch_cuda\ntorch_cuda.install()\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}

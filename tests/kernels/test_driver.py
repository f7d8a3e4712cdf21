"""HIP's calls, made to a library of a few lines of C that notes what it was given; and what both drivers share."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

from pdstage import UsageError
from pdstage.kernels import driver, torch_runtime
from pdstage.kernels.device_memory import DeviceMemory

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")

SOURCE = """
#include <stddef.h>
#include <stdint.h>
int mode = 1, fails = 0;
uint64_t given[4], locked, n_locked;
int hipThreadExchangeStreamCaptureMode(int *asked) {
    int before = mode;
    if (!fails) { mode = *asked; *asked = before; }
    return fails; }
int hipMalloc(void **found, size_t n) { given[0] = n; *found = (void *)0x221234567800; return fails; }
int hipHostGetDevicePointer(void **found, void *at, unsigned flags) {
    *found = at; return flags || (uint64_t)at - locked >= n_locked; }
int hipHostRegister(void *at, size_t n, unsigned flags) {
    if (flags != 3) return 1;
    locked = (uint64_t)at, n_locked = n; return fails; }
int hipHostUnregister(void *at) { if (locked != (uint64_t)at) return 1; n_locked = 0; return 0; }
int hipMemcpyHtoDAsync(void *to, const void *from, size_t n, void *stream) {
    given[0] = (uint64_t)to; given[1] = (uint64_t)from; given[2] = n; given[3] = (uint64_t)stream; return fails; }
"""
ADDRESS = 0x221234567800  # where the kernel of the system maps nothing by itself


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    source, library = folder / "driver.c", folder / "libdriver.so"
    source.write_text(SOURCE)
    subprocess.run([COMPILER, "-shared", "-fPIC", source, "-o", library], check=True)
    return str(library)


@pytest.fixture
def library(path):
    yield driver.Hip(path)
    set_to(path, mode=1, fails=0)


def set_to(path, **values):
    for name, value in values.items():
        ctypes.c_int.in_dll(ctypes.CDLL(path), name).value = value


def of(path, name):
    return ctypes.c_int.in_dll(ctypes.CDLL(path), name).value


def given(path, n):
    return list((ctypes.c_uint64 * 4).in_dll(ctypes.CDLL(path), "given"))[:n]


def test_the_capture_mode_is_relaxed_inside_and_then_as_before(library, path):
    with driver.Relaxed(library):
        assert of(path, "mode") == driver.RELAXED
    assert of(path, "mode") == 1


def test_a_mode_that_cannot_be_exchanged_is_left(library, path):
    set_to(path, fails=700)
    with driver.Relaxed(library):
        assert of(path, "mode") == 1
    set_to(path, fails=0)
    with driver.Relaxed(library):
        assert of(path, "mode") == driver.RELAXED


def test_addresses_and_sizes_keep_their_64_bits(library, path):
    assert library.allocate(5 << 32) == ADDRESS
    assert given(path, 1) == [5 << 32]
    library.upload(ADDRESS, ADDRESS + 8, 3 << 32, ADDRESS + 16)
    assert given(path, 4) == [ADDRESS, ADDRESS + 8, 3 << 32, ADDRESS + 16]


class Device(DeviceMemory):
    def __init__(self, library):
        self._library = library

    def current(self):
        return driver.Relaxed(self._library)


@pytest.mark.parametrize("name", ["cuda", "hip"])
def test_host_memory_is_page_locked_once_and_all_of_it(name, gpu, path):
    library = gpu.driver if name == "cuda" else driver.Hip(path)
    device, nbytes = Device(library), 5 << 32
    assert device.page_lock(ADDRESS, nbytes) is True
    assert device.page_lock(ADDRESS + 4096, nbytes - 4096) is False, "as of torch's pinned tensors: not ours to undo"
    with pytest.raises(UsageError, match="not all page-locked"):
        device.page_lock(ADDRESS, nbytes + 1)
    assert library.seen_at(ADDRESS) == ADDRESS, "not ours to undo"
    device.page_unlock(ADDRESS)
    assert library.seen_at(ADDRESS) == 0


def test_a_call_that_fails_says_which_and_how(library, path):
    set_to(path, fails=2)
    with pytest.raises(driver.DriverError, match="hipMalloc failed with 2") as info:
        library.allocate(8)
    assert info.value.status == 2


class TorchDevice:
    """`torch.cuda.device`, which binds nothing where the number is the current one's already."""

    def __init__(self):
        self.n = 0

    def __enter__(self):
        self.n += 1

    def __exit__(self, *_):
        self.n -= 1


def test_where_torch_is_the_runtime_the_driver_binds_the_context(gpu):
    """In a new thread device 0 is torch's current one, and no context is the thread's."""
    cuda, device = gpu.driver, TorchDevice()
    cuda.bind(0)
    context = cuda.primary(1)
    with pytest.raises(ValueError, match="a turn"), torch_runtime.Current(device, context, cuda):
        assert (device.n, cuda.context()) == (1, context)
        with torch_runtime.Current(device, context, cuda):
            pass
        assert (device.n, cuda.context(), driver.thread.relaxed) == (1, context, True)
        raise ValueError("a turn")
    assert (device.n, cuda.context()) == (0, 0)

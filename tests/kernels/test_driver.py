"""The driver's calls, made to a library of a few lines of C that notes what it was given: no GPU is needed or used."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

from pdstage.errors import UsageError
from pdstage.kernels import driver, torch_runtime
from pdstage.kernels.device_memory import DeviceMemory
from pdstage.kernels.driver import DriverError

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")

SOURCE = """
#include <stddef.h>
#include <stdint.h>
int mode = 1, fails = 0, flushed = 0, device = -1;
void *bound = 0;
uint64_t given[4];
static int exchange(int *asked) {
    int before = mode;
    if (!fails) { mode = *asked; *asked = before; }
    return fails; }
static int upload(uint64_t to, const void *from, size_t n, void *stream) {
    given[0] = to; given[1] = (uint64_t)from; given[2] = n; given[3] = (uint64_t)stream; return fails; }
int cuInit(unsigned flags) { return flags; }
int cuThreadExchangeStreamCaptureMode(int *asked) { return exchange(asked); }
int hipThreadExchangeStreamCaptureMode(int *asked) { return exchange(asked); }
int cuCtxGetCurrent(void **found) { *found = bound; return fails; }
int cuCtxSetCurrent(void *context) { bound = context; return fails; }
int cuDevicePrimaryCtxRetain(void **found, int of) { device = of; *found = (void *)0x7f0000000010; return fails; }
int cuMemAlloc_v2(uint64_t *found, size_t n) { given[0] = n; *found = 0x7f1234567800; return fails; }
int hipMalloc(void **found, size_t n) { given[0] = n; *found = (void *)0x7f1234567800; return fails; }
uint64_t locked, n_locked;
static int seen(uint64_t *found, uint64_t at) { *found = at; return at - locked < n_locked ? 0 : 1; }
static int lock(void *at, size_t n, unsigned flags) {
    if (flags != 3) return 1;
    locked = (uint64_t)at, n_locked = n; return fails; }
int cuMemHostGetDevicePointer_v2(uint64_t *found, void *at, unsigned f) { return f ? 1 : seen(found, (uint64_t)at); }
int hipHostGetDevicePointer(void **found, void *at, unsigned f) { return seen((uint64_t *)found, (uint64_t)at); }
int cuMemHostRegister_v2(void *at, size_t n, unsigned flags) { return lock(at, n, flags); }
int hipHostRegister(void *at, size_t n, unsigned flags) { return lock(at, n, flags); }
int cuMemHostUnregister(void *at) { if (locked != (uint64_t)at) return 1; n_locked = 0; return 0; }
int hipHostUnregister(void *at) { return cuMemHostUnregister(at); }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, void *stream) { return upload(to, from, n, stream); }
int hipMemcpyHtoDAsync(void *to, const void *from, size_t n, void *s) { return upload((uint64_t)to, from, n, s); }
int cuFlushGPUDirectRDMAWrites(int target, int scope) { flushed = target ? -1 : scope; return fails; }
int ordering, options, supported;
int cuDeviceGetAttribute(int *value, int which, int of) {
    *value = which == 116 ? supported : which == 117 ? options : which == 118 ? ordering : -1; return of ? 101 : 0; }
"""
ADDRESS = 0x7F1234567800


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    source, library = folder / "driver.c", folder / "libdriver.so"
    source.write_text(SOURCE)
    subprocess.run([COMPILER, "-shared", "-fPIC", source, "-o", library], check=True)
    return str(library)


@pytest.fixture(params=[driver.Cuda, driver.Hip])
def library(request, path):
    yield request.param(path)
    set_to(path, mode=1, fails=0)
    ctypes.c_void_p.in_dll(ctypes.CDLL(path), "bound").value = 0


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


def test_host_memory_is_page_locked_once_and_all_of_it(library):
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
    with pytest.raises(DriverError, match=r"(cuMemAlloc|hipMalloc) failed with 2") as info:
        library.allocate(8)
    assert info.value.status == 2


@pytest.mark.parametrize(
    ("supported", "options", "ordering", "needed"),
    [(1, 1, 0, True), (1, 1, 100, False), (1, 1, 200, False), (1, 2, 0, False), (0, 1, 0, False)],
)
def test_a_flush_is_needed_where_the_device_does_not_order_a_nics_writes(path, supported, options, ordering, needed):
    set_to(path, supported=supported, options=options, ordering=ordering)
    cuda = driver.Cuda(path)
    assert cuda.flushes(0) is needed
    assert not cuda.flushes(1), "a device that is not there"
    cuda.flush()
    assert of(path, "flushed") == 100, "to the owner, of the current context"


class TorchDevice:
    """`torch.cuda.device`, which binds nothing where the number is the current one's already."""

    def __init__(self):
        self.n = 0

    def __enter__(self):
        self.n += 1

    def __exit__(self, *_):
        self.n -= 1


def test_where_torch_is_the_runtime_the_driver_binds_the_context(path):
    """In a new thread device 0 is torch's current one, and no context is the thread's."""
    cuda, device = driver.Cuda(path), TorchDevice()
    context = cuda.primary(3)
    assert of(path, "device") == 3
    with pytest.raises(ValueError, match="a turn"), torch_runtime.Current(device, context, cuda):
        assert (device.n, cuda.context(), of(path, "mode")) == (1, context, driver.RELAXED)
        with torch_runtime.Current(device, context, cuda):
            pass
        assert (device.n, cuda.context(), of(path, "mode")) == (1, context, driver.RELAXED)
        raise ValueError("a turn")
    assert (device.n, cuda.context(), of(path, "mode")) == (0, 0, 1)

"""Staging memory of the node's own: on the device as other processes may open it, and page-locked on the host."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu.plain import ITEMS, Plain  # noqa: E402  (needs torch)

from pdstage.errors import UsageError  # noqa: E402
from pdstage.kernels import driver  # noqa: E402
from pdstage.kernels.virtual_memory import DESCRIPTOR  # noqa: E402
from pdstage.layout import Region  # noqa: E402
from pdstage.stager import Memory, PageLock  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture
def plain(variant):
    return Plain(variant)


@pytest.fixture
def runtime(plain):
    return plain.pool.runtime(plain.plan.backend)


@pytest.fixture(params=["pool", "pool, cuMemCreate", "host", "host, mappable"])
def memory(request, runtime, monkeypatch):
    staging_on, _, how = request.param.partition(", ")
    mappable, nbytes = how == "mappable", 1 << 20
    if how == "cuMemCreate":
        if torch.version.hip is not None:
            pytest.skip("CUDA's own")
        monkeypatch.setenv("PDSTAGE_DEVICE_MEMORY", how)
        nbytes = 3 << 20  # which no other test gave back
    held = Memory(nbytes, "cuda:0", mappable=mappable, runtime=runtime, staging_on=staging_on)
    yield held
    torch.cuda.synchronize()
    held.release()


def test_kernels_write_and_read_it(plain, memory):
    plan, tokens, index = plain.plan, plain.tokens(len(ITEMS)), plain.list(ITEMS, on_device=False)
    at = memory.region.base, memory.region.nbytes
    expected, stream = plain.expected(ITEMS).clone(), torch.cuda.Stream()
    torch.cuda.synchronize()
    plan.gather(*at, index, tokens, stream=stream)
    stream.synchronize()
    plain.memory.zero_()
    torch.cuda.synchronize()
    plan.scatter(*at, index, tokens, stream=stream)
    stream.synchronize()
    assert torch.equal(plain.expected(ITEMS), expected)


@pytest.mark.skipif(torch.version.hip is not None, reason="CUDA's own attributes")
def test_of_cumemcreate_it_may_leave_by_a_descriptor(runtime, monkeypatch):
    monkeypatch.setenv("PDSTAGE_DEVICE_MEMORY", "cuMemCreate")
    memory, attribute = Memory(5 << 20, "cuda:0", runtime=runtime), driver.cuda().attribute
    base = memory.region.base
    assert not attribute(driver.IPC_CAPABLE, base)
    assert attribute(driver.HANDLE_TYPES, base) & DESCRIPTOR
    with runtime.current():
        assert driver.cuda().mapping(base + (5 << 20) - 1) == (base, 6 << 20)
    memory.release()


@pytest.mark.skipif(torch.version.hip is not None, reason="CUDA's own attributes")
def test_on_the_device_other_processes_may_open_it_whatever_torchs_allocator_is(runtime):
    memory = Memory(1 << 20, "cuda:0", runtime=runtime)
    assert driver.cuda().attribute(driver.IPC_CAPABLE, memory.region.base)
    memory.release()
    assert Memory(1 << 20, "cuda:0", runtime=runtime).region == memory.region


def test_a_tensor_that_torch_has_page_locked_stays_so(runtime):
    pinned, plain = torch.zeros(4096, dtype=torch.uint8, pin_memory=True), np.zeros(8192, np.uint8)
    regions = [Region(pinned.data_ptr(), 4096), Region(plain.ctypes.data, 8192)]
    held = PageLock("the pool", regions, runtime)
    assert not runtime.page_lock(plain.ctypes.data, 4096)
    with pytest.raises(UsageError, match="not all page-locked"):
        runtime.page_lock(plain.ctypes.data + 4096, 1 << 20)
    held.release()
    assert pinned.is_pinned()
    assert not runtime.page_lock(pinned.data_ptr(), 4096)


@pytest.mark.parametrize("pinned", [True, False])
def test_kernels_copy_pages_in_host_memory(variant, pinned):
    """As of HiSparse: pages in host memory, pinned by the engine or page-locked by the node; staging on the device."""
    memory = torch.randint(0, 256, (4 * 64 * 256,), dtype=torch.uint8, pin_memory=pinned)
    plain = Plain(variant, memory=memory)
    lock = PageLock("the pool", plain.pool.on_host, plain.pool.runtime(plain.plan.backend))
    out, expected = plain.staging(len(ITEMS)), plain.expected(ITEMS).clone()
    plain.gather(out, ITEMS)
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), expected)
    memory.zero_()
    plain.scatter(out, ITEMS)
    torch.cuda.synchronize()
    assert torch.equal(plain.expected(ITEMS), expected)
    assert int(memory.count_nonzero()) == int(expected.count_nonzero()), "no other byte was written"
    lock.release()


def test_a_flush_may_always_be_asked_for(runtime):
    runtime.flush()

"""Addresses past 2^31 and 2^32: pools and staging whose bytes and elements no 32-bit number counts."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpu.plain import Plain  # noqa: E402  (needs torch)

pytestmark = pytest.mark.gpu

POOL_NBYTES = 6 << 30
N_VIEWS = 3
WIDTH = 1024
STAGED_NBYTES = 9 << 28  # 2.25 GiB


@pytest.fixture(params=[1, N_VIEWS])
def wide(variant, request):
    """Three views of 2 GiB each in one region, or one of 6: views, items and bytes all lie beyond 2^32."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < POOL_NBYTES + 4 * STAGED_NBYTES:
        pytest.skip(f"needs {(POOL_NBYTES + 4 * STAGED_NBYTES) >> 30} GiB of free device memory, {free >> 30} are free")
    memory = torch.randint(-(2**63), 2**63 - 1, (POOL_NBYTES // 8,), dtype=torch.int64, device="cuda:0")
    n_items = POOL_NBYTES // request.param // WIDTH
    return Plain(variant, n_views=request.param, n_items=n_items, width=WIDTH, memory=memory.view(torch.uint8))


def edges(n_items):
    """Items on both sides of every power of two that an offset could be cut at, the last one included."""
    near = {0, 1, n_items - 2, n_items - 1}
    for bits in (31, 32):
        at = 2**bits // WIDTH
        near |= {item for item in (at - 1, at, at + 1, at % n_items) if 0 <= item < n_items}
    return sorted(near, reverse=True)


def test_a_gather_reaches_every_byte(wide):
    items = edges(wide.cells.shape[1])
    out = wide.staging(len(items))
    wide.gather(out, items)
    assert torch.equal(out, wide.expected(items))


def test_a_scatter_reaches_every_byte_and_no_other(wide):
    items = edges(wide.cells.shape[1])
    src = torch.randint(0, 256, (len(items) * len(wide.cells) * WIDTH,), dtype=torch.uint8, device="cuda:0")
    wrapped = [(item * WIDTH % 2**31) // WIDTH for item in items]
    others = sorted(set(wrapped) - set(items))
    before = wide.expected(others).clone() if others else None
    wide.scatter(src, items)
    assert torch.equal(wide.expected(items), src)
    assert before is None or torch.equal(wide.expected(others), before)


def test_staging_longer_than_32_bits(wide):
    n = STAGED_NBYTES // len(wide.cells) // WIDTH
    items = torch.randperm(wide.cells.shape[1])[:n].tolist()
    out = wide.staging(n)
    wide.gather(out, items)
    staged = out.view(len(wide.cells), n, WIDTH)
    where = torch.as_tensor(items, device="cuda:0")

    def check():
        for view in range(len(wide.cells)):
            assert torch.equal(staged[view], wide.cells[view][where]), f"view {view}"

    check()
    wide.cells.zero_()
    wide.scatter(out, items)
    check()

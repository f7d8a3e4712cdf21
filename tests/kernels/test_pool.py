"""Raw pools: every backend against the reference bit for bit, and gather then scatter against the layout's formula."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from pools import FUSED, HND, NHD, Logical, Stored, assert_alike, gathered, hold, kv_index, moved, staging, transfers
from rigs import HOST_RIGS, REFERENCE, by_misuse, by_rig, check, check_refused, without_native

from pdstage import UsageError, native
from pdstage.kernels import Index, Pool, pool
from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR, Select
from tests.processes import python
from tests.rows import drawn

TOTAL = np.zeros(1, np.uint64)
native_only = pytest.mark.skipif(native.ext is None, reason="needs the extension")


def test_a_pool_keeps_its_memory():
    held = hold([Stored(Logical())])
    assert Pool.of(held.layout, keep=held).keep is held


@by_rig
@settings(max_examples=drawn(30, full=100))
@given(transfer=transfers())
def test_every_transfer_moves_its_tokens_and_nothing_else(rig, transfer):
    check(rig, transfer)


HEADS = Logical(shards=4, width=16, roles=2)


@by_rig
@pytest.mark.parametrize(
    ("of", "n_items", "rows", "wire", "order", "cut"),
    [
        (HEADS, 6, 4, HEAD_MAJOR, HND, (2, 2)),
        # Stores past the caches, several runs an item, some items neighbours.
        *((replace(HEADS, width=256), 1500, 16, *how, (5, 3)) for how in ((TOKEN_MAJOR, NHD), (HEAD_MAJOR, HND))),
        (replace(HEADS, width=256), 1500, 16, TOKEN_MAJOR, FUSED, (5, 3)),
        # Thousands of runs of a byte, and of a page's rows.
        (replace(HEADS, width=1), 5000, 1, TOKEN_MAJOR, HND, (0, 0)),
        (replace(HEADS, width=24), 1250, 4, TOKEN_MAJOR, HND, (0, 0)),
    ],
)
def test_what_one_rank_gathers_another_scatters_to_its_own_shards(rig, of, n_items, rows, wire, order, cut):
    """Against the layout's formula; first and last item are cut. And straight from pool to pool."""
    if rig is REFERENCE and n_items > 100:
        pytest.skip("it has an address for each byte")
    stored = Stored(of, n_items=n_items, rows_per_item=rows, order=order, total=6)
    src, dst = hold([replace(stored, first=2)], 1), hold([stored], 2)
    items = np.random.default_rng(3).permutation(n_items)
    items[200:400] = np.sort(items[200:400])
    index, tokens = {"kv": Index.of(items)}, {"kv": (cut[0], n_items * rows - cut[1])}
    src_select = [Select(key, 0, 2) for key in of.view_keys()]
    dst_select = [Select(key, 2, 2) for key in of.view_keys()]
    expected, before = moved(src, src_select, index, dst, dst_select, index, tokens), dst.bytes()
    plan, peer = rig.plan(src.layout, src_select, wire, False), rig.plan(dst.layout, dst_select, wire, False)
    staged = gathered(plan, index, tokens)
    for call, source in ((peer.scatter, (staged.ctypes.data, staged.size)), (plan.copy_to, (peer, index))):
        call(*source, index, tokens)
        for a, b, old in zip(expected, dst.memory, before, strict=True):
            np.testing.assert_array_equal(a, b)
            b[:] = old


# Big enough for the stores past the caches, on both ways: 33 MiB.
BIG = 33 << 20


@native_only
@pytest.mark.parametrize(
    ("width", "skew"),
    [
        *((width, 0) for width in (64, 256, 4112)),
        *(pytest.param(width, 0, marks=pytest.mark.full) for width in (96, 128, 192, 512, 1024, 4096, 32768)),
        *((100, 0), (256, 16), (1024, 1)),
    ],
)
def test_big_copies_of_every_width(width, skew):
    n = BIG // width + 1
    base, total = -skew % 64, n + 9
    stored = Stored(Logical(width=width), n_items=total, rows_per_item=1, base=base)
    both = hold([stored]), hold([stored])
    pool, other = (
        np.frombuffer(one.memory[0], np.uint8)[64 + base :][: total * width].reshape(-1, width) for one in both
    )
    items = np.random.default_rng(width).permutation(total)[:n].astype(np.int32)
    plan, peer = (Pool.of(one.layout).plan(Logical().whole(), backend="host") for one in both)
    tokens, index = {"kv": (0, n)}, {"kv": Index.of(items)}
    staged = staging(plan.nbytes(tokens), skew)
    plan.gather(staged.ctypes.data, staged.size, index, tokens)
    dense = staged[: n * width].reshape(-1, width)
    np.testing.assert_array_equal(dense, pool[items])
    dense[:] = dense[::-1].copy()
    expected = pool.copy()
    expected[items] = dense
    plan.scatter(staged.ctypes.data, staged.size, index, tokens)
    np.testing.assert_array_equal(pool, expected)
    plan.copy_to(peer, index, index, tokens)
    np.testing.assert_array_equal(other, pool)


def test_a_plan_serves_many_threads_at_once():
    of = Logical(roles=2, layers=2, shards=2, width=64)
    held = hold([Stored(of, n_items=200, rows_per_item=8)])
    plan = Pool.of(held.layout).plan(of.whole())
    tokens = {"kv": (3, 1500)}
    indexes = [{"kv": Index.of(np.random.default_rng(i).permutation(200))} for i in range(4)]
    expected = [gathered(plan, index, tokens) for index in indexes]
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda index: gathered(plan, index, tokens), indexes * 20)
        assert_alike(expected * 20, found)


@by_rig
@by_misuse(unsummed=({"sum_ptr": TOTAL.ctypes.data}, "computes no checksums"))
def test_misuse_names_the_culprit_and_writes_nothing(rig, way, case, words):
    check_refused(rig, way, case, words)


def moved_to(layout, **where):
    """The layout, its one region elsewhere."""
    return replace(layout, regions=(replace(layout.regions[0], **where),))


def test_selections_and_backends_that_do_not_exist():
    held = hold([Stored(Logical(shards=2))])
    pool, key = Pool.of(held.layout), Logical().view_keys()[0]
    with pytest.raises(UsageError, match="shards 1..3"):
        pool.plan([Select(key, 1, 2)])
    with pytest.raises(UsageError, match="no backend 'fast'"):
        pool.plan([Select(key, 0, 1)], TOKEN_MAJOR, "fast")
    with pytest.raises(UsageError, match="no staged order 'rows'"):
        pool.plan([Select(key, 0, 1)], "rows")
    with pytest.raises(UsageError, match="no call 'copy'"):
        pool.plan([Select(key, 0, 1)], only="copy")
    with pytest.raises(UsageError, match="region 0 is rocm:0 memory in a pool on 'cuda:0'"):
        Pool.of(moved_to(held.layout, kind="rocm"), "cuda:0")


def test_a_gpus_pool_may_have_regions_in_host_memory_and_a_hosts_none_on_a_gpu():
    held = hold([Stored(Logical(shards=2))])
    assert Pool.of(held.layout, "cuda:0").on_host == held.layout.regions
    assert Pool.of(held.layout).on_host == ()
    assert Pool.of(held.layout, "cuda").device == "cuda:0", "page locks are counted by device"
    with pytest.raises(UsageError, match="region 0 is cuda:0 memory in a pool on 'cpu'"):
        Pool.of(moved_to(held.layout, kind="cuda"))
    with pytest.raises(UsageError, match="region 0 is cuda:1 memory in a pool on 'cuda:0'"):
        Pool.of(moved_to(held.layout, kind="cuda", device=1), "cuda")


@pytest.mark.parametrize("items", [np.zeros(3, np.int16), np.zeros((2, 2), np.int32), np.zeros(6, np.int64)[::2]])
def test_an_index_is_one_contiguous_list_of_integers(items):
    with pytest.raises(UsageError, match="items are"):
        Index.of(items)


def _pool_of(rig, of):
    held = hold([Stored(of, n_items=6, rows_per_item=4)])
    return held, rig.plan(held.layout, of.whole(), TOKEN_MAJOR, False)


COPY_MISUSE = {
    "source item outside": ({"items": [1, 9, 2]}, "item 9 at position 1 of component 'kv' is outside"),
    "item outside": ({"peer": [1, 9, 2]}, "item 9 at position 1 of component 'kv' of the destination is outside"),
    "negative item": ({"peer": [1, -1, 2]}, "item -1 at position 1 of component 'kv' of the destination"),
    "repeated item": ({"peer": [1, 2, 1]}, "item 1 at position 2 of component 'kv' of the destination is a dest"),
    "too few items": ({"peer": [1, 2]}, "component 'kv' of the destination has 2 items"),
    "no index": ({"peer_name": "other"}, "component 'kv' of the destination have no index"),
    "first token behind": ({"peer_first": 4}, "tokens 0..12 of component 'kv' of the destination"),
    "other width": ({"of": Logical(width=8)}, "copying Cells"),
    "other shards": ({"of": Logical(width=16, shards=2)}, "copying Cells"),
    "other view": ({"of": Logical("swa", width=16)}, "copying Cells"),
    "more views": ({"of": Logical(width=16, roles=2)}, "to Cells"),
}


@by_rig
@pytest.mark.parametrize("misuse", COPY_MISUSE)
def test_copies_that_do_not_fit_are_refused_by_name(rig, misuse):
    case, words = COPY_MISUSE[misuse]
    (_, plan), (held, peer) = _pool_of(rig, Logical(width=16)), _pool_of(rig, case.get("of", Logical(width=16)))
    before = held.bytes()
    index = kv_index(case.get("items", [1, 1, 2]))
    other = Index.of(np.array(case.get("peer", [3, 1, 2]), np.int32), case.get("peer_first", 0))
    with pytest.raises(UsageError) as caught:
        plan.copy_to(peer, index, {case.get("peer_name", "kv"): other}, {"kv": (0, 12)})
    assert words in str(caught.value)
    assert_alike(before, held.memory)


@native_only
def test_plans_of_two_backends_do_not_copy_to_each_other():
    (_, plan), (_, peer) = (_pool_of(rig, Logical()) for rig in HOST_RIGS)
    with pytest.raises(UsageError, match=r"host \(NativePlan\) cannot copy to one of reference"):
        plan.copy_to(peer, {}, {}, {})


ALONE = """
import sys
for name in ("msgspec", "zmq", "nixl", "torch", "triton", "cupy", "pdstage._native"):
    sys.modules[name] = None  # as if it were not installed
sys.path[:0] = ["tests"]
import numpy as np
from pools import Logical, Stored, gathered, hold
from pdstage.kernels import Index, Pool, backends
from pdstage.plan import Select
held = hold([Stored(Logical(), n_items=8, rows_per_item=1)])
plan = Pool.of(held.layout).plan([Select(Logical().view_keys()[0], 0, 1)])
out, items = gathered(plan, {"kv": Index.of(np.array([3, 1]))}, {"kv": (0, 2)}), held.memory[0][64:]
assert bytes(out[:16]) == bytes([*items[24:32], *items[8:16]])
assert (plan.backend, backends()["host"]) == ("reference", "needs the extension: build it with a C++ compiler")
"""


def test_kernels_need_numpy_alone():
    python("-c", ALONE, check=True, cwd=Path(__file__).parents[2])


def test_that_the_reference_copies_for_want_of_host_code_is_said_once(caplog):
    pool._warn_slow.cache_clear()
    held = hold([Stored(Logical())])
    with without_native():
        for _ in range(2):
            Pool.of(held.layout).plan([])
    Pool.of(held.layout).plan([], backend="reference")
    (record,) = caplog.records
    assert (
        "copied by the reference, correctly and very slowly: the host code needs the extension" in record.getMessage()
    )


def test_that_triton_converts_where_cuda_could_is_said_once(caplog, monkeypatch):
    pool._warn_slow.cache_clear()
    for module in (pool.triton_convert, pool.cuda_convert):
        monkeypatch.setattr(module, "missing", lambda: "")
    for name in ("cuda", "triton", "triton"):
        pool.converting(name)
    (record,) = caplog.records
    assert "converted by Triton, correctly and very slowly: CUDA's kernels are here" in record.getMessage()

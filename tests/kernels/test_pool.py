"""Raw pools: every backend against the reference bit for bit, and gather then scatter against the layout's formula."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from pools import FUSED, HND, NHD, Logical, Stored, hold, moved, transfers
from rigs import HOST_CODES, MISUSE, REFERENCE, Rig, check, check_refused, host_code

from pdstage.errors import UsageError
from pdstage.kernels import Index, Pool
from pdstage.layout import Key, Region, RowLevel, View
from pdstage.layout.topology import Axis
from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR, Select
from tests.rows import drawn


def staging(nbytes, skew=0, fill=0xA5):
    """`nbytes` of staging that begin `skew` bytes past a 64-byte boundary, and its address."""
    whole = np.full(nbytes + 256, fill, np.uint8)
    start = -whole.ctypes.data % 64 + skew
    return whole, whole.ctypes.data + start


RIGS = [*(Rig("host", code) for code in HOST_CODES), REFERENCE]


by_code = pytest.mark.parametrize("rig", RIGS, ids=lambda rig: f"{rig.backend}-{rig.code}")


@by_code
@settings(max_examples=drawn(30, full=100), deadline=None)
@given(transfer=transfers())
def test_every_transfer_moves_its_tokens_and_nothing_else(rig, transfer):
    check(rig, transfer)


def test_head_major_meets_head_major_across_shards():
    of = Logical(shards=4, width=16, roles=2)
    stored = Stored(of, n_items=6, rows_per_item=4, order=HND)
    src, dst = hold([stored], 1), hold([stored], 2)
    index = {"kv": Index.of(np.array([3, 1, 5], np.int32))}
    tokens = {"kv": (2, 11)}
    src_select = [Select(key, 0, 2) for key in of.view_keys()]
    dst_select = [Select(key, 2, 2) for key in of.view_keys()]
    expected = moved(src, src_select, index, dst, dst_select, index, tokens)
    gather = Pool.of(src.layout).plan(src_select, HEAD_MAJOR)
    _, at = staging(gather.nbytes(tokens))
    gather.gather(at, gather.nbytes(tokens), index, tokens)
    Pool.of(dst.layout).plan(dst_select, HEAD_MAJOR).scatter(at, gather.nbytes(tokens), index, tokens)
    for a, b in zip(expected, dst.memory, strict=True):
        np.testing.assert_array_equal(a, b)


# Big enough for the stores past the caches, on both ways: 33 MiB.
BIG = 33 << 20


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
    rng = np.random.default_rng(width)
    held = hold([Stored(Logical(width=width), n_items=n + 9, rows_per_item=1, base=-skew % 64)])
    region = held.layout.regions[0]
    pool = np.frombuffer(held.memory[0], np.uint8)[64 + (-skew % 64) :][: (n + 9) * width].reshape(-1, width)
    items = rng.permutation(n + 9)[:n].astype(np.int32)
    plan = Pool.of(held.layout).plan([Select(Logical().view_keys()[0], 0, 1)])
    tokens, index = {"kv": (0, n)}, {"kv": Index.of(items)}
    nbytes = plan.nbytes(tokens)
    whole, at = staging(nbytes, skew)
    plan.gather(at, nbytes, index, tokens)
    dense = whole[at - whole.ctypes.data :][: n * width].reshape(-1, width)
    np.testing.assert_array_equal(dense, pool[items])
    dense[:] = dense[::-1].copy()
    untouched = pool[np.setdiff1d(np.arange(n + 9), items)].copy()
    plan.scatter(at, nbytes, index, tokens)
    np.testing.assert_array_equal(pool[items], dense)
    np.testing.assert_array_equal(pool[np.setdiff1d(np.arange(n + 9), items)], untouched)
    assert region.nbytes >= pool.size


@pytest.mark.parametrize("order", [NHD, HND, FUSED])
@pytest.mark.parametrize("wire", [TOKEN_MAJOR, HEAD_MAJOR])
def test_big_paged_copies(order, wire):
    """Several runs an item, first and last item cut, some items neighbours: against numpy."""
    of = Logical(roles=2, shards=4, width=256)
    held = hold([Stored(of, n_items=1500, rows_per_item=16, order=order)])
    items = np.random.default_rng(3).permutation(1500).astype(np.int64)
    items[200:400] = np.sort(items[200:400])
    select = [Select(key, 1, 3) for key in of.view_keys()]
    tokens, index = {"kv": (5, 1500 * 16 - 3)}, {"kv": Index.of(items)}
    pool, results = Pool.of(held.layout), []
    for code in HOST_CODES:
        with host_code(code):
            plan = pool.plan(select, wire)
        n = plan.nbytes(tokens)
        assert n > 32 << 20
        whole, at = staging(n)
        plan.gather(at, n, index, tokens)
        results.append(whole[at - whole.ctypes.data :][:n])
        copy = hold([Stored(of, n_items=1500, rows_per_item=16, order=order)], seed=5)
        with host_code(code):
            Pool.of(copy.layout).plan(select, wire).scatter(at, n, index, tokens)
        results.append(np.concatenate(copy.memory))
    for a, b in zip(results[:2], results[-2:], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("n_consecutive", [2, 7, 64])
def test_consecutive_pages_of_one_run_each(n_consecutive):
    held = hold([Stored(Logical(width=32), n_items=256, rows_per_item=4)])
    starts = np.random.default_rng(1).permutation(256 // n_consecutive) * n_consecutive
    items = (starts[:, None] + np.arange(n_consecutive)).reshape(-1).astype(np.int32)
    select, index = [Select(Logical().view_keys()[0], 0, 1)], {"kv": Index.of(items)}
    tokens = {"kv": (3, items.size * 4 - 1)}
    results = []
    for backend in ("host", "reference"):
        plan = Pool.of(held.layout).plan(select, TOKEN_MAJOR, backend)
        whole, at = staging(plan.nbytes(tokens))
        plan.gather(at, plan.nbytes(tokens), index, tokens)
        results.append(whole[at - whole.ctypes.data :][: plan.nbytes(tokens)])
    np.testing.assert_array_equal(*results)


def test_a_plan_serves_many_threads_at_once():
    of = Logical(roles=2, layers=2, shards=2, width=64)
    held = hold([Stored(of, n_items=200, rows_per_item=8)])
    plan = Pool.of(held.layout).plan([Select(key, 0, 2) for key in of.view_keys()])
    tokens = {"kv": (3, 1500)}
    indexes = [{"kv": Index.of(np.random.default_rng(i).permutation(200))} for i in range(4)]
    n = plan.nbytes(tokens)
    expected, found = [np.zeros(n, np.uint8) for _ in indexes], [np.zeros(n, np.uint8) for _ in indexes]
    for index, out in zip(indexes, expected, strict=True):
        plan.gather(out.ctypes.data, n, index, tokens)

    def work(number):
        for _ in range(20):
            found[number][:] = 0
            plan.gather(found[number].ctypes.data, n, indexes[number], tokens)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


@by_code
@pytest.mark.parametrize(
    ("way", "misuse"),
    [(way, name) for way in ("gather", "scatter") for name in MISUSE if way == "scatter" or "repeated" not in name],
)
def test_misuse_names_the_culprit_and_writes_nothing(rig, way, misuse):
    check_refused(rig, way, *MISUSE[misuse])


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
    with pytest.raises(UsageError, match="region 0 is rocm memory in a pool on 'cuda:0'"):
        Pool.of(replace(held.layout, regions=(replace(held.layout.regions[0], kind="rocm"),)), "cuda:0")


def test_a_gpus_pool_may_have_regions_in_host_memory_and_a_hosts_none_on_a_gpu():
    held = hold([Stored(Logical(shards=2))])
    assert Pool.of(held.layout, "cuda:0").on_host == held.layout.regions
    assert Pool.of(held.layout).on_host == ()
    with pytest.raises(UsageError, match="region 0 is cuda memory in a pool on 'cpu'"):
        Pool.of(replace(held.layout, regions=(replace(held.layout.regions[0], kind="cuda"),)))


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("width", [1, 4, 24, 64, 128, 4096])
def test_thousands_of_runs_from_pool_to_pool(width, page):
    """One of two heads, so that no run joins the next: batches end, however short or long the runs are."""
    n_pages = 5000 // page
    views = [
        View(
            key=Key("kv", "k", 0), region=0, offset=0, n_items=n_pages, item_stride=page * 2 * width,
            tokens_per_item=page, rows=(RowLevel(1, 2 * width),), shards=2, shard_stride=width, width=width,
            axis=Axis("kv_head", 2, 0, 2), format="bytes",
        )
    ]  # fmt: skip
    rng, select = np.random.default_rng(width), [Select(views[0].key, 1, 1)]
    memory = [np.zeros(n_pages * page * 2 * width, np.uint8) for _ in range(2)]
    memory[0][:] = rng.integers(0, 256, len(memory[0]), np.uint8)
    lists = [rng.permutation(n_pages) for _ in range(2)]
    plans = [Pool([Region(one.ctypes.data, one.nbytes)], views, keep=one).plan(select) for one in memory]
    here, there = ({"kv": Index.of(one)} for one in lists)
    plans[0].copy_to(plans[1], here, there, {"kv": (0, n_pages * page)})
    source, target = (one.reshape(n_pages, page, 2, width) for one in memory)
    assert np.array_equal(target[lists[1], :, 1], source[lists[0], :, 1])
    assert not target[:, :, 0].any()


@pytest.mark.parametrize("items", [np.zeros(3, np.int16), np.zeros((2, 2), np.int32), np.zeros(6, np.int64)[::2]])
def test_an_index_is_one_contiguous_list_of_integers(items):
    with pytest.raises(UsageError, match="items are"):
        Index.of(items)


def _pool_of(code, of, n_items=6):
    held = hold([Stored(of, n_items=n_items, rows_per_item=4)])
    with host_code(code):
        return held, Pool.of(held.layout).plan(
            [Select(key, 0, of.shards) for key in of.view_keys()],
            TOKEN_MAJOR,
            "reference" if code == "reference" else "host",
        )


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


@pytest.mark.parametrize("code", [*HOST_CODES, "reference"])
@pytest.mark.parametrize("misuse", COPY_MISUSE)
def test_copies_that_do_not_fit_are_refused_by_name(code, misuse):
    case, words = COPY_MISUSE[misuse]
    (_, plan), (held, peer) = _pool_of(code, Logical(width=16)), _pool_of(code, case.get("of", Logical(width=16)))
    before = held.bytes()
    index = {"kv": Index.of(np.array(case.get("items", [1, 1, 2])))}
    other = Index.of(np.array(case.get("peer", [3, 1, 2]), np.int32), case.get("peer_first", 0))
    with pytest.raises(UsageError) as caught:
        plan.copy_to(peer, index, {case.get("peer_name", "kv"): other}, {"kv": (0, 12)})
    assert words in str(caught.value)
    for a, b in zip(before, held.memory, strict=True):
        np.testing.assert_array_equal(a, b)


def test_plans_of_two_backends_do_not_copy_to_each_other():
    (_, plan), (_, peer) = _pool_of("numpy", Logical()), _pool_of("reference", Logical())
    with pytest.raises(UsageError, match=r"host \(NumpyPlan\) cannot copy to one of reference"):
        plan.copy_to(peer, {}, {}, {})


@pytest.mark.parametrize("argument", [{"threads": 0}, {"threads": -1}])
def test_a_plan_has_a_thread(argument):
    held = hold([Stored(Logical())])
    with pytest.raises(UsageError, match="threads is"):
        Pool.of(held.layout).plan([], **argument)


def _everything(threads, wire=TOKEN_MAJOR, order=NHD):
    """What every way leaves behind and sums to, of a transfer big enough to be shared out; ends are cut."""
    of = Logical(roles=2, shards=4, width=256)
    stored = Stored(of, n_items=1500, rows_per_item=16, order=order)
    src, dst, copied = hold([stored], 1), hold([stored], 2), hold([stored], 2)
    items = np.random.default_rng(3).permutation(1500)
    items[200:400] = np.sort(items[200:400])
    select = [Select(key, 1, 3) for key in of.view_keys()]
    tokens, index, peer_index = {"kv": (5, 20000)}, {"kv": Index.of(items)}, {"kv": Index.of(items[::-1].copy())}
    plan, scatter, peer = (
        Pool.of(held.layout).plan(select, wire, checksum=True, threads=threads) for held in (src, dst, copied)
    )
    n, sums = plan.nbytes(tokens), np.zeros(6, np.uint64)
    whole, at = staging(n)
    for first, ptr in ((0, sums.ctypes.data), (3, 0)):
        here = [ptr + 8 * (first + i) if ptr else 0 for i in range(3)]
        plan.gather(at, n, index, tokens, sum_ptr=here[0])
        scatter.scatter(at, n, peer_index, tokens, sum_ptr=here[1])
        plan.copy_to(peer, index, peer_index, tokens, sum_ptr=here[2])
        yield from (whole[at - whole.ctypes.data :][:n].copy(), *dst.bytes(), *copied.bytes(), sums.copy())
        for held in (dst, copied):
            held.memory[0][:] = 9


@pytest.mark.skipif("c++" not in HOST_CODES, reason="needs the extension")
@pytest.mark.parametrize(
    ("wire", "order"),
    [(TOKEN_MAJOR, NHD), (HEAD_MAJOR, HND), pytest.param(TOKEN_MAJOR, HND, marks=pytest.mark.full)],
)
def test_more_threads_change_nothing(wire, order):
    for a, b in zip(_everything(1, wire, order), _everything(3, wire, order), strict=True):
        np.testing.assert_array_equal(a, b)


FORKED = """
import os, sys, threading
sys.path[:0] = ["tests", "tests/kernels"]
import numpy as np
from test_pool import _everything
want = list(_everything(4))
def same():
    return all((a == b).all() for a, b in zip(want, _everything(4), strict=True))
others = [threading.Thread(target=same) for _ in range(2)]
for other in others: other.start()
child = os.fork()
if not child:
    os._exit(0 if same() else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
for other in others: other.join()
assert same()
"""


@pytest.mark.skipif("c++" not in HOST_CODES, reason="needs the extension")
def test_helping_threads_survive_a_fork_and_end_with_the_process():
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=900, cwd=Path(__file__).parents[2])

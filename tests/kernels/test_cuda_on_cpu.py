"""The CUDA kernels' sources against the reference, bit for bit, run by a test double of the device on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_cpu import COMPILER, CpuMachine, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import HND, NHD, Logical, Stored, hold, indexes, moved, ranges

from pdstage.errors import UsageError
from pdstage.kernels import Index, Pool
from pdstage.kernels.checksum import checksum
from pdstage.kernels.pool import Launch
from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR, Select
from pdstage.tables import _seed
from tests.kernels.test_pool import WIRES, cases, staging, transfers

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def on_device(index):
    """The same list as one that lies on the device, where the host does not look at it."""
    return {name: one._replace(device="cuda:0") for name, one in index.items()}


def put_back(held, before):
    for memory, original in zip(held.memory, before, strict=True):
        memory[:] = original


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def expected_sum(held, select, index, tokens):
    """By kernels/checksum.py, of the cells in `held`."""
    total = 0
    for key, start, count in select:
        view, (first, stop) = held.layout.by_key()[key], tokens[key.component]
        if first == stop:
            continue
        per, listed = view.tokens_per_row, index[key.component]
        rows = np.arange(first // per, -(-stop // per))
        region = held.memory[view.region]
        found = np.empty((rows.size, count, view.segs, view.width), np.uint8)
        for at, row in enumerate(rows):
            item, t = divmod(int(row) * per - listed.first_token, view.tokens_per_item)
            for shard in range(count):
                for seg in range(view.segs):
                    offset = view.offset + int(listed.keep[item]) * view.item_stride + view.row_offset(t)
                    offset += (start + shard) * view.shard_stride + seg * view.seg_stride + 64
                    found[at, shard, seg] = region[offset : offset + view.width]
        total += checksum(_seed(key), rows * per, view.axis.first + start, found)
    return total % 2**64


@settings(max_examples=150, deadline=None)
@given(case=cases(repeat=True), max_sms=st.sampled_from([None, 1, 3]), device_lists=st.booleans())
def test_gather_is_the_reference(case, max_sms, device_lists):
    held, select, wire, tokens, index, skew = case
    skew = skew // 16 * 16
    pool = Pool.of(held.layout, keep=held)
    before, results = held.bytes(), []
    reference = pool.plan(select, wire, "reference")
    n = reference.nbytes(tokens)
    for plan in (reference, plan_of(pool, select, wire)):
        whole, at = staging(n, skew)
        if plan is reference:
            plan.gather(at, n, index, tokens)
        else:
            plan.gather(at, n, on_device(index) if device_lists else index, tokens, Launch(None, max_sms))
        start = at - whole.ctypes.data
        results.append(whole[start : start + n])
        assert (whole[:start] == 0xA5).all()
        assert (whole[start + n :] == 0xA5).all()
    np.testing.assert_array_equal(*results)
    assert_same(before, held.memory)


@settings(max_examples=150, deadline=None)
@given(case=cases(repeat=False), max_sms=st.sampled_from([None, 1]), device_lists=st.booleans())
def test_scatter_is_the_reference(case, max_sms, device_lists):
    held, select, wire, tokens, index, skew = case
    pool = Pool.of(held.layout)
    before, results = held.bytes(), []
    reference = pool.plan(select, wire, "reference")
    n = reference.nbytes(tokens)
    whole, at = staging(n, skew // 16 * 16)
    whole[:] = np.random.default_rng(7).integers(0, 256, whole.size, dtype=np.uint8)
    reference.scatter(at, n, index, tokens)
    results.append(held.bytes())
    put_back(held, before)
    plan = plan_of(pool, select, wire)
    plan.scatter(at, n, on_device(index) if device_lists else index, tokens, Launch(None, max_sms))
    results.append(held.bytes())
    assert_same(*results)


@settings(max_examples=150, deadline=None)
@given(case=transfers(), wire=WIRES, device_lists=st.booleans())
def test_a_copy_between_pools_moves_the_tokens_and_nothing_else(case, wire, device_lists):
    (src, src_select, src_index), (dst, dst_select, dst_index), tokens = case
    expected, before = moved(src, src_select, src_index, dst, dst_select, dst_index, tokens), src.bytes()
    machine = CpuMachine()
    plan = plan_of(Pool.of(src.layout), src_select, wire, machine=machine)
    peer = plan_of(Pool.of(dst.layout), dst_select, wire, machine=machine)
    there = on_device(dst_index) if device_lists else dst_index
    plan.copy_to(peer, src_index, there, tokens, Launch())
    assert_same(dst.memory, expected)
    assert_same(src.memory, before)


@settings(max_examples=60, deadline=None)
@given(case=cases(repeat=False))
def test_checksums_are_those_of_the_definition(case):
    held, select, wire, tokens, index, _ = case
    plan = plan_of(Pool.of(held.layout), select, wire, checksum=True)
    plain = Pool.of(held.layout).plan(select, wire, "reference")
    n = plain.nbytes(tokens)
    (whole, at), (dense, expected_at) = staging(n), staging(n)
    total = np.array([5], np.uint64)
    launch = Launch(sum_ptr=total.ctypes.data)
    expected = expected_sum(held, sorted(select), index, tokens)
    plan.gather(at, n, index, tokens, launch)
    assert int(total[0]) == (5 + expected) % 2**64
    plain.gather(expected_at, n, index, tokens)
    np.testing.assert_array_equal(whole[at - whole.ctypes.data :][:n], dense[expected_at - dense.ctypes.data :][:n])
    for memory in held.memory:
        memory[:] = 0
    plan.scatter(at, n, index, tokens, launch)
    assert int(total[0]) == (5 + 2 * expected) % 2**64
    assert expected == expected_sum(held, sorted(select), index, tokens)


@settings(max_examples=60, deadline=None)
@given(case=transfers(), wire=WIRES)
def test_a_copy_between_pools_sums_what_a_gather_does(case, wire):
    (src, select, index), (dst, dst_select, dst_index), tokens = case
    machine, totals = CpuMachine(), np.zeros(2, np.uint64)
    plan = plan_of(Pool.of(src.layout), select, wire, True, machine)
    peer = plan_of(Pool.of(dst.layout), dst_select, wire, True, machine)
    expected = moved(src, select, index, dst, dst_select, dst_index, tokens)
    plan.copy_to(peer, index, dst_index, tokens, Launch(sum_ptr=totals.ctypes.data))
    assert_same(dst.memory, expected)
    assert int(totals[0]) == expected_sum(src, sorted(select), index, tokens)


@st.composite
def wide_storages(draw, of):
    """Layouts whose every address is a multiple of 16; HND keeps an item's rows of a shard together."""
    pads = draw(st.dictionaries(st.sampled_from(["item", "shard", "role"]), st.sampled_from([16, 64]), max_size=1))
    rows, order = draw(st.sampled_from([1, 3, 4, 8])), draw(st.sampled_from([NHD, HND, HND]))
    return Stored(
        of, draw(st.integers(2, 8)), rows, draw(st.sampled_from([0, 0, 2])), order, pads, draw(st.sampled_from([0, 48]))
    )


@st.composite
def wide_cases(draw):
    """Two pools that store the same thing with runs for bulk copies, and tokens to move."""
    of = Logical(
        "kv",
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 1, 3])),
        1,
        draw(st.sampled_from([16, 48, 512, 1040])),
    )
    stored = [draw(wide_storages(of)) for _ in range(2)]
    tokens = {"kv": draw(ranges(*stored))}
    count = draw(st.integers(1, of.shards))
    select = [Select(key, of.shards - count, count) for key in of.view_keys()]
    index = [{"kv": draw(indexes(one, tokens["kv"], False))} for one in stored]
    return [hold([one], seed) for seed, one in enumerate(stored)], select, tokens, index, draw(WIRES)


@settings(max_examples=150, deadline=None)
@given(case=wide_cases(), max_sms=st.sampled_from([None, 1, 2]), device_lists=st.booleans())
def test_bulk_copies_are_the_reference(case, max_sms, device_lists):
    (src, dst), select, tokens, (index, dst_index), wire = case
    pool = Pool.of(src.layout)
    reference, machine = pool.plan(select, wire, "reference"), CpuMachine()
    plan, peer = (plan_of(Pool.of(one.layout), select, wire, machine=machine, bulk_from=16) for one in (src, dst))
    listed = on_device(index) if device_lists else index
    n = reference.nbytes(tokens)
    (whole, at), (expected, expected_at) = staging(n), staging(n)
    before = src.bytes()
    plan.gather(at, n, listed, tokens, Launch(None, max_sms))
    reference.gather(expected_at, n, index, tokens)
    found, right = (w[a - w.ctypes.data :][:n] for w, a in ((whole, at), (expected, expected_at)))
    np.testing.assert_array_equal(found, right)
    assert_same(src.memory, before)
    moved_to = moved(src, select, index, dst, select, dst_index, tokens)
    plan.copy_to(peer, listed, dst_index, tokens, Launch(None, max_sms))
    assert_same(dst.memory, moved_to)
    whole[at - whole.ctypes.data :][:n] = np.random.default_rng(7).integers(0, 256, n, dtype=np.uint8)
    plan.scatter(at, n, listed, tokens, Launch(None, max_sms))
    scattered = src.bytes()
    put_back(src, before)
    reference.scatter(at, n, index, tokens)
    assert_same(scattered, src.memory)


@pytest.mark.parametrize("order", [NHD, HND])
def test_a_plan_of_long_runs_takes_bulk_copies_where_they_are(order):
    of, built = Logical(shards=2, width=1024), {}
    held = hold([Stored(of, n_items=6, rows_per_item=4, order=order)])
    for capability in (80, 90):
        machine = CpuMachine()
        machine.capability = capability
        wire = TOKEN_MAJOR if order == NHD else HEAD_MAJOR
        plan = plan_of(Pool.of(held.layout), [Select(of.view_keys()[0], 0, 2)], wire, machine=machine)
        built[capability] = plan.uses_bulk
    assert built == {80: False, 90: True}


@pytest.mark.parametrize("bulk_from", [0, 16])
@pytest.mark.parametrize("wire", [TOKEN_MAJOR, HEAD_MAJOR])
@pytest.mark.parametrize("outside", [-1, 6, -(2**31), 2**31 - 1, 2**40])
def test_items_of_a_device_list_that_are_outside_the_pool_are_left_out(wire, outside, bulk_from):
    of = Logical(shards=3, width=32)
    held = hold([Stored(of, n_items=6, rows_per_item=4, order=HND)])
    dtype = np.int64 if abs(outside) > 2**31 else np.int32
    bad, good = np.array([2, outside, 5], dtype), np.array([2, 0, 5], dtype)
    select, tokens = [Select(of.view_keys()[0], 0, 2)], {"kv": (1, 11)}
    pool, before = Pool.of(held.layout), held.bytes()
    plan = plan_of(pool, select, wire, bulk_from=bulk_from)
    n = 1024
    (whole, at), (expected, expected_at) = staging(n), staging(n)
    index = {"kv": Index.of(bad)._replace(device="cuda:0")}
    plan.gather(at, n, index, tokens, Launch())
    pool.plan(select, wire, "reference").gather(expected_at, n, {"kv": Index.of(good)}, tokens)
    left_out = np.zeros(n, bool)
    left_out[3 * 64 : 7 * 64] = True  # three rows of item 0 before, four rows in the middle, in either order
    found, right = (w[a - w.ctypes.data :][:n] for w, a in ((whole, at), (expected, expected_at)))
    np.testing.assert_array_equal(found, np.where(left_out, 0xA5, right))
    plan.scatter(at, n, index, tokens, Launch())
    assert_same(held.memory, before)


def test_many_tiles_meet_few_ctas_and_several_groups():
    held = hold([Stored(Logical(roles=2, layers=2, width=w), n_items=200, rows_per_item=8) for w in (64,)])
    select = [Select(key, 0, 1) for key in Logical(roles=2, layers=2).view_keys()]
    machine, pool = CpuMachine(), Pool.of(held.layout)
    plan, reference = plan_of(pool, select, TOKEN_MAJOR, machine=machine), pool.plan(select, TOKEN_MAJOR, "reference")
    index, tokens = {"kv": Index.of(np.random.default_rng(1).permutation(200))}, {"kv": (3, 1591)}
    n = reference.nbytes(tokens)
    (whole, at), (expected, expected_at) = staging(n), staging(n)
    reference.gather(expected_at, n, index, tokens)
    plan.gather(at, n, index, tokens, Launch(None, 3))
    np.testing.assert_array_equal(
        whole[at - whole.ctypes.data :][:n], expected[expected_at - expected.ctypes.data :][:n]
    )
    assert machine.grids == [3]


def test_a_call_without_tokens_launches_nothing_and_needs_no_index():
    held = hold([Stored(Logical(width=32))])
    machine = CpuMachine()
    plan = plan_of(Pool.of(held.layout), [Select(Logical().view_keys()[0], 0, 1)], TOKEN_MAJOR, machine=machine)
    plan.gather(0, 0, {}, {"kv": (4, 4)}, Launch())
    plan.scatter(0, 0, {}, {}, Launch())
    assert machine.grids == []


REFUSED = {
    "item outside": ({"items": [1, 6, 3]}, "item 6 at position 1 of component 'kv'"),
    "staging too small": ({"short": 1}, "too small"),
    "staging misaligned": ({"skew": 8}, "not aligned"),
    "another device": ({"device": "cuda:1"}, "items of component 'kv' are on 'cuda:1'"),
    "captured": ({"capture": True}, "cannot be captured"),
}


@pytest.mark.parametrize("way", ["gather", "scatter"])
@pytest.mark.parametrize("misuse", REFUSED)
def test_misuse_launches_nothing(way, misuse):
    case, words = REFUSED[misuse]
    held = hold([Stored(Logical(width=32), n_items=6, rows_per_item=4)])
    machine = CpuMachine()
    machine.capture = case.get("capture", False)
    plan = plan_of(Pool.of(held.layout), [Select(Logical().view_keys()[0], 0, 1)], TOKEN_MAJOR, machine=machine)
    whole, at = staging(384, case.get("skew", 0))
    index = Index.of(np.array(case.get("items", [1, 2, 3])))._replace(device=case.get("device", "cpu"))
    with pytest.raises(UsageError, match=words):
        getattr(plan, way)(at, 384 - case.get("short", 0), {"kv": index}, {"kv": (0, 12)}, Launch())
    assert machine.grids == []
    assert (whole == 0xA5).all()


def test_a_scatter_refuses_an_item_named_twice():
    held = hold([Stored(Logical(width=32), n_items=6, rows_per_item=4)])
    plan = plan_of(Pool.of(held.layout), [Select(Logical().view_keys()[0], 0, 1)], TOKEN_MAJOR)
    with pytest.raises(UsageError, match="is a destination twice"):
        plan.scatter(staging(384)[1], 384, {"kv": Index.of(np.array([1, 2, 1]))}, {"kv": (0, 12)}, Launch())

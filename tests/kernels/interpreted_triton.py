"""Triton's kernels in its interpreter, against the reference bit for bit. test_triton.py runs this file by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pools import (
    FUSED,
    GUARD,
    HND,
    NHD,
    Logical,
    Stored,
    cells,
    hold,
    indexes,
    logicals,
    moved,
    ranges,
    selections,
    storages,
)

from pdstage.errors import UsageError
from pdstage.kernels import Index, Plan, Pool, triton_copy
from pdstage.kernels.checksum import checksum
from pdstage.kernels.pool import Recipe
from pdstage.kernels.triton_device import device_of
from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR, Select, Staging
from pdstage.tables import Table

FILL = 0xA5
WIRES = st.sampled_from([TOKEN_MAJOR, HEAD_MAJOR])
FEW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def triton_plan(held, select, wire=TOKEN_MAJOR, *, sums=False):
    """As `Pool.plan` makes it, but for the choice of a backend, which has none but host code for host memory."""
    pool = Pool.of(held.layout, keep=held)
    staging = Staging(held.layout, select)
    recipe = Recipe(held.layout, staging.select, wire, "cpu", sums)
    return Plan(pool, staging, "triton", recipe, triton_copy.compile_plan(recipe))


def aligned(nbytes):
    """`nbytes` of staging from a 16-byte boundary on, in guards: all of it, and where it begins."""
    whole = np.full(nbytes + 64, FILL, np.uint8)
    return whole, 16 + -whole.ctypes.data % 16


def address(array):
    return array.__array_interface__["data"][0]


def sum_of(held, select, index, tokens):
    """The checksum of what moves, by its definition."""
    total = 0
    for one, row in zip(sorted(select), Table.of(held.layout, select).rows, strict=True):
        name = one.key.component
        start, stop = tokens.get(name, (0, 0))
        if start == stop:
            continue
        view, per = held.layout.by_key()[one.key], row.tokens_per_row
        firsts = np.arange(start // per * per, stop, per)
        runs = [
            held.memory[i][at : at + view.width]
            for i, at in cells(held, one, index[name], index[name].keep, (start, stop))
        ]
        shaped = np.array(runs).reshape(len(firsts), one.count, view.segs, view.width)
        total += checksum(row.seed, firsts, row.first_shard, shaped)
    return total % 2**64


@st.composite
def cases(draw, repeat):
    """A pool of one or two components, some of it selected, token ranges and lists."""
    stored = [draw(storages(draw(logicals(name)))) for name in ("kv", "swa")[: draw(st.integers(1, 2))]]
    held = hold(stored, draw(st.integers(0, 99)))
    select = draw(selections(held.layout))
    tokens = {one.of.name: draw(ranges(one)) for one in stored}
    index = {one.of.name: draw(indexes(one, tokens[one.of.name], repeat)) for one in stored}
    return held, select, draw(WIRES), tokens, index


@FEW
@given(case=cases(repeat=True), sums=st.booleans(), max_sms=st.sampled_from([None, 1, 2, 7]))
def test_gather_is_the_reference(case, sums, max_sms):
    held, select, wire, tokens, index = case
    before = held.bytes()
    reference, plan = Pool.of(held.layout).plan(select, wire, "reference"), triton_plan(held, select, wire, sums=sums)
    n = plan.nbytes(tokens)
    expected, start = aligned(n)
    reference.gather(address(expected) + start, n, index, tokens)
    found, start_2 = aligned(n)
    total = np.array([5], np.uint64)
    plan.gather(address(found) + start_2, n, index, tokens, max_sms=max_sms, sum_ptr=address(total) if sums else 0)
    np.testing.assert_array_equal(found[start_2 : start_2 + n], expected[start : start + n])
    assert (found[:start_2] == FILL).all()
    assert (found[start_2 + n :] == FILL).all()
    for a, b in zip(before, held.memory, strict=True):
        np.testing.assert_array_equal(a, b)
    if sums:
        assert int(total[0]) == (sum_of(held, select, index, tokens) + 5) % 2**64


@FEW
@given(case=cases(repeat=False), sums=st.booleans(), max_sms=st.sampled_from([None, 1, 2, 7]))
def test_scatter_is_the_reference(case, sums, max_sms):
    held, select, wire, tokens, index = case
    before = held.bytes()
    reference, plan = Pool.of(held.layout).plan(select, wire, "reference"), triton_plan(held, select, wire, sums=sums)
    n = plan.nbytes(tokens)
    src, start = aligned(n)
    src[start : start + n] = np.random.default_rng(7).integers(0, 256, n, dtype=np.uint8)
    reference.scatter(address(src) + start, n, index, tokens)
    expected = held.bytes()
    for memory, original in zip(held.memory, before, strict=True):
        memory[:] = original
    total = np.zeros(1, np.uint64)
    plan.scatter(address(src) + start, n, index, tokens, max_sms=max_sms, sum_ptr=address(total) if sums else 0)
    for a, b in zip(expected, held.memory, strict=True):
        np.testing.assert_array_equal(a, b)
    if sums:
        assert int(total[0]) == sum_of(held, select, index, tokens)


@st.composite
def transfers(draw):
    """Two pools that store the same thing differently, and tokens to move."""
    of = draw(logicals())
    src, dst = draw(storages(of)), draw(storages(of))
    tokens = draw(ranges(src, dst))
    src_held, dst_held = hold([src], 1), hold([dst], 2)
    start, count = 0, draw(st.integers(1, of.shards))
    if count < of.shards:
        start = draw(st.integers(0, of.shards - count))
    select = [Select(key, start, count) for key in of.view_keys()]
    return (
        (src_held, {"kv": draw(indexes(src, tokens, True))}),
        (dst_held, {"kv": draw(indexes(dst, tokens, False))}),
        select,
        {"kv": tokens},
    )


@FEW
@given(case=transfers(), sums=st.booleans())
def test_a_copy_is_a_gather_and_a_scatter(case, sums):
    (src, src_index), (dst, dst_index), select, tokens = case
    expected = moved(src, select, src_index, dst, select, dst_index, tokens)
    expected_sum = sum_of(src, select, src_index, tokens)
    total = np.zeros(1, np.uint64)
    plan, peer = triton_plan(src, select, sums=sums), triton_plan(dst, select)
    plan.copy_to(peer, src_index, dst_index, tokens, sum_ptr=address(total) if sums else 0)
    for a, b in zip(expected, dst.memory, strict=True):
        np.testing.assert_array_equal(a, b)
    if sums:
        assert int(total[0]) == expected_sum
        assert sum_of(dst, select, dst_index, tokens) == expected_sum, "the same on both sides"


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("order", [NHD, HND, FUSED])
@pytest.mark.parametrize("width", [16, 4, 3])
def test_items_on_the_device_that_are_outside_the_pool_are_left_out(dtype, order, width):
    of = Logical(shards=2, width=width)
    held = hold([Stored(of, n_items=6, rows_per_item=2, order=order)])
    far = 2**31 - 1 if dtype is np.int32 else 2**62
    items = np.array([3, -1, 0, 6, far, -(2**31), 5], dtype)
    index = {"kv": Index.of(items)._replace(device="interpreter")}
    good = [i for i, item in enumerate(items) if 0 <= item < 6]
    (select,) = [Select(key, 0, 2) for key in of.view_keys()]
    tokens = {"kv": (0, 14)}
    plan = triton_plan(held, [select], sums=True)
    n, total = plan.nbytes(tokens), np.zeros(1, np.uint64)
    staged, start = aligned(n)
    plan.gather(address(staged) + start, n, index, tokens, sum_ptr=address(total))
    row_nbytes = 2 * width
    found = staged[start : start + 14 * row_nbytes].reshape(7, -1)
    at = cells(held, select, index["kv"], items.clip(0, 5), (0, 14))
    dense = np.array([held.memory[i][o : o + width] for i, o in at]).reshape(7, -1)
    np.testing.assert_array_equal(found[good], dense[good])
    assert (np.delete(found, good, axis=0) == FILL).all()
    kept = {"kv": Index.of(items[good])}
    row = Table.of(held.layout, [select]).rows[0]
    firsts = np.array([2 * i + r for i in good for r in (0, 1)])
    assert int(total[0]) == checksum(row.seed, firsts, 0, dense[good].reshape(-1, 2, 1, width))
    # Back into another pool: only the good items change, as if the others were not listed.
    dst, same = (hold([Stored(of, n_items=6, rows_per_item=2, order=order)], seed=3) for _ in range(2))
    triton_plan(dst, [select]).scatter(address(staged) + start, n, index, tokens)
    packed, begin = aligned(n)
    packed[begin : begin + len(good) * 2 * row_nbytes] = found[good].reshape(-1)
    Pool.of(same.layout).plan([select], TOKEN_MAJOR, "reference").scatter(
        address(packed) + begin, n, kept, {"kv": (0, 2 * len(good))}
    )
    np.testing.assert_array_equal(dst.memory[0], same.memory[0])
    # Straight from pool to pool: what either list has outside is left out.
    dst_items = np.array([0, 1, 2, 3, 4, 5, -1], dtype)
    both = [i for i in good if dst_items[i] >= 0]
    direct = hold([Stored(of, n_items=6, rows_per_item=2, order=order)], seed=3)
    result = moved(
        held, [select], {"kv": Index.of(items[both])}, direct, [select], {"kv": Index.of(dst_items[both])},
        {"kv": (0, 2 * len(both))},
    )  # fmt: skip
    peer_index = {"kv": Index.of(dst_items)._replace(device="interpreter")}
    triton_plan(held, [select]).copy_to(triton_plan(direct, [select]), index, peer_index, tokens)
    np.testing.assert_array_equal(direct.memory[0], result[0])


def test_products_are_of_64_bits():
    """A pool whose items and shards lie further apart than 32 bits reach."""
    far = 2**31 + 80
    of = Logical(shards=2, width=16)
    stored = Stored(of, n_items=2, rows_per_item=1, order=("role", "item", "block", "row", "shard", "seg"))
    held = hold([stored])
    (view,) = held.layout.views()
    memory = np.zeros(2 * far + 16 + 2 * GUARD + 16, np.uint8)
    start = -address(memory) % 16 + GUARD
    layout = type(held.layout).of(
        [type(held.layout.regions[0])(address(memory) + start, 2 * far + 16)],
        [_replaced(view, item_stride=far, shard_stride=far)],
    )
    cases = {(1, 1): 2 * far, (0, 1): far, (1, 0): far, (0, 0): 0}
    for (item, shard), offset in cases.items():
        memory[start + offset : start + offset + 16] = 1 + item + 2 * shard
        held.layout = layout
        plan = triton_plan(held, [Select(view.key, shard, 1)])
        staged, at = aligned(128)
        plan.gather(address(staged) + at, 128, {"kv": Index.of(np.array([item], np.int32))}, {"kv": (0, 1)})
        assert (staged[at : at + 16] == 1 + item + 2 * shard).all()
        assert (staged[at + 16 :] == FILL).all()


def _replaced(view, **changes):
    fields = {name: getattr(view, name) for name in type(view).__dataclass_fields__}
    return type(view)(**(fields | changes))


def test_widths_of_all_classes_share_a_call_of_three_launches(monkeypatch):
    widths = [64, 4, 8, 3, 16, 2, 1, 48]
    stored = [Stored(Logical(name="kv", width=width, layers=1), n_items=5, rows_per_item=3) for width in widths]
    helds = [hold([one], seed) for seed, one in enumerate(stored)]
    views, regions = [], []
    for number, one in enumerate(helds):
        (view,) = one.layout.views()
        views.append(_replaced(view, key=view.key._replace(layer=number), region=number))
        regions += one.layout.regions
    held = helds[0]
    held.layout = type(held.layout).of(regions, views)
    select = [Select(view.key, 0, 1) for view in views]
    index, tokens = {"kv": Index.of(np.array([4, 0, 2], np.int64))}, {"kv": (1, 8)}
    device, launches = device_of("cpu"), []
    launch = device.launch
    monkeypatch.setattr(device, "launch", lambda *args: (launches.append(args[0].ACCESS), launch(*args)))
    plan = triton_plan(held, select)
    n = plan.nbytes(tokens)
    found, at = aligned(n)
    plan.gather(address(found) + at, n, index, tokens)
    assert launches == [16, 4, 1]
    expected, start = aligned(n)
    Pool.of(held.layout).plan(select, TOKEN_MAJOR, "reference").gather(address(expected) + start, n, index, tokens)
    np.testing.assert_array_equal(found[at : at + n], expected[start : start + n])
    launches.clear()
    plan.gather(address(found) + at, 0, index, {"kv": (4, 4)})
    plan.scatter(address(found) + at, 0, {}, {})
    plan.copy_to(plan, {}, {}, {})
    assert launches == [], "no tokens, no launch"


MISUSE = {
    "item outside": ({"items": [1, 6, 2]}, "item 6 at position 1 of component 'kv'"),
    "item twice": ({"items": [1, 2, 1]}, "item 1 at position 2 of component 'kv' is a destination twice"),
    "list on another device": ({"device": "cuda:7"}, "are on 'cuda:7'"),
    "too few items on the device": ({"items": [1, 2], "device": "interpreter"}, "has 2 items where its tokens need 3"),
    "staging too small": ({"short": 1}, "too small"),
    "staging misaligned": ({"skew": 8}, "is not aligned"),
    "no checksum": ({"sum_ptr": 8}, "computes no checksums"),
}


@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_names_the_culprit_and_writes_nothing(misuse):
    case, words = MISUSE[misuse]
    of = Logical(width=16)
    held = hold([Stored(of, n_items=6, rows_per_item=4)])
    before = held.bytes()
    plan = triton_plan(held, [Select(of.view_keys()[0], 0, 1)])
    items = Index.of(np.array(case.get("items", [1, 2, 3]), np.int32))
    index, tokens = {"kv": items._replace(device=case.get("device", "cpu"))}, {"kv": (0, 12)}
    n = plan.nbytes(tokens)
    staged, start = aligned(n + 16)
    with pytest.raises(UsageError) as caught:
        plan.scatter(
            address(staged) + start + case.get("skew", 0), n - case.get("short", 0), index, tokens,
            sum_ptr=case.get("sum_ptr", 0),
        )  # fmt: skip
    assert words in str(caught.value)
    for a, b in zip(before, held.memory, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_call_of_more_pieces_than_32_bits_count_is_refused():
    of = Logical(width=1, shards=2)
    held = hold([Stored(of, rows_per_item=1, pads={"row": 1})])
    plan, tokens = triton_plan(held, [Select(of.view_keys()[0], 0, 2)]), {"kv": (0, 2**30)}
    index = {"kv": Index(1 << 40, 32, 2**30, device="interpreter")}
    with pytest.raises(UsageError, match="copy fewer tokens at once"):
        plan.gather(1 << 40, plan.nbytes(tokens), index, tokens)


def test_host_memory_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(triton_copy, "missing", str)
    of = Logical()
    with pytest.raises(UsageError, match="triton does not copy memory on 'cpu' here"):
        triton_plan(hold([Stored(of)]), [Select(of.view_keys()[0], 0, 1)])

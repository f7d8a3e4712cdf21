"""Triton's kernels in its interpreter, against the reference bit for bit. test_triton.py runs this file by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pools import FUSED, GUARD, HND, NHD, Logical, Stored, cells, hold, moved, transfers
from rigs import MISUSE, Rig, check, check_refused

from pdstage.errors import UsageError
from pdstage.kernels import Index, Plan, Pool, triton_copy
from pdstage.kernels.backend import Recipe
from pdstage.kernels.checksum import checksum
from pdstage.kernels.triton_device import device_of
from pdstage.plan import TOKEN_MAJOR, Select, Staging
from pdstage.plan.tables import Table
from tests.rows import drawn

FILL = 0xA5


class InterpreterRig(Rig):
    """Triton's kernels over host memory, in as many programs at once as `max_sms`."""

    skews = False

    def __init__(self, max_sms=None):
        super().__init__("triton")
        self.max_sms = max_sms

    def plan(self, layout, select, wire, checksum):
        """As `Pool.plan` makes it, but for the choice of a backend, which has none but host code for host memory."""
        staging = Staging(layout, select)
        recipe = Recipe(layout, staging.select, wire, "cpu", checksum)
        return Plan(Pool.of(layout), staging, "triton", recipe, triton_copy.compile_plan(recipe))


def triton_plan(held, select, *, sums=False):
    return InterpreterRig().plan(held.layout, select, TOKEN_MAJOR, sums)


def aligned(nbytes):
    """`nbytes` of staging from a 16-byte boundary on, in guards: all of it, and where it begins."""
    whole = np.full(nbytes + 64, FILL, np.uint8)
    return whole, 16 + -whole.ctypes.data % 16


def address(array):
    return array.__array_interface__["data"][0]


def on_device(indexes):
    """The same lists where the host does not look at them."""
    return {name: index._replace(device="interpreter") for name, index in indexes.items()}


@st.composite
def placed(draw):
    """A transfer, the lists of neither, either or both sides on the device."""
    transfer = draw(transfers())
    sides = {side: getattr(transfer, side) for side in ("src_index", "dst_index") if draw(st.booleans())}
    return replace(transfer, **{side: on_device(indexes) for side, indexes in sides.items()})


@settings(max_examples=drawn(10, full=25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(transfer=placed(), max_sms=st.sampled_from([None, 1, 2, 7]))
def test_every_transfer_is_the_references(transfer, max_sms):
    check(InterpreterRig(max_sms), transfer)


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


@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("n_destinations", [2, 8, 9])
def test_a_gather_to_several_destinations_is_one_launch_for_eight_of_them(monkeypatch, n_destinations, sums):
    of = Logical(width=32)
    held = hold([Stored(of, n_items=5, rows_per_item=3)])
    select, index, tokens = [Select(of.view_keys()[0], 0, 1)], {"kv": Index.of(np.array([4, 0, 2]))}, {"kv": (1, 8)}
    device, launches = device_of("cpu"), []
    launch = device.launch
    monkeypatch.setattr(device, "launch", lambda *args: (launches.append(args[0].MANY), launch(*args)))
    plan = triton_plan(held, select, sums=sums)
    n = plan.nbytes(tokens)
    total, placed = np.full(2, 5, np.uint64), [aligned(n) for _ in range(n_destinations + 1)]
    expected, *found = placed
    Pool.of(held.layout).plan(select, TOKEN_MAJOR, "reference", checksum=sums).gather(
        address(expected[0]) + expected[1], n, index, tokens, sum_ptr=address(total) if sums else 0
    )
    first, *also = (address(whole) + at for whole, at in found)
    plan.gather(first, n, index, tokens, also=also, sum_ptr=address(total) + 8 if sums else 0)
    for whole, at in found:
        np.testing.assert_array_equal(whole[at : at + n], expected[0][expected[1] : expected[1] + n])
        assert (whole[:at] == FILL).all()
        assert (whole[at + n :] == FILL).all()
    assert total[0] == total[1]
    assert launches == [True] + [False] * (n_destinations > 8)


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


OWN_MISUSE = {
    "list on another device": ({"device": "cuda:7"}, "are on 'cuda:7'"),
    "too few items on the device": ({"items": [1, 2], "device": "interpreter"}, "has 2 items where its tokens need 3"),
    "staging misaligned": ({"skew": 8}, "is not aligned"),
    "no checksum": ({"sum_ptr": 8}, "computes no checksums"),
}


@pytest.mark.parametrize(
    ("way", "misuse"),
    [
        (way, name)
        for way in ("gather", "scatter")
        for name in MISUSE | OWN_MISUSE
        if way == "scatter" or "repeated" not in name
    ],
)
def test_misuse_names_the_culprit_and_writes_nothing(way, misuse):
    check_refused(InterpreterRig(), way, *(MISUSE | OWN_MISUSE)[misuse])


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

"""Triton's kernels in its interpreter, against the reference bit for bit. test_triton.py runs this file by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import FUSED, HND, NHD, Logical, Stored, gathered, hold, kv_index, moved, on_device, placed, transfers
from rigs import REFERENCE, Rig, by_misuse, check, check_left_out, check_refused

from pdstage import Layout, Region, UsageError
from pdstage.kernels import Index, Plan, Pool, triton_copy
from pdstage.kernels.backend import Recipe
from pdstage.kernels.triton_device import device_of
from pdstage.kernels.triton_kernels import _over
from pdstage.plan import TOKEN_MAJOR, Select, Staging
from tests.rows import drawn


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


@settings(max_examples=drawn(10, full=25))
@given(transfer=placed(transfers(), "interpreter"), max_sms=st.sampled_from([None, 1, 2, 7]))
def test_every_transfer_is_the_references(transfer, max_sms):
    check(InterpreterRig(max_sms), transfer)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("order", [NHD, HND, FUSED])
@pytest.mark.parametrize("width", [16, 4, 3])
def test_items_on_the_device_that_are_outside_the_pool_are_left_out(dtype, order, width):
    of, tokens = Logical(shards=2, width=width), {"kv": (0, 14)}
    held, other = (hold([Stored(of, n_items=6, rows_per_item=2, order=order)], seed) for seed in (0, 3))
    select, rig = of.whole(), InterpreterRig()
    items = np.array([3, -1, 0, 6, 2**31 - 1 if dtype is np.int32 else 2**62, -(2**31), 5], dtype)
    inside, index, total = (items >= 0) & (items < 6), {"kv": Index.of(items)}, np.zeros(2, np.uint64)
    left_out = np.flatnonzero(np.repeat(~inside, 2 * 2 * width))
    check_left_out(rig, held, select, TOKEN_MAJOR, items, tokens["kv"], left_out, "interpreter")
    plan, peer = (rig.plan(one.layout, select, TOKEN_MAJOR, True) for one in (held, other))
    reference = REFERENCE.plan(held.layout, select, TOKEN_MAJOR, True)
    gathered(plan, on_device(index, "interpreter"), tokens, sum_ptr=total.ctypes.data)
    for at in np.flatnonzero(inside).tolist():
        gathered(reference, index, {"kv": (2 * at, 2 * at + 2)}, sum_ptr=total.ctypes.data + 8)
    assert total[0] == total[1]
    # Straight from pool to pool: what either list has outside is left out.
    peer_items = np.array([0, 1, 2, 3, 4, 5, -1], dtype)
    both = inside & (peer_items >= 0)
    here, there = ({"kv": Index.of(one[both])} for one in (items, peer_items))
    result = moved(held, select, here, other, select, there, {"kv": (0, 2 * int(both.sum()))})
    plan.copy_to(peer, on_device(index, "interpreter"), on_device({"kv": Index.of(peer_items)}, "interpreter"), tokens)
    np.testing.assert_array_equal(other.memory, result)


@triton.jit
def _divided(n, reciprocal, into, count: tl.constexpr):
    at = tl.arange(0, count)
    tl.store(into + at, _over(tl.load(n + at), tl.load(reciprocal)))


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 641, 2**16 + 1, 2**31 - 1])
def test_a_division_by_its_reciprocal_is_exact(divisor):
    most, last = 2**31 - 2, (2**31 - 2) // divisor * divisor
    n = torch.tensor([0, 1, 2, min(divisor, most), divisor - 1, max(last - 1, 0), last, most], dtype=torch.int32)
    into = torch.empty_like(n)
    _divided[1,](n, torch.tensor([triton_copy.reciprocal(divisor)]), into, len(n))
    assert into.tolist() == [one // divisor for one in n.tolist()]


def test_products_are_of_64_bits():
    """A pool whose items and shards lie further apart than 32 bits reach."""
    far, of = 2**31 + 80, Logical(shards=2, width=16)
    (view,) = hold([Stored(of, n_items=2, rows_per_item=1)]).layout.views()
    memory = np.zeros(2 * far + 80, np.uint8)
    memory = memory[-memory.ctypes.data % 64 :][: 2 * far + 16]
    layout = Layout.of([Region(memory.ctypes.data, memory.size)], [replace(view, item_stride=far, shard_stride=far)])
    for item, shard in ((1, 1), (0, 1), (1, 0), (0, 0)):
        memory[(item + shard) * far :][:16] = 1 + item + 2 * shard
        plan = InterpreterRig().plan(layout, [Select(view.key, shard, 1)], TOKEN_MAJOR, False)
        staged = gathered(plan, kv_index([item], np.int32), {"kv": (0, 1)})
        assert (staged[:16] == 1 + item + 2 * shard).all()
        assert (staged[16:] == 0xA5).all()


def launched(monkeypatch):
    """The kernels that are launched from now on."""
    device, launches = device_of("cpu"), []
    launch = device.launch
    monkeypatch.setattr(device, "launch", lambda *args: (launches.append(args[0]), launch(*args)))
    return launches


def test_widths_of_all_classes_share_a_call_of_three_launches(monkeypatch):
    of = [Logical(f"{n}", width=width) for n, width in enumerate([64, 4, 8, 3, 16, 2, 1, 48])]
    held = hold([Stored(one, n_items=5, rows_per_item=3) for one in of])
    views = [
        replace(view, key=view.key._replace(component="kv", layer=n)) for n, view in enumerate(held.layout.views())
    ]
    layout, select = Layout.of(held.layout.regions, views), [Select(view.key, 0, 1) for view in views]
    plan, reference = (rig.plan(layout, select, TOKEN_MAJOR, False) for rig in (InterpreterRig(), REFERENCE))
    index, tokens, launches = kv_index([4, 0, 2]), {"kv": (1, 8)}, launched(monkeypatch)
    found = gathered(plan, index, tokens)
    np.testing.assert_array_equal(found, gathered(reference, index, tokens))
    assert [one.ACCESS for one in launches] == [16, 4, 1]
    launches.clear()
    plan.gather(found.ctypes.data, 0, index, {"kv": (4, 4)})
    plan.scatter(found.ctypes.data, 0, {}, {})
    plan.copy_to(plan, {}, {}, {})
    assert launches == [], "no tokens, no launch"


@by_misuse(
    elsewhere=({"device": "cuda:7"}, "are on 'cuda:7'"),
    too_few=({"items": [1, 2], "device": "interpreter"}, "has 2 items where its tokens need 3"),
    askew=({"skew": 8}, "is not aligned"),
    unsummed=({"sum_ptr": 8}, "computes no checksums"),
)
def test_misuse_names_the_culprit_and_writes_nothing(way, case, words):
    check_refused(InterpreterRig(), way, case, words)


def test_a_call_of_more_pieces_than_32_bits_count_is_refused():
    of = Logical(width=1, shards=2)
    held = hold([Stored(of, rows_per_item=1, pads={"row": 1})])
    plan, tokens = InterpreterRig().plan(held.layout, of.whole(), TOKEN_MAJOR, False), {"kv": (0, 2**30)}
    index = {"kv": Index(1 << 40, 32, 2**30, device="interpreter")}
    with pytest.raises(UsageError, match="copy fewer tokens at once"):
        plan.gather(1 << 40, plan.nbytes(tokens), index, tokens)


def test_host_memory_without_the_interpreter_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(triton_copy, "missing", str)
    of = Logical()
    with pytest.raises(UsageError, match="triton does not copy memory on 'cpu' here"):
        InterpreterRig().plan(hold([Stored(of)]).layout, of.whole(), TOKEN_MAJOR, False)

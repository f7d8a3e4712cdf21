"""The CUDA kernels' sources against the reference, bit for bit, run by a test double of the device on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_on_cpu import COMPILER, CpuMachine, plan_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pools import HND, NHD, Logical, Stored, Transfer, hold, indexes, ranges, transfers
from rigs import MISUSE, Rig, check, check_refused

from pdstage.errors import UsageError
from pdstage.kernels import Index, Plan, Pool
from pdstage.kernels.backend import Launch, Recipe
from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR, Select, Staging

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def staging(nbytes, skew=0):
    """`nbytes` of staging that begin `skew` bytes past a 64-byte boundary, and its address."""
    whole = np.full(nbytes + 256, 0xA5, np.uint8)
    return whole, whole.ctypes.data + -whole.ctypes.data % 64 + skew


class OnDevice:
    """A compiled plan whose lists of items lie on the device, where the host does not look at them."""

    def __init__(self, compiled, max_sms):
        self.compiled, self.max_sms = compiled, max_sms

    def gather(self, ptr, n, indexes, tokens, launch):
        self.compiled.gather(ptr, n, on_device(indexes), tokens, launch._replace(max_sms=self.max_sms))

    def scatter(self, ptr, n, indexes, tokens, launch):
        self.compiled.scatter(ptr, n, on_device(indexes), tokens, launch._replace(max_sms=self.max_sms))

    def copy_to(self, peer, indexes, peer_indexes, tokens, launch):
        launch = launch._replace(max_sms=self.max_sms)
        self.compiled.copy_to(peer.compiled, on_device(indexes), on_device(peer_indexes), tokens, launch)


def on_device(index):
    return {name: one._replace(device="cuda:0") for name, one in index.items()}


class CpuRig(Rig):
    """The double's memory is the host's, at any multiple of 16."""

    skews = False

    def __init__(self, *, on_device=False, max_sms=None, bulk_from=None, listed=CpuMachine.listed):
        super().__init__("cuda")
        self.machine, self.on_device, self.max_sms, self.bulk_from = CpuMachine(), on_device, max_sms, bulk_from
        self.machine.listed = listed

    def plan(self, layout, select, wire, checksum):
        pool = Pool.of(layout)
        compiled = plan_of(pool, select, wire, checksum, self.machine, self.bulk_from)
        made = OnDevice(compiled, self.max_sms) if self.on_device else compiled
        recipe = Recipe(layout, Staging(layout, select).select, wire, "cpu", checksum)
        return Plan(pool, Staging(layout, select), "cuda", recipe, made)


RIGS = [
    CpuRig(),
    CpuRig(listed=()),
    CpuRig(on_device=True, max_sms=1),
    CpuRig(bulk_from=16),
    CpuRig(on_device=True, max_sms=3, bulk_from=16),
]
by_rig = pytest.mark.parametrize(
    "rig", RIGS, ids=["host lists", "uploaded lists", "device lists", "bulk copies", "bulk copies of device lists"]
)
EXAMPLES = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@by_rig
@EXAMPLES
@given(transfer=transfers())
def test_every_transfer_is_the_references(rig, transfer):
    check(rig, transfer)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@st.composite
def wide_storages(draw, of):
    """Layouts whose every address is a multiple of 16; HND keeps an item's rows of a shard together."""
    pads = draw(st.dictionaries(st.sampled_from(["item", "shard", "role"]), st.sampled_from([16, 64]), max_size=1))
    rows, order = draw(st.sampled_from([1, 3, 4, 8])), draw(st.sampled_from([NHD, HND, HND]))
    return Stored(
        of, draw(st.integers(2, 8)), rows, draw(st.sampled_from([0, 0, 2])), order, pads, draw(st.sampled_from([0, 48]))
    )


@st.composite
def wide_transfers(draw):
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
    index = [{"kv": draw(indexes(one, tokens["kv"], side == 0))} for side, one in enumerate(stored)]
    held = [hold([one], seed) for seed, one in enumerate(stored)]
    wire = draw(st.sampled_from([TOKEN_MAJOR, HEAD_MAJOR]))
    return Transfer(*held, select, select, *index, tokens, wire, draw(st.booleans()))


@by_rig
@EXAMPLES
@given(transfer=wide_transfers())
def test_transfers_of_long_runs_are_the_references(rig, transfer):
    check(rig, transfer)


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


@pytest.mark.parametrize("way", ["gather", "scatter"])
@pytest.mark.parametrize("misuse", [name for name in MISUSE if "repeated" not in name])
def test_misuse_is_refused_by_name(way, misuse):
    rig = CpuRig()
    check_refused(rig, way, *MISUSE[misuse])
    assert rig.machine.grids == []


@pytest.mark.parametrize("misuse", [name for name in MISUSE if "repeated" in name])
def test_a_scatter_refuses_an_item_named_twice(misuse):
    check_refused(CpuRig(), "scatter", *MISUSE[misuse])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("n_items", "uploads"), [(6, 0), (7, 0), (20, 0), (21, 1)])
def test_lists_that_fit_travel_in_the_parameters(n_items, uploads, dtype):
    held = hold([Stored(Logical(width=32), n_items=30, rows_per_item=2)])
    select, pool = [Select(Logical().view_keys()[0], 0, 1)], Pool.of(held.layout)
    machine, uploaded = CpuMachine(), []
    upload, machine.upload = machine.upload, lambda *call: (uploaded.append(call), upload(*call))
    plan, reference = plan_of(pool, select, TOKEN_MAJOR, machine=machine), pool.plan(select, TOKEN_MAJOR, "reference")
    index = {"kv": Index.of(np.random.default_rng(n_items).permutation(30)[: n_items + 2].astype(dtype))}
    tokens = {"kv": (3, 3 + 2 * n_items - 1)}  # neither the first item nor the last is read
    n = reference.nbytes(tokens)
    (whole, at), (expected, expected_at) = staging(n), staging(n)
    reference.gather(expected_at, n, index, tokens)
    uploaded.clear()  # the plan's tables
    plan.gather(at, n, index, tokens, Launch())
    assert_same([whole[at - whole.ctypes.data :][:n]], [expected[expected_at - expected.ctypes.data :][:n]])
    assert len(uploaded) == uploads


def test_a_list_that_fits_may_be_captured():
    """The graph keeps the kernel's parameters, and the items with them."""
    held = hold([Stored(Logical(width=32), n_items=6, rows_per_item=4)])
    machine = CpuMachine()
    machine.capture = True
    plan = plan_of(Pool.of(held.layout), [Select(Logical().view_keys()[0], 0, 1)], TOKEN_MAJOR, machine=machine)
    plan.gather(staging(384)[1], 384, {"kv": Index.of(np.array([1, 2, 3]))}, {"kv": (0, 12)}, Launch())
    assert machine.grids


REFUSED = {
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
    machine.capture, machine.listed = case.get("capture", False), ()
    plan = plan_of(Pool.of(held.layout), [Select(Logical().view_keys()[0], 0, 1)], TOKEN_MAJOR, machine=machine)
    whole, at = staging(384, case.get("skew", 0))
    index = Index.of(np.array([1, 2, 3]))._replace(device=case.get("device", "cpu"))
    with pytest.raises(UsageError, match=words):
        getattr(plan, way)(at, 384, {"kv": index}, {"kv": (0, 12)}, Launch())
    assert machine.grids == []
    assert (whole == 0xA5).all()

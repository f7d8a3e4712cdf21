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
from pdstage.kernels import Index, Plan, Pool, cuda_copy
from pdstage.kernels.backend import Launch, Recipe
from pdstage.kernels.cuda_tables import access_of
from pdstage.kernels.device import Group
from pdstage.kernels.index_ring import IndexRing
from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR, Select, Staging
from tests.rows import drawn, everything, rows

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def staging(nbytes, skew=0):
    """`nbytes` of staging that begin `skew` bytes past a 64-byte boundary, and its address."""
    whole = np.full(nbytes + 256, 0xA5, np.uint8)
    return whole, whole.ctypes.data + -whole.ctypes.data % 64 + skew


class OnDevice:
    """A compiled plan whose lists of items lie on the device, where the host does not look at them."""

    def __init__(self, compiled, max_sms):
        self.compiled, self.max_sms, self.fans_out = compiled, max_sms, compiled.fans_out

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

    def __init__(self, *, on_device=False, max_sms=None, bulk_from=None, listed=CpuMachine.listed, widest=16):
        super().__init__("cuda")
        self.machine, self.on_device, self.max_sms, self.bulk_from = CpuMachine(), on_device, max_sms, bulk_from
        self.machine.listed, self.machine.widest = listed, widest

    def plan(self, layout, select, wire, checksum):
        pool = Pool.of(layout)
        compiled = plan_of(pool, select, wire, checksum, self.machine, self.bulk_from)
        made = OnDevice(compiled, self.max_sms) if self.on_device else compiled
        recipe = Recipe(layout, Staging(layout, select).select, wire, "cpu", checksum)
        return Plan(pool, Staging(layout, select), "cuda", recipe, made)


RIGS = [
    CpuRig(listed=CpuMachine.listed if everything else CpuMachine.listed[1:]),
    CpuRig(listed=()),
    CpuRig(on_device=True, max_sms=1),
    CpuRig(bulk_from=16),
    CpuRig(on_device=True, max_sms=3, bulk_from=16),
    CpuRig(on_device=True, widest=32),
]
by_rig = pytest.mark.parametrize(
    "rig",
    rows(RIGS, full=RIGS[1:2]),  # lists that are uploaded lie on the device, as those of the next rig
    ids=["host lists", "uploaded lists", "device lists", "bulk copies", "bulk copies of device lists", "32 bytes"],
)
EXAMPLES = settings(max_examples=drawn(5, full=10), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@by_rig
@EXAMPLES
@given(transfer=transfers())
def test_every_transfer_is_the_references(rig, transfer):
    check(rig, transfer)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@st.composite
def wide_storages(draw, of, access):
    """Layouts whose every address is a multiple of `access`; HND keeps an item's rows of a shard together."""
    pads = draw(st.dictionaries(st.sampled_from(["item", "shard", "role"]), st.sampled_from([access, 64]), max_size=1))
    rows, order = draw(st.sampled_from([1, 3, 4, 8])), draw(st.sampled_from([NHD, HND, HND]))
    base = draw(st.sampled_from([0, 3 * access]))
    return Stored(of, draw(st.integers(2, 8)), rows, draw(st.sampled_from([0, 0, 2])), order, pads, base)


@st.composite
def wide_transfers(draw, access=16):
    """Two pools that store the same thing with runs for bulk copies, and tokens to move."""
    of = Logical(
        "kv",
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 1, 3])),
        1,
        draw(st.sampled_from([access, 3 * access, 512, 1024 + access])),
    )
    stored = [draw(wide_storages(of, access)) for _ in range(2)]
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


@EXAMPLES
@given(transfer=wide_transfers(32))
def test_transfers_of_multiples_of_32_bytes_are_the_references_by_32_bytes_alone(transfer):
    rig = CpuRig(on_device=True, bulk_from=0, widest=32)
    check(rig, transfer)
    assert set(rig.machine.accesses) <= {32}


def one_transfer(src, dst, width=96, skew=0, checksum=False):
    """Of a few tokens, fewer than a tile's, between pools that are stored as `src` and `dst` say."""
    of = Logical(shards=2, width=width)
    held = [hold([Stored(of, n_items=4, rows_per_item=8, **how)], seed) for seed, how in enumerate((src, dst))]
    index = [{"kv": Index.of(np.array(items))} for items in ([2, 0, 3], [1, 2, 0])]
    select = [Select(of.view_keys()[0], 0, 2)]
    return Transfer(*held, select, select, *index, {"kv": (3, 22)}, TOKEN_MAJOR, checksum, skew)


# How the pools and staging lie, and what a gather, one to several, a scatter and a copy from pool to pool then take.
LESS_THAN_32 = {
    "nothing": ({}, {}, {}, [32, 32, 32, 32]),
    "staging": ({}, {}, {"skew": 16}, [16, 16, 16, 32]),
    "the pool's base": ({"base": 16}, {}, {}, [16, 16, 32, 16]),
    "the other's base": ({}, {"base": 48}, {}, [32, 32, 16, 16]),
    "rows": ({"pads": {"shard": 16}}, {}, {}, [16, 16, 32, 16]),
    "items": ({}, {"pads": {"row": 16}}, {}, [32, 32, 16, 16]),
    "runs": ({"pads": {"seg": 16}}, {"pads": {"seg": 16}}, {"width": 48}, [16, 16, 16, 16]),
    "runs that two make even": ({"pads": {"seg": 16}}, {}, {"width": 16}, [16, 16, 32, 16]),
}


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("less", LESS_THAN_32)
def test_what_is_no_multiple_of_32_bytes_is_accessed_in_16(less, checksum):
    src, dst, more, taken = LESS_THAN_32[less]
    rig = CpuRig(on_device=True, widest=32)
    if checksum and less == "runs that two make even":
        taken = [16] * 4  # sums tell shards apart
    check(rig, one_transfer(src, dst, checksum=checksum, **more))
    assert rig.machine.accesses == taken
    narrower = CpuRig(on_device=True)
    check(narrower, one_transfer(src, dst, checksum=checksum, **more))
    assert set(narrower.machine.accesses) == {16}, "a device without such accesses"


def test_one_group_of_16_bytes_keeps_its_launch_to_16():
    of = [Logical("kv", width=64), Logical("index", width=48), Logical("scale", width=24)]
    held = hold([Stored(one, n_items=20, rows_per_item=8) for one in of])
    select = [[Select(key, 0, 1) for key in one.view_keys()] for one in of]
    index, tokens = {one.name: Index.of(np.arange(20)) for one in of}, {one.name: (3, 151) for one in of}
    _whole, at = staging(1 << 16)
    for chosen, taken in ((select[0], [32]), (select[0] + select[1], [16]), (select[0] + select[2], [32, 16])):
        machine = CpuMachine()
        machine.widest = 32
        plan_of(Pool.of(held.layout), chosen, TOKEN_MAJOR, machine=machine).gather(at, 1 << 16, index, tokens, Launch())
        assert machine.accesses == taken


WAYS = {"gather": {cuda_copy.TO_STAGING}, "scatter": {cuda_copy.FROM_STAGING}, "copy_to": set()}


@pytest.mark.parametrize("only", WAYS)
def test_a_plan_for_one_call_loads_the_kernels_of_that_call(only):
    """And those of another when it is made all the same."""
    held, machine = hold([Stored(Logical())]), CpuMachine()
    select = Staging(held.layout, [Select(Logical().view_keys()[0], 0, 1)]).select
    recipe = Recipe(held.layout, select, TOKEN_MAJOR, "cuda:0", checksum=False, only=only)
    plan = cuda_copy.CudaPlan(recipe, machine, IndexRing(machine, 1, 64))
    assert {dict(macros)["PDSTAGE_WAY"] for _, macros in machine._functions} == WAYS[only]
    plan.scatter(staging(512)[1], 512, {"kv": Index.of(np.array([2]))}, {"kv": (0, 1)}, Launch())
    assert len(machine.launches) == 1


def test_every_destination_must_allow_32_bytes():
    held, machine = hold([Stored(Logical(width=64))]), CpuMachine()
    machine.widest = 32
    plan = plan_of(Pool.of(held.layout), [Select(Logical().view_keys()[0], 0, 1)], TOKEN_MAJOR, machine=machine)
    places = [staging(512)[1] for _ in range(3)]
    for skew in (0, 32, 16):
        launch = Launch(also=(places[1], places[2] + skew))
        plan.gather(places[0], 512, {"kv": Index.of(np.array([2, 0, 3]))}, {"kv": (0, 6)}, launch)
    assert machine.accesses == [32, 32, 16]


@pytest.mark.parametrize("wire", [TOKEN_MAJOR, HEAD_MAJOR])
@pytest.mark.parametrize("pads", [{"shard": 16}, {"row": 16}], ids=["rows", "two rows"])
def test_bulk_copies_begin_inside_rows_that_follow_each_other_and_are_no_item(wire, pads):
    of = Logical(width=32)
    held = [hold([Stored(of, n_items=4, rows_per_item=8, block=2, pads=pads)], seed) for seed in range(2)]
    index = [{"kv": Index.of(np.array(items))} for items in ([2, 0, 3], [1, 2, 0])]
    select = [Select(of.view_keys()[0], 0, 1)]
    check(CpuRig(bulk_from=16), Transfer(*held, select, select, *index, {"kv": (3, 22)}, wire, False))


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


@pytest.mark.parametrize(("bulk_from", "widest"), [(0, 16), (0, 32), (16, 16)])
@pytest.mark.parametrize("wire", [TOKEN_MAJOR, HEAD_MAJOR])
@pytest.mark.parametrize("outside", [-1, 6, -(2**31), 2**31 - 1, 2**40])
def test_items_of_a_device_list_that_are_outside_the_pool_are_left_out(wire, outside, bulk_from, widest):
    of = Logical(shards=3, width=32)
    held = hold([Stored(of, n_items=6, rows_per_item=4, order=HND)])
    dtype = np.int64 if abs(outside) > 2**31 else np.int32
    bad, good = np.array([2, outside, 5], dtype), np.array([2, 0, 5], dtype)
    select, tokens = [Select(of.view_keys()[0], 0, 2)], {"kv": (1, 11)}
    pool, before, machine = Pool.of(held.layout), held.bytes(), CpuMachine()
    machine.widest = widest
    plan = plan_of(pool, select, wire, bulk_from=bulk_from, machine=machine)
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


@pytest.mark.parametrize("bulk_from", [0, 16])
def test_what_is_left_out_of_one_stage_is_of_no_other(bulk_from):
    """Eight stages of each warp's ring, some with items outside the pool, in turn with whole ones."""
    held = hold([Stored(Logical(width=64), n_items=64, rows_per_item=4)])
    select, pool, before = [Select(Logical().view_keys()[0], 0, 1)], Pool.of(held.layout), held.bytes()
    rng = np.random.default_rng(3)
    good = rng.permutation(64)
    outside = rng.random(64) < 0.1
    lists = {"kv": Index.of(np.where(outside, 64, good))._replace(device="cuda:0")}
    tokens, n = {"kv": (0, 256)}, 64 * 256
    plan = plan_of(pool, select, TOKEN_MAJOR, bulk_from=bulk_from)
    (whole, at), (expected, expected_at) = staging(n), staging(n)
    pool.plan(select, TOKEN_MAJOR, "reference").gather(expected_at, n, {"kv": Index.of(good)}, tokens)
    plan.gather(at, n, lists, tokens, Launch(None, 1))
    found, right = (w[a - w.ctypes.data :][:n] for w, a in ((whole, at), (expected, expected_at)))
    np.testing.assert_array_equal(found, np.where(np.repeat(outside, 256), 0xA5, right))
    plan.scatter(at, n, lists, tokens, Launch(None, 1))
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
    assert machine.launches == [(3, 2 * machine.threads)]


@pytest.mark.parametrize("bulk_from", [0, 16])
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("n_destinations", [1, 2, 8, 9, 17])
def test_a_gather_to_several_destinations_is_one_launch_for_eight_of_them(n_destinations, checksum, bulk_from):
    held = hold([Stored(Logical(roles=2, width=64), n_items=40, rows_per_item=4)])
    select, machine = [Select(key, 0, 1) for key in Logical(roles=2).view_keys()], CpuMachine()
    pool, index, tokens = Pool.of(held.layout), {"kv": Index.of(np.arange(40)[::-1].copy())}, {"kv": (3, 151)}
    rig = CpuRig(bulk_from=bulk_from)
    rig.machine = machine
    plan, reference = (one.plan(held.layout, select, TOKEN_MAJOR, checksum) for one in (rig, Rig("reference")))
    n = reference.nbytes(tokens)
    (expected, expected_at), sums = staging(n), np.zeros(2, np.uint64)
    sum_ptrs = [sums.ctypes.data, sums.ctypes.data + 8] if checksum else [0, 0]
    reference.gather(expected_at, n, index, tokens, sum_ptr=sum_ptrs[0])
    placed = [staging(n, 16 * (at % 4)) for at in range(n_destinations)]
    first, *also = (at for _, at in placed)
    plan.gather(first, n, index, tokens, also=also, sum_ptr=sum_ptrs[1])
    right = expected[expected_at - expected.ctypes.data :][:n]
    for whole, at in placed:
        before = at - whole.ctypes.data
        np.testing.assert_array_equal(whole[before:][:n], right)
        assert (whole[:before] == 0xA5).all() and (whole[before + n :] == 0xA5).all()
    assert sums[0] == sums[1]
    assert len(machine.launches) == -(-n_destinations // 8)
    assert pool.layout is held.layout


def test_a_destination_that_is_not_aligned_is_refused_before_the_first_is_written():
    held = hold([Stored(Logical(width=32), n_items=6, rows_per_item=4)])
    rigs = [CpuRig(), Rig("reference")]
    for rig in rigs:
        plan = rig.plan(held.layout, [Select(Logical().view_keys()[0], 0, 1)], TOKEN_MAJOR, False)
        placed = [staging(384), staging(384), staging(384, 8)]
        with pytest.raises(UsageError, match="not aligned as the first"):
            plan.gather(
                placed[0][1], 384, {"kv": Index.of(np.array([1, 2, 3]))}, {"kv": (0, 12)},
                also=[at for _, at in placed[1:]],
            )  # fmt: skip
        assert all((whole == 0xA5).all() for whole, _ in placed)


def test_what_is_left_out_of_a_stage_is_left_out_at_every_destination():
    held = hold([Stored(Logical(width=64), n_items=64, rows_per_item=4)])
    select, rng = [Select(Logical().view_keys()[0], 0, 1)], np.random.default_rng(3)
    good, outside = rng.permutation(64), rng.random(64) < 0.1
    lists = {"kv": Index.of(np.where(outside, 64, good))._replace(device="cuda:0")}
    tokens, n = {"kv": (0, 256)}, 64 * 256
    (expected, expected_at), placed = staging(n), [staging(n) for _ in range(3)]
    Pool.of(held.layout).plan(select, TOKEN_MAJOR, "reference").gather(expected_at, n, {"kv": Index.of(good)}, tokens)
    right = expected[expected_at - expected.ctypes.data :][:n]
    for bulk_from in (0, 16):
        plan = plan_of(Pool.of(held.layout), select, TOKEN_MAJOR, bulk_from=bulk_from)
        first, *also = (at for _, at in placed)
        plan.gather(first, n, lists, tokens, Launch(None, 1, also=tuple(also)))
        for whole, at in placed:
            found = whole[at - whole.ctypes.data :][:n]
            np.testing.assert_array_equal(found, np.where(np.repeat(outside, 256), 0xA5, right))
            whole[:] = 0xA5


def mixed():
    """A pool with views of 64-byte rows and of 24-byte rows, and all of it selected."""
    of = [Logical("kv", width=64), Logical("index", width=24)]
    held = hold([Stored(one, n_items=20, rows_per_item=8) for one in of])
    return held, [Select(key, 0, 1) for one in of for key in one.view_keys()]


@pytest.mark.parametrize(("room", "uploads"), [(0, 1), (40, 0)])
def test_narrow_views_have_a_launch_of_their_own_and_leave_the_others_wide(room, uploads):
    """Both launches find the lists of all components, in parameters or uploaded once."""
    held, select = mixed()
    machine, pool, uploaded = CpuMachine(), Pool.of(held.layout), []
    machine.listed = (room,) if room else ()
    upload, machine.upload = machine.upload, lambda *call: (uploaded.append(call), upload(*call))
    plan, reference = plan_of(pool, select, TOKEN_MAJOR, machine=machine), pool.plan(select, TOKEN_MAJOR, "reference")
    order = np.random.default_rng(1).permutation(20)
    index, tokens = {"kv": Index.of(order), "index": Index.of(order)}, {"kv": (3, 151), "index": (0, 160)}
    n, before = reference.nbytes(tokens), held.bytes()
    (whole, at), (expected, expected_at) = staging(n), staging(n)
    reference.gather(expected_at, n, index, tokens)
    uploaded.clear()  # the plan's tables
    plan.gather(at, n, index, tokens, Launch())
    np.testing.assert_array_equal(
        whole[at - whole.ctypes.data :][:n], expected[expected_at - expected.ctypes.data :][:n]
    )
    assert len(machine.launches) == 2
    assert len(uploaded) == uploads
    plan.scatter(at, n, index, tokens, Launch())
    assert_same(held.memory, before)
    plan.gather(at, n, index, {"kv": (3, 151)}, Launch())
    assert len(machine.launches) == 5, "nothing to copy, nothing to launch"


@pytest.mark.parametrize(("bulk_from", "threads"), [(0, 2 * CpuMachine.threads), (16, cuda_copy.BULK_THREADS)])
def test_a_call_held_to_few_multiprocessors_takes_as_many_ctas_that_fill_one_each(bulk_from, threads):
    held = hold([Stored(Logical(width=256), n_items=200, rows_per_item=8)])
    select, machine = [Select(Logical().view_keys()[0], 0, 1)], CpuMachine()
    plan = plan_of(Pool.of(held.layout), select, TOKEN_MAJOR, machine=machine, bulk_from=bulk_from)
    _whole, at = staging(1600 * 256)
    index = {"kv": Index.of(np.arange(200))}
    plan.gather(at, 1600 * 256, index, {"kv": (0, 1600)}, Launch(None, 3))
    assert machine.launches == [(3, threads)]
    plan.gather(at, 1600 * 256, index, {"kv": (0, 1600)}, Launch())
    assert machine.launches[1] == ((machine.n_sms, threads) if bulk_from else (2 * machine.n_sms, machine.threads))


def test_items_that_reach_further_than_32_bits_count_take_narrower_accesses():
    """64 GiB of one item: nothing that has been seen, and not to be wrong in silence."""
    group = device_group(shards=2, shard_stride=2**36 - 512)
    assert access_of(group, group) == 16
    for change in ({"shard_stride": 2**36}, {"item_stride": 2**36}, {"shard_stride": -16}):
        far = group._replace(**change)
        assert access_of(far, group) == access_of(group, far) == 8
    assert access_of(group._replace(shards=1, shard_stride=2**36), group) == 16, "a stride that nothing takes"


def device_group(**fields):
    zero = dict.fromkeys(Group._fields, 0)
    ones = dict.fromkeys(("n_views", "outer_rows", "rows_per_item", "shards", "segs", "tokens_per_row"), 1)
    return Group(**zero | ones | {"width": 256, "access": 16, "item_stride": 256, "n_items": 4} | fields)


@pytest.mark.parametrize(("capability", "nbytes"), [(80, 0), (89, 0), (90, 2048), (100, 4096), (120, 0)])
def test_a_device_takes_the_last_known_run_length_for_bulk_copies(monkeypatch, capability, nbytes):
    monkeypatch.setattr(cuda_copy, "BULK_FROM_NBYTES", {90: 2048, 100: 4096, 120: 0})
    assert cuda_copy.bulk_from_nbytes(capability) == nbytes


def test_a_call_without_tokens_launches_nothing_and_needs_no_index():
    held = hold([Stored(Logical(width=32))])
    machine = CpuMachine()
    plan = plan_of(Pool.of(held.layout), [Select(Logical().view_keys()[0], 0, 1)], TOKEN_MAJOR, machine=machine)
    plan.gather(0, 0, {}, {"kv": (4, 4)}, Launch())
    plan.scatter(0, 0, {}, {}, Launch())
    assert machine.launches == []


@pytest.mark.parametrize("way", ["gather", "scatter"])
@pytest.mark.parametrize("misuse", [name for name in MISUSE if "repeated" not in name])
def test_misuse_is_refused_by_name(way, misuse):
    rig = CpuRig()
    check_refused(rig, way, *MISUSE[misuse])
    assert rig.machine.launches == []


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
    assert machine.launches


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
    assert machine.launches == []
    assert (whole == 0xA5).all()

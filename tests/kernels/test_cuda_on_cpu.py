"""The CUDA kernels' sources against the reference, bit for bit, run by a test double of the device on the CPU."""

from __future__ import annotations

import mmap
from functools import cached_property

import numpy as np
import pytest
from cuda_on_cpu import COMPILER, CpuMachine
from hypothesis import given, settings
from pools import (
    HND,
    NHD,
    Logical,
    Stored,
    Transfer,
    gathered,
    hold,
    kv_index,
    placed,
    staging,
    transfers,
    wide_transfers,
)
from rigs import REFERENCE, Rig, by_misuse, check, check_left_out, check_refused

from pdstage.bench.shapes import runs_layout
from pdstage.kernels import Index, Plan, Pool, cuda_copy
from pdstage.kernels.backend import Launch, Recipe
from pdstage.kernels.cuda_tables import access_of
from pdstage.kernels.device import Group
from pdstage.kernels.index_ring import IndexRing
from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR, Select, Staging
from tests.rows import drawn, everything, rows

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


class CpuRig(Rig):
    """The double's memory is the host's, at any multiple of 16; runs of `bulk_from` bytes on take the bulk copies."""

    skews = False

    def __init__(self, *, max_sms=None, bulk_from=None, listed=CpuMachine.small, widest=16):
        super().__init__("cuda")
        self.max_sms, self.bulk_from, self._of_the_device = max_sms, bulk_from, (listed, widest)

    @cached_property
    def machine(self):
        made = CpuMachine()
        made.listed, made.widest = self._of_the_device
        return made

    def plan(self, layout, select, wire, checksum):
        staging, ring = Staging(layout, select), IndexRing(self.machine, 1, 64)
        on_device, here = (Recipe(layout, staging.select, wire, device, checksum) for device in ("cuda:0", "cpu"))
        made = cuda_copy.CudaPlan(on_device, self.machine, ring, self.bulk_from)
        return Plan(Pool.of(layout), staging, "cuda", here, made)


RIGS = [
    CpuRig(listed=CpuMachine.small if everything else CpuMachine.small[1:]),
    CpuRig(listed=(), max_sms=1),
    CpuRig(bulk_from=16),
    CpuRig(bulk_from=16, max_sms=3),
    CpuRig(widest=32, listed=()),
]
by_rig = pytest.mark.parametrize("rig", RIGS, ids=["listed", "uploaded", "bulk", "bulk of few", "32 bytes"])
EXAMPLES = settings(max_examples=drawn(10, full=20))


@by_rig
@EXAMPLES
@given(transfer=placed(transfers() | wide_transfers(), "cuda:0"))
def test_every_transfer_is_the_references(rig, transfer):
    check(rig, transfer)


@EXAMPLES
@given(transfer=wide_transfers(32))
def test_transfers_of_multiples_of_32_bytes_are_the_references_by_32_bytes_alone(transfer):
    rig = CpuRig(listed=(), bulk_from=0, widest=32)
    check(rig, transfer)
    assert set(rig.machine.accesses) <= {32}


def one_transfer(src, dst, width=96, skew=0, checksum=False, shards=2, wire=TOKEN_MAJOR):
    """Of a few tokens, fewer than a tile's, between pools that are stored as `src` and `dst` say."""
    of = Logical(shards=shards, width=width)
    held = [hold([Stored(of, n_items=4, rows_per_item=8, **how)], seed) for seed, how in enumerate((src, dst))]
    index = [kv_index(items) for items in ([2, 0, 3], [1, 2, 0])]
    return Transfer(*held, of.whole(), of.whole(), *index, {"kv": (3, 22)}, wire, checksum, skew)


# How the pools and staging lie, and what a gather, a scatter and a copy from pool to pool then take.
LESS_THAN_32 = {
    "nothing": ({}, {}, {}, [32, 32, 32]),
    "staging": ({}, {}, {"skew": 16}, [16, 16, 32]),
    "the pool's base": ({"base": 16}, {}, {}, [16, 32, 16]),
    "the other's base": ({}, {"base": 48}, {}, [32, 16, 16]),
    "rows": ({"pads": {"shard": 16}}, {}, {}, [16, 32, 16]),
    "items": ({}, {"pads": {"row": 16}}, {}, [32, 16, 16]),
    "runs": ({"pads": {"seg": 16}}, {"pads": {"seg": 16}}, {"width": 48}, [16, 16, 16]),
    "runs that two make even": ({"pads": {"seg": 16}}, {}, {"width": 16}, [16, 32, 16]),
}


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("less", LESS_THAN_32)
def test_what_is_no_multiple_of_32_bytes_is_accessed_in_16(less, checksum):
    src, dst, more, taken = LESS_THAN_32[less]
    rig = CpuRig(listed=(), widest=32)
    if checksum and less == "runs that two make even":
        taken = [16] * 3  # sums tell shards apart
    check(rig, one_transfer(src, dst, checksum=checksum, **more))
    assert rig.machine.accesses == taken
    narrower = CpuRig(listed=())
    check(narrower, one_transfer(src, dst, checksum=checksum, **more))
    assert set(narrower.machine.accesses) == {16}, "a device without such accesses"


@pytest.mark.parametrize("far", rows([False, True], full={True}))
@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4, 6, 8, 12, 24, 33, 132])
def test_narrow_runs_of_any_length_are_the_references(monkeypatch, width, checksum, far):
    """By accesses as wide as the run allows, of which a unit has one to sixteen; with offsets of either size."""
    monkeypatch.setattr(cuda_copy, "counts", lambda *_: not far)
    rig = CpuRig(listed=())
    check(rig, one_transfer({"pads": {"shard": width}}, {}, width=width, checksum=checksum))
    assert set(rig.machine.accesses) <= {width & -width, 2 * width & -2 * width}, "cells that lie together are one run"


def stored(*of, n_items=64, rows=4, order=NHD):
    """A pool, and all of it selected."""
    of = of or (Logical(width=64),)
    held = hold([Stored(one, n_items=n_items, rows_per_item=rows, order=order) for one in of])
    return held, [selected for one in of for selected in one.whole()]


def test_one_group_of_16_bytes_keeps_its_launch_to_16():
    of = [Logical("kv", width=64), Logical("index", width=48), Logical("scale", width=24)]
    held, select = stored(*of, n_items=20, rows=8)
    index, tokens = {one.name: Index.of(np.arange(20)) for one in of}, {one.name: (3, 151) for one in of}
    for chosen, taken in ((select[:1], [32]), (select[:2], [16]), (select[::2], [32, 8])):
        rig = CpuRig(widest=32)
        gathered(rig.plan(held.layout, chosen, TOKEN_MAJOR, False), index, tokens)
        assert rig.machine.accesses == taken


WAYS = {"gather": {cuda_copy.TO_STAGING}, "scatter": {cuda_copy.FROM_STAGING}, "copy_to": set()}


@pytest.mark.parametrize("only", WAYS)
def test_a_plan_for_one_call_loads_the_kernels_of_that_call(only):
    """And those of another when it is made all the same."""
    (held, select), device = stored(), CpuMachine()
    recipe = Recipe(held.layout, Staging(held.layout, select).select, TOKEN_MAJOR, "cuda:0", checksum=False, only=only)
    plan = cuda_copy.CudaPlan(recipe, device, IndexRing(device, 1, 64))
    assert {dict(macros)["PDSTAGE_WAY"] for _, macros in device._kernels} == WAYS[only]
    plan.scatter(staging(512).ctypes.data, 512, kv_index([2]), {"kv": (0, 1)}, Launch())
    assert len(device.launches) == 1


@pytest.mark.parametrize("order", [NHD, HND])
def test_a_plan_of_long_runs_takes_bulk_copies_where_they_are(order):
    held, select = stored(Logical(shards=2, width=1024), n_items=6, order=order)
    for capability, source in ((80, cuda_copy.SOURCE), (90, cuda_copy.BULK_SOURCE)):
        rig = CpuRig()
        rig.machine.capability = capability
        rig.plan(held.layout, select, TOKEN_MAJOR if order == NHD else HEAD_MAJOR, False)
        assert {name for name, _ in rig.machine._kernels} == {source}


@pytest.mark.parametrize(("bulk_from", "widest"), [(0, 16), (0, 32), (16, 16)])
@pytest.mark.parametrize("wire", [TOKEN_MAJOR, HEAD_MAJOR])
@pytest.mark.parametrize("outside", [-1, 6, -(2**31), 2**31 - 1, 2**40])
def test_items_of_a_device_list_that_are_outside_the_pool_are_left_out(wire, outside, bulk_from, widest):
    held, select = stored(Logical(shards=3, width=32), n_items=6, order=HND)
    select, dtype = [select[0]._replace(count=2)], np.int64 if abs(outside) > 2**31 else np.int32
    rig = CpuRig(bulk_from=bulk_from, widest=widest)
    # Three rows of the first item, four of the second, in either order of two heads.
    check_left_out(rig, held, select, wire, np.array([2, outside, 5], dtype), (1, 11), slice(3 * 64, 7 * 64))


@pytest.mark.parametrize("bulk_from", [0, 16])
def test_what_is_left_out_of_one_stage_is_of_no_other(bulk_from):
    """Eight stages of each warp's ring, some with items outside the pool, in turn with whole ones."""
    (held, select), rng = stored(), np.random.default_rng(3)
    outside = rng.random(64) < 0.1
    rig, items = CpuRig(bulk_from=bulk_from), np.where(outside, 64, rng.permutation(64))
    check_left_out(rig, held, select, TOKEN_MAJOR, items, (0, 256), np.repeat(outside, 256))


def plans(rig, held, select):
    """The rig's, and the reference's."""
    return (one.plan(held.layout, select, TOKEN_MAJOR, False) for one in (rig, REFERENCE))


def uploads_of(device):
    """What is uploaded from now on."""
    uploaded, upload = [], device.upload
    device.upload = lambda *call: (uploaded.append(call), upload(*call))
    return uploaded


@pytest.mark.parametrize(("room", "uploads"), [(0, 1), (40, 0)])
def test_narrow_views_have_a_launch_of_their_own_and_leave_the_others_wide(room, uploads):
    """Both launches find the lists of all components, in parameters or uploaded once."""
    held, select = stored(Logical("kv", width=64), Logical("index", width=24), n_items=20, rows=8)
    rig = CpuRig(listed=(room,) if room else ())
    plan, reference = plans(rig, held, select)
    order, uploaded = np.random.default_rng(1).permutation(20), uploads_of(rig.machine)
    index, tokens = {"kv": Index.of(order), "index": Index.of(order)}, {"kv": (3, 151), "index": (0, 160)}
    np.testing.assert_array_equal(gathered(plan, index, tokens), gathered(reference, index, tokens))
    assert len(rig.machine.launches) == 2
    assert len(uploaded) == uploads
    gathered(plan, index, {"kv": (3, 151)})
    assert len(rig.machine.launches) == 3, "nothing to copy, nothing to launch"
    plan.gather(0, 0, {}, {"kv": (4, 4)})
    plan.scatter(0, 0, {}, {})
    assert len(rig.machine.launches) == 3


@pytest.mark.parametrize(("bulk_from", "threads"), [(0, 2 * CpuMachine.threads), (16, cuda_copy.BULK_THREADS)])
def test_a_call_held_to_few_multiprocessors_takes_as_many_ctas_that_fill_one_each(bulk_from, threads):
    held, select = stored(Logical(roles=2, layers=2, width=64), n_items=200, rows=8)
    index, tokens = {"kv": Index.of(np.random.default_rng(1).permutation(200))}, {"kv": (3, 1591)}
    rig = CpuRig(bulk_from=bulk_from)
    plan, reference = plans(rig, held, select)
    want = gathered(reference, index, tokens)
    for max_sms in (3, None):
        np.testing.assert_array_equal(gathered(plan, index, tokens, max_sms=max_sms), want)
    device = rig.machine
    whole = (device.n_sms, threads) if bulk_from else (2 * device.n_sms, device.threads)
    assert device.launches == [(3, threads), whole]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("n_items", "uploads"), [(6, 0), (7, 0), (20, 0), (21, 1)])
def test_lists_that_fit_travel_in_the_parameters(n_items, uploads, dtype):
    """And may be captured: a graph keeps the kernel's parameters."""
    (held, select), rig = stored(Logical(width=32), n_items=30, rows=2), CpuRig()
    plan, reference = plans(rig, held, select)
    index = {"kv": Index.of(np.random.default_rng(n_items).permutation(30)[: n_items + 2].astype(dtype))}
    tokens = {"kv": (3, 3 + 2 * n_items - 1)}  # neither the first item nor the last is read
    uploaded, rig.machine.capture = uploads_of(rig.machine), not uploads
    np.testing.assert_array_equal(gathered(plan, index, tokens), gathered(reference, index, tokens))
    assert len(uploaded) == uploads


@pytest.mark.parametrize("wire", [TOKEN_MAJOR, HEAD_MAJOR])
@pytest.mark.parametrize("pads", [{"shard": 16}, {"row": 16}], ids=["rows", "two rows"])
def test_bulk_copies_begin_inside_rows_that_follow_each_other_and_are_no_item(wire, pads):
    lies = {"block": 2, "pads": pads}
    check(CpuRig(bulk_from=16), one_transfer(lies, lies, width=32, shards=1, wire=wire))


def test_items_that_reach_further_than_32_bits_count_take_narrower_accesses():
    """64 GiB of one item: nothing that has been seen, and not to be wrong in silence."""
    ones = dict.fromkeys(("n_views", "outer_rows", "rows_per_item", "shards", "segs", "tokens_per_row"), 1)
    fields = dict.fromkeys(Group._fields, 0) | ones | {"width": 256, "access": 16, "item_stride": 256, "n_items": 4}
    group = Group(**fields)._replace(shards=2, shard_stride=2**36 - 512)
    assert access_of(group, group) == 16
    for change in ({"shard_stride": 2**36}, {"item_stride": 2**36}, {"shard_stride": -16}):
        far = group._replace(**change)
        assert access_of(far, group) == access_of(group, far) == 8
    assert access_of(group._replace(shards=1, shard_stride=2**36), group) == 16, "a stride that nothing takes"


@pytest.mark.parametrize(("capability", "nbytes"), [(80, 0), (89, 0), (90, 2048), (100, 4096), (120, 0)])
def test_a_device_takes_the_last_known_run_length_for_bulk_copies(monkeypatch, capability, nbytes):
    monkeypatch.setattr(cuda_copy, "BULK_FROM_NBYTES", {90: 2048, 100: 4096, 120: 0})
    assert cuda_copy.bulk_from_nbytes(capability) == nbytes


@by_misuse(
    askew=({"skew": 8}, "not aligned"),
    elsewhere=({"device": "cuda:1"}, "items of component 'kv' are on 'cuda:1'"),
    captured=({"capture": True}, "cannot be captured"),
)
def test_misuse_is_refused_by_name_and_launches_nothing(way, case, words):
    rig = CpuRig(listed=())
    rig.machine.capture = case.get("capture", False)
    check_refused(rig, way, case, words)
    assert rig.machine.launches == []


_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux


def test_pages_at_the_end_of_a_pool_of_40_gib():
    """Of which this machine has only the pages that are touched."""
    n_items, width, last = 40 << 12, 1 << 18, np.array([-1, -3], np.int64)
    reserved = mmap.mmap(-1, n_items * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    memory = np.frombuffer(reserved, np.uint8).reshape(n_items, width)
    layout = runs_layout(width, n_items, 1, base=memory.ctypes.data, kind="cpu")
    select = [Select(view.key, 0, 1) for view in layout.views()]
    rng = np.random.default_rng(5)
    for rig in (CpuRig(), CpuRig(listed=(), bulk_from=16)):
        memory[last] = data = rng.integers(0, 256, (2, width), np.uint8)
        plan = rig.plan(layout, select, TOKEN_MAJOR, False)
        index, tokens = {"kv": Index.of(n_items + last)}, {"kv": (0, 2)}
        staged = gathered(plan, index, tokens)
        np.testing.assert_array_equal(staged[: 2 * width], data.reshape(-1))
        memory[last] = 0
        plan.scatter(staged.ctypes.data, staged.nbytes, index, tokens)
        np.testing.assert_array_equal(memory[last], data)

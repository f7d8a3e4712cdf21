"""The converting CUDA kernels' sources against the reference, bit for bit, run by a test double of the device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from coded import ALL_BF16, INLINE, converted, edge_cells, mixed, offered_by, pools_of
from cuda_on_cpu import COMPILER, CpuMachine, convert_plan_of
from hypothesis import HealthCheck, given, settings
from pools import HND, Logical, Stored, hold

from pdstage.errors import UsageError
from pdstage.kernels import Index, Pool
from pdstage.kernels.backend import Launch
from pdstage.plan import Select
from pdstage.plan.convert import Encoding, fp8_token_head, mxfp8, pair, reformat
from tests.rows import drawn

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

APART = [(fp8_token_head("data"), fp8_token_head("scale", "r0"))]
APART += [(mxfp8(rule, "data"), mxfp8(rule, "scale", "r0")) for rule in ("floor", "ceil")]


def on_device(index):
    return {name: one._replace(device="cuda:0") for name, one in index.items()}


def outcome(plan, nbytes, held, indexes, tokens, scatters):
    """What a gather leaves in staging, and around it, and a scatter of anything in the pool; and both checksums."""
    before = held.bytes()
    sums = np.full(2, 41, np.uint64)
    out = np.full(nbytes + 160, 0xA5, np.uint8)
    at = 16 + -out.ctypes.data % 16
    plan.gather(out.ctypes.data + at, nbytes, indexes, tokens, Launch(None, 3, sums.ctypes.data))
    found = [out[at : at + nbytes], np.unique(np.r_[out[:at], out[at + nbytes :]])]
    if scatters:
        anything = np.random.default_rng(9).integers(0, 256, nbytes + 16, dtype=np.uint8)
        begin = -anything.ctypes.data % 16
        anything = np.roll(anything, begin)
        plan.scatter(anything.ctypes.data + begin, nbytes, indexes, tokens, Launch(None, 3, sums[1:].ctypes.data))
    found += [sums, *held.bytes()]
    for memory, old in zip(held.memory, before, strict=True):
        memory[:] = old
    return found


def check(held, own, staged, select, indexes, tokens, machine=None, lists=dict):
    pool = Pool.of(own)
    reference = pool.plan(select, backend="reference", staged=staged, checksum=True)
    plan = convert_plan_of(pool, staged, select, checksum=True, machine=machine)
    scatters = all(coding.decodable for coding in plan._codings)
    n = reference.nbytes(tokens)
    found = outcome(plan, n, held, lists(indexes), tokens, scatters)
    want = outcome(reference._compiled, n, held, indexes, tokens, scatters)
    for one, other in zip(found, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("format,companion", [(format, "") for format in INLINE] + APART)
@pytest.mark.parametrize("cells", [ALL_BF16.reshape(-1, 128), edge_cells(96), edge_cells(32)], ids=["128", "96", "32"])
def test_every_value_is_the_references(format, companion, cells):
    held, own, peer, rows = pools_of(format, cells, companion=companion)
    staged = pair(own, peer).offered
    select = [Select(view.key, 0, view.shards) for view in staged.views()]
    check(held, own, staged, select, {"kv": Index.of(np.arange(rows, dtype=np.int32))}, {"kv": (0, rows)})


@settings(max_examples=drawn(20, full=60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(converted())
def test_every_layout_is_the_references(drawn):
    held, own, formats, (first, count), index, range_, *_ = drawn
    select = [Select(key, first, count) for key in formats]
    check(held, own, offered_by(own, formats), select, {"kv": index}, {"kv": range_})


@pytest.mark.parametrize("n", [513, 1024])
@pytest.mark.parametrize("format", INLINE)
def test_heads_of_more_than_a_warp_of_units_are_the_references(format, n):
    if not Encoding.parse(format).nbytes(n):
        pytest.skip("no whole blocks")
    of = Logical("kv", 1, 2, 2, 1, 2 * n)
    held = hold([Stored(of, n_items=3, rows_per_item=2, order=HND)])
    own = reformat(held.layout, dict.fromkeys(of.view_keys(), "bf16"))
    staged = offered_by(own, dict.fromkeys(of.view_keys(), format))
    index = {"kv": Index.of(np.array([2, 0], np.int32))}
    select = [Select(key, 0, 2) for key in of.view_keys()]
    check(held, own, staged, select, index, {"kv": (1, 4)}, lists=on_device)


@pytest.mark.parametrize("widest", [16, 32])
@pytest.mark.parametrize("format", INLINE)
def test_what_is_copied_goes_with_what_is_converted(format, widest):
    machine = CpuMachine()
    machine.widest = widest
    check(*mixed(format), machine=machine)
    assert len(machine.launches) == 8, "of each call and each checksum one launch for wide accesses, one for narrow"


@pytest.mark.parametrize("format,apart", [(INLINE[2], False), (APART[1][0], True)])
def test_layers_of_one_shape_are_one_group_however_they_are_scaled(format, apart):
    of = Logical("kv", 6, 2, 2, 1, 128)
    held = hold([Stored(of, n_items=5, rows_per_item=4)])
    own = reformat(held.layout, dict.fromkeys(of.view_keys(), "bf16"))
    formats = dict.fromkeys(of.view_keys(), format)
    if apart:
        data = Encoding.parse(format)
        formats |= {
            key._replace(role=f"{key.role}_scale"): str(replace(data, part="scale", of=key.role))
            for key in of.view_keys()
        }
    staged = offered_by(own, formats)
    select = [Select(key, 0, 2) for key in formats]
    plan = convert_plan_of(Pool.of(own), staged, select)
    assert plan._tables.addresses[2] == (4 if apart else 1)
    index = {"kv": Index.of(np.array([3, 0, 4], np.int64))}
    check(held, own, staged, select, index, {"kv": (2, 11)}, lists=on_device)


def test_items_of_a_device_list_that_are_outside_the_pool_are_left_out():
    of = Logical("kv", 1, 1, 1, 1, 64)
    held = hold([Stored(of, n_items=4, rows_per_item=1)])
    own = reformat(held.layout, dict.fromkeys(of.view_keys(), "bf16"))
    for format in INLINE:
        staged = offered_by(own, dict.fromkeys(of.view_keys(), format))
        plan, before = convert_plan_of(Pool.of(own), staged, [Select(of.view_keys()[0], 0, 1)]), held.bytes()
        n, width = plan._staging.nbytes({"kv": (0, 3)}), Encoding.parse(format).nbytes(32)
        out = np.full(n + 16, 0xA5, np.uint8)
        at = -out.ctypes.data % 16
        index = on_device({"kv": Index.of(np.array([1, 4, -1], np.int32))})
        plan.gather(out.ctypes.data + at, n, index, {"kv": (0, 3)}, Launch())
        assert (out[at + width :] == 0xA5).all()
        plan.scatter(out.ctypes.data + at, n, index, {"kv": (1, 3)}, Launch())
        for one, other in zip(held.memory, before, strict=True):
            np.testing.assert_array_equal(one, other)


REFUSED = {"too small": ({"short": 1}, "too small"), "misaligned": ({"skew": 8}, "not aligned")}


@pytest.mark.parametrize("way", ["gather", "scatter"])
@pytest.mark.parametrize("misuse", REFUSED)
def test_misuse_launches_nothing(way, misuse):
    case, words = REFUSED[misuse]
    machine = CpuMachine()
    _, own, staged, select, indexes, tokens = mixed(INLINE[0])
    plan = convert_plan_of(Pool.of(own), staged, select, machine=machine)
    n = plan._staging.nbytes(tokens)
    out = np.full(n + 32, 0xA5, np.uint8)
    at = -out.ctypes.data % 16 + case.get("skew", 0)
    with pytest.raises(UsageError, match=words):
        getattr(plan, way)(out.ctypes.data + at, n - case.get("short", 0), indexes, tokens, Launch())
    assert machine.launches == []

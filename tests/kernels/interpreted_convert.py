"""Triton's conversions in its interpreter, to the reference's bit. test_triton.py runs this file by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from coded import ALL_BF16, INLINE, edge_cells, few_edges, mixed, offered_by, pools_of
from pools import HND, NHD, Logical, Stored, hold

from pdstage.kernels import Plan, Pool, triton_convert
from pdstage.kernels.backend import Recipe
from pdstage.kernels.triton_device import ConvertVariant, SumVariant, device_of
from pdstage.plan import TOKEN_MAJOR, Select, Staging
from pdstage.plan.convert import Encoding, codings, fp8_tensor, fp8_token_head, mxfp8, pair, reformat
from pdstage.plan.tables import Index
from tests import rows

APART = [(fp8_token_head("data"), fp8_token_head("scale", "r0"))]
APART += [(mxfp8(rule, "data"), mxfp8(rule, "scale", "r0")) for rule in ("floor", "ceil")]


def plan_of(backend, own, staged, select):
    """As `Pool.plan` makes it; Triton's interpreter is no backend for host memory there."""
    if backend != "triton":
        return Pool.of(own).plan(select, backend=backend, staged=staged, checksum=True)
    staging = Staging(staged, select)
    recipe = Recipe(own, staging.select, TOKEN_MAJOR, "cpu", True, 1, staged)
    recipe = recipe._replace(codings=tuple(codings(own, staged, staging.select)))
    return Plan(Pool.of(own), staging, "triton", recipe, triton_convert.compile_plan(recipe))


def outcome(backend, held, own, staged, select, indexes, tokens, max_sms=None):
    """What a gather leaves in staging, and a scatter of anything in the pool; and both checksums, added to 41."""
    plan, before, sums = plan_of(backend, own, staged, select), held.bytes(), np.full(2, 41, np.uint64)
    out = np.full(plan.nbytes(tokens) + 160, 0xA5, np.uint8)
    at = 16 + -out.ctypes.data % 16
    summed = {"max_sms": max_sms, "sum_ptr": sums.ctypes.data}
    plan.gather(out.ctypes.data + at, plan.nbytes(tokens), indexes, tokens, **summed)
    anything = np.random.default_rng(9).integers(0, 256, out.size, dtype=np.uint8)
    begin = -anything.ctypes.data % 16
    anything = np.roll(anything, begin)
    summed["sum_ptr"] += 8
    plan.scatter(anything.ctypes.data + begin, plan.nbytes(tokens), indexes, tokens, **summed)
    after = [*held.bytes(), sums]
    for memory, old in zip(held.memory, before, strict=True):
        memory[:] = old
    return out[at : at + plan.nbytes(tokens)], np.r_[out[:at], out[at + plan.nbytes(tokens) :]], after


def check(held, own, staged, select, indexes, tokens, max_sms=None):
    found = outcome("triton", held, own, staged, select, indexes, tokens, max_sms)
    want = outcome("reference", held, own, staged, select, indexes, tokens)
    np.testing.assert_array_equal(found[0], want[0])
    assert (found[1] == 0xA5).all()
    for one, other in zip(found[2], want[2], strict=True):
        np.testing.assert_array_equal(one, other)


def chosen_cells():
    """Of all values one in 16, and of the greatest values of cells one in 15; FULL=1 takes all."""
    everything, edges = ALL_BF16.reshape(-1, 128), edge_cells(96)
    return (everything, edges) if rows.everything else (ALL_BF16[::16].reshape(-1, 128), few_edges(edges))


@pytest.mark.parametrize("format,companion", [(format, "") for format in INLINE] + APART)
def test_every_value_is_the_references(format, companion):
    for cells in chosen_cells():
        held, own, peer, n = pools_of(format, cells, companion=companion)
        staged = pair(own, peer).offered
        select = [Select(view.key, 0, view.shards) for view in staged.views()]
        check(held, own, staged, select, {"kv": Index.of(np.arange(n, dtype=np.int32))}, {"kv": (0, n)})


@pytest.mark.parametrize(
    ("order", "n"),
    [
        (NHD, 7),
        (HND, 32),
        pytest.param(NHD, 64, marks=pytest.mark.full),
        pytest.param(HND, 64, marks=pytest.mark.full),
        pytest.param(HND, 7, marks=pytest.mark.full),
    ],
)
def test_every_layout_is_the_references(order, n):
    for number, format in enumerate([*INLINE, *(data for data, _ in APART)]):
        if not Encoding.parse(format).nbytes(n):
            continue
        of = Logical("kv", 2, 2, 3, 1, 2 * n, 1 + number % 2)
        stored = Stored(of, n_items=6, rows_per_item=4, block=number % 3, order=order, pads={"shard": 2 * (number % 2)})
        held = hold([stored], number)
        own = reformat(held.layout, dict.fromkeys(of.view_keys(), "bf16"))
        formats = dict.fromkeys(of.view_keys(), format)
        if Encoding.parse(format).part == "data":
            data = Encoding.parse(format)
            formats |= {
                key._replace(role=f"{key.role}_scale"): str(replace(data, part="scale", of=key.role))
                for key in of.view_keys()
            }
        else:
            formats |= {key: fp8_tensor(0.1 * (1 + key.layer)) for key in of.view_keys() if "tensor" in format}
        staged = offered_by(own, formats)
        select = [Select(key, 1, 2) for key in formats]
        items = Index.of(np.array([3, 0, 5, 1], np.int64 if number % 2 else np.int32), 2 * of.tokens_per_row)
        per = of.tokens_per_row
        check(held, own, staged, select, {"kv": items}, {"kv": (3 * per, 15 * per)}, max_sms=2)


@pytest.mark.parametrize("format", INLINE)
def test_what_is_copied_goes_with_what_is_converted(format):
    check(*mixed(format))


def test_a_call_that_asks_for_no_sum_makes_no_launch_for_one(monkeypatch):
    held, own, peer, n = pools_of(fp8_tensor(1.0), edge_cells(32))
    staged = pair(own, peer).offered
    plan = plan_of("triton", own, staged, [Select(view.key, 0, view.shards) for view in staged.views()])
    device, launched = device_of("cpu"), []
    monkeypatch.setattr(device, "launch", lambda variant, *_: launched.append(type(variant)))
    memory, tokens = np.zeros(plan.nbytes({"kv": (0, n)}) + 16, np.uint8), {"kv": (0, n)}
    at, items = memory.ctypes.data + -memory.ctypes.data % 16, {"kv": Index.of(np.arange(n, dtype=np.int32))}
    for sum_ptr, want in ((0, [ConvertVariant]), (held.memory[0].ctypes.data & -8, [ConvertVariant, SumVariant])):
        plan.gather(at, plan.nbytes(tokens), items, tokens, sum_ptr=sum_ptr)
        assert launched == want
        launched.clear()

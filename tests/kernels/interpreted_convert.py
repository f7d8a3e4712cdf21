"""Triton's conversions in its interpreter, to the reference's bit. test_triton.py runs this file by itself."""

from __future__ import annotations

import numpy as np
import pytest
from coded import (
    ALL_BF16,
    APART,
    INLINE,
    as_bf16,
    check_converts,
    edge_cells,
    few_edges,
    formats_of,
    mixed,
    of_cells,
    offered_by,
)
from pools import HND, NHD, Logical, Stored, hold

from pdstage.kernels import Plan, Pool, triton_convert
from pdstage.kernels.backend import Recipe
from pdstage.kernels.triton_device import ConvertVariant, SumVariant, device_of
from pdstage.plan import TOKEN_MAJOR, Select, Staging
from pdstage.plan.convert import Encoding, codings, fp8_tensor
from pdstage.plan.tables import Index
from tests import rows


def plan_of(own, staged, select):
    """As `Pool.plan` makes it; Triton's interpreter is no backend for host memory there."""
    staging = Staging(staged, select)
    recipe = Recipe(own, staging.select, TOKEN_MAJOR, "cpu", True, staged)
    recipe = recipe._replace(codings=tuple(codings(own, staged, staging.select)))
    return Plan(Pool.of(own), staging, "triton", recipe, triton_convert.compile_plan(recipe))


def check(held, own, staged, select, indexes, tokens, **how):
    check_converts(plan_of(own, staged, select), held, own, staged, select, indexes, tokens, **how)


def chosen_cells():
    """Of all values one in 63, and of the greatest values of cells one in 15; FULL=1 takes all."""
    few, edges = ALL_BF16[::63][:1024], edge_cells(96)
    return (ALL_BF16.reshape(-1, 128), edges) if rows.everything else (few.reshape(-1, 128), few_edges(edges))


@pytest.mark.parametrize("format,companion", [(format, "") for format in INLINE] + APART)
def test_every_value_is_the_references(format, companion):
    for cells in chosen_cells():
        check(*of_cells(format, cells, companion))


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
        held, per = hold([stored], number), of.tokens_per_row
        own, formats = as_bf16(held, of), formats_of(of, format)
        if "tensor" in format:
            formats = {key: fp8_tensor(0.1 * (1 + key.layer)) for key in formats}
        select = [Select(key, 1, 2) for key in formats]
        items = Index.of(np.array([3, 0, 5, 1], np.int64 if number % 2 else np.int32), 2 * per)
        check(held, own, offered_by(own, formats), select, {"kv": items}, {"kv": (3 * per, 15 * per)}, max_sms=2)


@pytest.mark.parametrize("format", INLINE)
def test_what_is_copied_goes_with_what_is_converted(format):
    check(*mixed(format))


def test_a_call_that_asks_for_no_sum_makes_no_launch_for_one(monkeypatch):
    held, own, staged, select, items, tokens = of_cells(fp8_tensor(1.0), edge_cells(32))
    plan = plan_of(own, staged, select)
    device, launched = device_of("cpu"), []
    monkeypatch.setattr(device, "launch", lambda variant, *_: launched.append(type(variant)))
    memory = np.zeros(plan.nbytes(tokens) + 16, np.uint8)
    at = memory.ctypes.data + -memory.ctypes.data % 16
    for sum_ptr, want in ((0, [ConvertVariant]), (held.memory[0].ctypes.data & -8, [ConvertVariant, SumVariant])):
        plan.gather(at, plan.nbytes(tokens), items, tokens, sum_ptr=sum_ptr)
        assert launched == want
        launched.clear()

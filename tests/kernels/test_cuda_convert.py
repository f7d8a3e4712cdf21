"""The converting CUDA kernels' sources against the reference, bit for bit, run by a test double of the device."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from coded import (
    ALL_BF16,
    APART,
    INLINE,
    as_bf16,
    check_converts,
    converted,
    edge_cells,
    formats_of,
    mixed,
    of_cells,
    offered_by,
)
from cuda_on_cpu import COMPILER, CpuMachine, convert_plan_of
from hypothesis import given, settings
from pools import HND, Logical, Stored, assert_alike, hold, kv_index, on_device

from pdstage import UsageError
from pdstage.kernels import Plan, Pool
from pdstage.kernels.backend import Launch
from pdstage.plan import Select, Staging
from pdstage.plan.convert import Encoding
from tests.rows import drawn

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def check(held, own, staged, select, indexes, tokens, *, machine=None, lists=dict):
    pool = Pool.of(own)
    made = convert_plan_of(pool, staged, select, checksum=True, machine=machine)
    plan = Plan(pool, Staging(staged, select), "cuda", made._recipe, made)
    check_converts(plan, held, own, staged, select, indexes, tokens, max_sms=3, lists=lists)
    return made


@pytest.mark.parametrize("format,companion", [(format, "") for format in INLINE] + APART)
@pytest.mark.parametrize("cells", [ALL_BF16.reshape(-1, 128), edge_cells(96), edge_cells(32)], ids=["128", "96", "32"])
def test_every_value_is_the_references(format, companion, cells):
    check(*of_cells(format, cells, companion))


@settings(max_examples=drawn(20, full=60))
@given(converted())
def test_every_layout_is_the_references(drawn):
    held, own, formats, (first, count), index, range_ = drawn
    select = [Select(key, first, count) for key in formats]
    check(held, own, offered_by(own, formats), select, {"kv": index}, {"kv": range_})


@pytest.mark.parametrize(
    ("format", "n", "layers", "groups"),
    [
        *((format, n, 1, 1) for format in INLINE for n in (513, 1024) if Encoding.parse(format).nbytes(n)),
        # Layers of one shape are one group, however they are scaled; scales apart are two more.
        (INLINE[2], 64, 6, 1),
        (APART[1][0], 64, 6, 4),
    ],
)
def test_long_heads_and_many_layers_are_the_references(format, n, layers, groups):
    """Of heads of more than a warp of units too."""
    of = Logical("kv", layers, 2, 2, 1, 2 * n)
    held = hold([Stored(of, n_items=5, rows_per_item=4, order=HND)])
    own, formats = as_bf16(held, of), formats_of(of, format)
    select, index = [Select(key, 0, 2) for key in formats], kv_index([3, 0, 4], np.int64)
    made = check(
        held, own, offered_by(own, formats), select, index, {"kv": (2, 11)}, lists=partial(on_device, device="cuda:0")
    )
    assert made._tables.addresses[2] == groups


@pytest.mark.parametrize("widest", [16, 32])
@pytest.mark.parametrize("format", INLINE)
def test_what_is_copied_goes_with_what_is_converted(format, widest):
    machine = CpuMachine()
    machine.widest = widest
    check(*mixed(format), machine=machine)
    assert len(machine.launches) == 8, "of each call and each checksum one launch for wide accesses, one for narrow"


def test_items_of_a_device_list_that_are_outside_the_pool_are_left_out():
    of = Logical("kv", 1, 1, 1, 1, 64)
    held = hold([Stored(of, n_items=4, rows_per_item=1)])
    own = as_bf16(held, of)
    for format in INLINE:
        staged = offered_by(own, dict.fromkeys(of.view_keys(), format))
        plan, before = convert_plan_of(Pool.of(own), staged, of.whole()), held.bytes()
        n, width = plan._staging.nbytes({"kv": (0, 3)}), Encoding.parse(format).nbytes(32)
        out = np.full(n + 16, 0xA5, np.uint8)
        at = -out.ctypes.data % 16
        index = on_device(kv_index([1, 4, -1], np.int32), "cuda:0")
        plan.gather(out.ctypes.data + at, n, index, {"kv": (0, 3)}, Launch())
        assert (out[at + width :] == 0xA5).all()
        plan.scatter(out.ctypes.data + at, n, index, {"kv": (1, 3)}, Launch())
        assert_alike(held.memory, before)


@pytest.mark.parametrize(("short", "skew", "words"), [(1, 0, "too small"), (0, 8, "not aligned")])
@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_misuse_launches_nothing(way, short, skew, words):
    machine = CpuMachine()
    _, own, staged, select, indexes, tokens = mixed(INLINE[0])
    plan = convert_plan_of(Pool.of(own), staged, select, machine=machine)
    n = plan._staging.nbytes(tokens)
    out = np.full(n + 32, 0xA5, np.uint8)
    with pytest.raises(UsageError, match=words):
        getattr(plan, way)(out.ctypes.data + -out.ctypes.data % 16 + skew, n - short, indexes, tokens, Launch())
    assert machine.launches == []

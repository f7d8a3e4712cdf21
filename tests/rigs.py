"""Holds any backend to the reference: `check` on a generated `Transfer`, `check_refused` on what it must not begin.

A suite brings a `Rig`, which says where memory lies and how plans are made.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest
from pools import GUARD, Logical, Stored, aligned, gathered, hold, on_device

from pdstage import Layout, Pool, UsageError, native
from pdstage.plan import TOKEN_MAJOR
from pdstage.plan.tables import Index


@dataclass
class Block:
    """Bytes where a rig's kernels can reach them; `owner` keeps them there."""

    ptr: int
    owner: object


class Rig:
    """Where a backend's memory lies and how its plans are made: host memory here. Suites of devices derive theirs."""

    skews = True  # staging may begin anywhere, not at multiples of 16 alone
    max_sms: int | None = None

    def __init__(self, backend="host"):
        self.backend = backend

    def put(self, array):
        """A copy of `array`'s bytes."""
        copy = aligned(array)
        return Block(copy.ctypes.data, copy)

    def get(self, block):
        """The bytes as they are once everything asked for has run."""
        return block.owner

    def plan(self, layout, select, wire, checksum):
        return Pool.of(layout).plan(select, wire, self.backend, checksum=checksum)

    def place(self, held):
        """A pool's memory where this rig's kernels reach it, and the layout over it."""
        blocks = [self.put(memory) for memory in held.memory]
        regions = [
            replace(region, base=block.ptr + GUARD) for region, block in zip(held.layout.regions, blocks, strict=True)
        ]
        return blocks, Layout(tuple(regions), held.layout.components)


REFERENCE = Rig("reference")
HOST_RIGS = [REFERENCE] if native.ext is None else [Rig(), REFERENCE]
by_rig = pytest.mark.parametrize("rig", HOST_RIGS, ids=lambda rig: rig.backend)
SUM_BEFORE = 41


def outcome(rig, t):
    """Everything the transfer leaves behind, by name: staging, both pools after each way, and the checksums."""
    found = {}
    skew = t.skew if rig.skews else t.skew // 16 * 16
    src_blocks, src_layout = rig.place(t.src)
    gather = rig.plan(src_layout, t.src_select, t.wire, t.checksum or t.spare)
    n = gather.nbytes(t.tokens)

    def run(name, work, *arguments):
        total = rig.put(np.array([SUM_BEFORE], np.uint64).view(np.uint8))
        work(*arguments, t.tokens, max_sms=rig.max_sms, sum_ptr=total.ptr if t.checksum else 0)
        found[f"{name}: checksum"] = rig.get(total)

    staging = rig.put(np.full(n + 512, 0xA5, np.uint8))
    start = -staging.ptr % 128 + skew
    run("gather", gather.gather, staging.ptr + start, n, t.src_index)
    whole = rig.get(staging)
    found["gather: staged"] = whole[start : start + n]
    found["gather: bytes around it"] = np.unique(np.r_[whole[:start], whole[start + n :]])
    for way in ("scatter", "copy"):
        blocks, layout = rig.place(t.dst)
        plan = rig.plan(layout, t.dst_select, t.wire, t.spare or t.checksum)
        assert plan.nbytes(t.tokens) == n
        if way == "scatter":
            run(way, plan.scatter, staging.ptr + start, n, t.dst_index)
        else:
            gather.copy_to(plan, t.src_index, t.dst_index, t.tokens, max_sms=rig.max_sms)
        for number, block in enumerate(blocks):
            found[f"{way}: region {number}"] = rig.get(block)
    for number, block in enumerate(src_blocks):
        found[f"source region {number}"] = rig.get(block)
    return found


def check(rig, t, here=None):
    """Holds a backend to the reference, and both to the layout's formula, on one transfer; every byte and checksum.

    `here` is the same transfer where the host can read its lists.
    """
    found, t = outcome(rig, t), here or t
    expected = outcome(REFERENCE, t)
    for number, memory in enumerate(t.after()):
        expected[f"copy: region {number}"] = memory
        if t.wire == TOKEN_MAJOR:
            expected[f"scatter: region {number}"] = memory
    for number, memory in enumerate(t.src.memory):
        expected[f"source region {number}"] = memory
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        np.testing.assert_array_equal(found[name], want, err_msg=name)


# What a caller did wrong with a gather or a scatter, and the words that must name it; `repeated` ones are a scatter's.
MISUSE = {
    "negative item": ({"items": [1, -2, 3]}, "item -2 at position 1 of component 'kv'"),
    "item past the pool": ({"items": [1, 2, 6]}, "item 6 at position 2 of component 'kv'"),
    "too few items": ({"items": [1, 2]}, "has 2 items where its tokens need 3"),
    "no items": ({"items": []}, "has 0 items"),
    "range backwards": ({"tokens": (8, 4)}, "tokens 8..4"),
    "range before the first token": ({"first": 4}, "tokens 0..12"),
    "a row split": ({"first": -3}, "first_token -3"),
    "staging too small": ({"short": 1}, "too small"),
    "no index": ({"name": "other"}, "component 'kv' have no index"),
    "repeated item": ({"items": [4, 2, 4]}, "item 4 at position 2 of component 'kv' is a destination twice"),
    "repeated item at once": ({"items": [4, 4, 2]}, "item 4 at position 1 of component 'kv'"),
    "a compressed row split": (
        {"first": 2, "tokens": (4, 8), "per": 4},
        "first_token 2 of component 'kv' splits a row of 4",
    ),
}


def by_misuse(**own):
    """Every way with every misuse of it, and with `own` ones."""
    cases = [
        (way, *case)
        for way in ("gather", "scatter")
        for name, case in (MISUSE | own).items()
        if way == "scatter" or "repeated" not in name
    ]
    return pytest.mark.parametrize(("way", "case", "words"), cases, ids=lambda one: one if isinstance(one, str) else "")


def check_refused(rig, way, case, words):
    """Holds a backend to its refusal: the culprit is named, and neither pool nor staging is written."""
    of = Logical(width=16, tokens_per_row=case.get("per", 1))
    blocks, layout = rig.place(hold([Stored(of, n_items=6, rows_per_item=4 // of.tokens_per_row)]))
    before = [rig.get(block).copy() for block in blocks]
    plan = rig.plan(layout, of.whole(), TOKEN_MAJOR, False)
    index = Index.of(np.array(case.get("items", [1, 2, 3]), np.int32), case.get("first", 0))
    index = {case.get("name", "kv"): index._replace(device=case.get("device", "cpu"))}
    tokens = {"kv": case.get("tokens", (0, 12))}
    n = 256 if case.get("tokens") else plan.nbytes(tokens)
    staging = rig.put(np.full(n + 256, 0xA5, np.uint8))
    with pytest.raises(UsageError) as caught:
        ptr = staging.ptr + -staging.ptr % 128 + case.get("skew", 0)
        getattr(plan, way)(ptr, n - case.get("short", 0), index, tokens, sum_ptr=case.get("sum_ptr", 0))
    assert words in str(caught.value)
    assert (rig.get(staging) == 0xA5).all()
    for block, memory in zip(blocks, before, strict=True):
        np.testing.assert_array_equal(rig.get(block), memory)


def check_left_out(rig, held, select, wire, items, range_, left_out, device="cuda:0"):
    """A gather leaves these staged bytes alone, and a scatter what is in their place."""
    plan, reference = (one.plan(held.layout, select, wire, False) for one in (rig, REFERENCE))
    n_items, tokens, before = next(held.layout.views()).n_items, {"kv": range_}, held.bytes()
    want = gathered(reference, {"kv": Index.of(np.where((items < 0) | (items >= n_items), 0, items))}, tokens)
    want[left_out] = 0xA5
    index = on_device({"kv": Index.of(items)}, device)
    found = gathered(plan, index, tokens, max_sms=1)
    np.testing.assert_array_equal(found, want)
    plan.scatter(found.ctypes.data, found.size, index, tokens, max_sms=1)
    np.testing.assert_array_equal(held.memory, before)


def without_native():
    """Inside, numpy does what the extension does."""
    return mock.patch.object(native, "ext", None)


def host_code(name):
    """A context in which host code is `name`, "c++" or "numpy"."""
    return without_native() if name == "numpy" else contextlib.nullcontext()


HOST_CODES = ["numpy"] if native.ext is None else ["c++", "numpy"]

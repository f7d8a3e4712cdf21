"""Conversions to the bit: the reference against torch's casts and exact arithmetic; and which formats meet."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from coded import ALL_BF16, INLINE, blocks_of_all, edge_cells, pools_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rigs import Rig, by_misuse, check_refused

from pdstage import Axis, Pool, UsageError
from pdstage.kernels.convert_reference import encode
from pdstage.layout import Key, Layout, Region, RowLevel, View, mismatch
from pdstage.plan import HEAD_MAJOR, Select, Staging
from pdstage.plan.convert import Encoding, fp8_tensor, fp8_token_head, mxfp8, pair, reformat
from tests.rows import drawn

SCALES = [1.0, 0.1, 0.5, 3.0, 448.0, 1 / 448, 2.0**-20, 1e20, 2.0**-126, 2.0**126]


# The reference.


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rule", ["divide", "bf16"])
def test_a_tensors_scale_is_torchs_arithmetic_and_torchs_cast(scale, rule):
    """The rule "bf16" rounds twice, as a product of a bf16 tensor does."""
    scaled = ALL_BF16.float() / torch.tensor(scale)
    if rule == "bf16":
        scaled = ALL_BF16 * float(torch.tensor(1.0) / torch.tensor(scale))
        assert scaled.dtype == torch.bfloat16
    found = encode(Encoding.parse(fp8_tensor(scale, rule)), ALL_BF16.reshape(-1, 64)).reshape(-1)
    nan = ALL_BF16.isnan()
    assert torch.equal(found[~nan], scaled.to(torch.float8_e4m3fn).view(torch.uint8)[~nan])
    assert (found[nan] == 0x7F).all()


MAGNITUDES = [
    Fraction(m & 7, 512) if m < 8 else Fraction(8 + (m & 7), 8) * Fraction(2) ** ((m >> 3) - 7) for m in range(127)
]


def exact_e4m3(x: Fraction) -> int:
    """The code of an exact number: of its neighbours among all numbers the nearer, of two as near the even."""
    at = bisect_left(MAGNITUDES, abs(x))
    best = min(range(max(0, at - 1), min(at + 1, 127)), key=lambda m: (abs(MAGNITUDES[m] - abs(x)), m & 1), default=126)
    return best | (0x80 if x < 0 else 0)


@pytest.mark.parametrize("rule", ["floor", "ceil"])
def test_a_blocks_scale_is_the_exponent_its_rule_says(rule):
    cells = torch.cat([blocks_of_all(), edge_cells()])
    coded = encode(Encoding.parse(mxfp8(rule)), cells)
    for cell, data, byte in zip(cells.double(), coded[:, :32], coded[:, 32].tolist(), strict=True):
        most = cell.abs().max().item()
        if math.isnan(most):
            assert byte == 255
            assert (data == 0x7F).all()
            continue
        if rule == "floor":
            want = 247 if most == math.inf else 0 if most == 0 else math.frexp(most)[1] - 1 - 8 + 127
        else:
            want = next((e for e in range(255) if max(most, 1e-30) <= 448 * 2.0 ** (e - 127)), 254)
        assert byte == max(0, want)
    # An element is the exact quotient, rounded once; none of "ceil" saturates but infinities.
    for cell, data, byte in list(zip(cells, coded[:, :32].tolist(), coded[:, 32].tolist(), strict=True))[::331]:
        if cell.isfinite().all():
            exact = [exact_e4m3(Fraction(x) / Fraction(2) ** (byte - 127)) for x in cell.tolist()]
            assert [d & 0x7F for d in data] == [e & 0x7F for e in exact]


@by_misuse()
def test_indexes_are_checked_before_a_byte_moves(way, case, words):
    check_refused(ConvertingRig(), way, case, words)


class ConvertingRig(Rig):
    """Pools of bf16 that are staged as fp8."""

    def plan(self, layout, select, wire, checksum):
        own = reformat(layout, {view.key: "bf16" for view in layout.views()})
        peer = {view.key: replace(view, width=view.width // 2, format=fp8_tensor(0.5)) for view in layout.views()}
        components = tuple(replace(c, views=tuple(peer[v.key] for v in c.views)) for c in own.components)
        offered = pair(own, Layout(own.regions, components)).offered
        return Pool.of(own).plan(select, wire, staged=offered, checksum=checksum)


def test_a_plan_that_converts_does_nothing_else():
    _, own, peer, _ = pools_of(fp8_tensor(1.0), edge_cells(32))
    offered = pair(own, peer).offered
    select = [Select(view.key, 0, view.shards) for view in offered.views()]
    with pytest.raises(UsageError, match="converting in 'head' order"):
        Pool.of(own).plan(select, HEAD_MAJOR, staged=offered)
    plan, plain = Pool.of(own).plan(select, backend="reference", staged=offered), Pool.of(own).plan(select)
    for one, other in ((plan, plan), (plain, plan)):
        with pytest.raises(UsageError, match="converts copies to no pool|cannot copy to one of"):
            one.copy_to(other, {}, {}, {"kv": (0, 0)})


# Which formats meet.

ODD = ["fp16", "fp8_e4m3", "fp8_e4m3:mx32:floor:scale:", "fp8_e4m3:tensor:inf:divide", "fp8_e4m3:token_head:data:k"]
ODD += ["fp8_e4m3:tensor:0x1.9999999999999p-4:divide"]  # no float32
PARTS = [make(part=part, of=of) for make in (fp8_token_head, mxfp8) for part, of in (("data", ""), ("scale", "k"))]
FORMATS = ["bf16", *INLINE, *PARTS, *ODD]


def incompatible(src, dst):
    """As nodes judge each other's views at Hello."""
    held = src.by_key()
    return next((p for view in dst.views() if view.key in held and (p := mismatch(held[view.key], view))), "")


def layout_of(views):
    given = [
        View(
            key=Key("kv", role, 0), region=0, offset=0, n_items=4, item_stride=1024, tokens_per_item=4,
            rows=(RowLevel(per, 256),), shards=shards, shard_stride=128, segs=segs, seg_stride=4, width=width,
            axis=Axis("kv_head", total, 0, shards), format=format,
        )
        for role, (format, width, shards, total, segs, per) in views.items()
    ]  # fmt: skip
    return Layout.of([Region(4096, 1 << 20)], given)


@st.composite
def meeting_layouts(draw):
    """A bf16 rank and an fp8 one that would fit, but for what is changed in either: what a peer may say of itself."""
    plain, coded = {}, {}
    for role in draw(st.sampled_from([["k"], ["k", "v"], ["k", "latent"]])):
        n, shards = draw(st.sampled_from([1, 32, 33, 64])), draw(st.integers(1, 2))
        plain[role] = ("bf16", 2 * n, shards, 2, 1, 1)
        format = draw(st.sampled_from([*INLINE, *PARTS[::2]]))
        coded[role] = (format, Encoding.parse(format).nbytes(n) or 7, shards, 2, 1, 1)
        if Encoding.parse(format).part == "data":
            scales = replace(Encoding.parse(format), part="scale", of=role)
            name = draw(st.sampled_from([f"{role}_scale", f"{role}_scale", "a", "k", "v"]))
            coded[name] = (str(scales), scales.nbytes(n) or 7, shards, 2, 1, 1)
    changes = st.tuples(
        st.sampled_from(FORMATS), st.sampled_from([1, 3, 4, 33, 64]), st.integers(1, 2), st.sampled_from([2, 4]),
        st.integers(1, 2), st.integers(1, 2),
    )  # fmt: skip
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        side, role = draw(st.sampled_from([plain, coded])), draw(st.sampled_from(["k", "v", "k_scale", "a"]))
        new, which = draw(changes), draw(st.integers(0, 5))
        held = list(side.get(role, new))
        held[which] = new[which]
        side[role] = tuple(held)
    return layout_of(plain), layout_of(coded)


STRAY_SCALES = (
    layout_of({"k": ("bf16", 2, 2, 2, 1, 1), "k_scale": (fp8_token_head("scale", "k"), 1, 2, 2, 2, 1)}),
    layout_of({"k": (fp8_token_head(), 5, 2, 2, 1, 1), "k_scale": (fp8_token_head("scale", "k"), 1, 1, 2, 2, 1)}),
)
"""Inline data beside a view that calls itself its scales."""


@settings(max_examples=drawn(100, full=400))
@given(meeting_layouts(), st.booleans())
@example(STRAY_SCALES, False)
def test_layouts_that_meet_have_plans_whatever_peers_say(layouts, turned):
    src, dst = layouts[::-1] if turned else layouts
    offered, taken, names = pair(src, dst)
    if not names:
        assert (offered, taken) == (src, dst)
    if incompatible(offered, taken):
        return
    shared = [view.key for view in taken.views() if view.key in offered.by_key()]
    select = [Select(key, 0, 1) for key in shared]
    tokens = {"kv": (0, 4)}
    for own, staged in ((src, offered), (dst, taken)):
        plan = Pool.of(own).plan(select, staged=staged)
        assert plan.nbytes(tokens) == Staging(offered, select).nbytes(tokens) == Staging(taken, select).nbytes(tokens)

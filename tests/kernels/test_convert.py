"""Conversions to the bit: the reference against torch's casts and exact arithmetic, host code against the reference."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from pools import Logical, Stored, hold

from pdstage import native
from pdstage.convert import Encoding, fp8_tensor, fp8_token_head, mxfp8, pair, reformat
from pdstage.kernels import Pool
from pdstage.kernels.convert_reference import decode, encode
from pdstage.layout import Key, Layout
from pdstage.plan import Select
from pdstage.tables import Index

ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
SCALES = [1.0, 0.1, 0.5, 3.0, 448.0, 1 / 448, 2.0**-20, 1e20, 2.0**-126, 2.0**126]
INLINE = [fp8_tensor(0.1), fp8_tensor(0.1, "bf16"), fp8_token_head(), mxfp8("floor"), mxfp8("ceil")]
native_only = pytest.mark.skipif(native.ext is None, reason="host code converts with the extension only")


def blocks_of_all(n=32, seed=0):
    """Cells of `n` values in which every bf16 occurs; most cells span magnitudes that blocks of real caches do."""
    shuffled = ALL_BF16[torch.from_numpy(np.random.default_rng(seed).permutation(65536))]
    ordered = ALL_BF16.reshape(-1, n)
    return torch.cat([ordered, shuffled.reshape(-1, n)])


def edge_cells(n=32):
    """Zeros, one value among zeros, one NaN or infinity among numbers, and every power of two as the greatest value."""
    special = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 2.0**-133, 1e-30, 448.0, 464.0, 480.0, 3.3e38]
    cells = [torch.full((n,), value) for value in special]
    for value in special:
        one = torch.linspace(-2, 2, n)
        one[n // 3] = value
        cells += [one, torch.where(torch.arange(n) == n - 1, value, 0.0)]
    for exponent in range(-133, 128):
        for mantissa in (1.0, 1.75, 1.7578125, 1.9921875):
            cells.append(torch.linspace(-1, 1, n).double().mul(mantissa * 2.0**exponent).float())
    return torch.stack(cells).bfloat16()


# The reference.


@pytest.mark.parametrize("scale", SCALES)
def test_a_tensors_scale_is_torchs_division_and_torchs_cast(scale):
    encoding = Encoding.parse(fp8_tensor(scale))
    want = (ALL_BF16.float() / torch.tensor(scale)).to(torch.float8_e4m3fn).view(torch.uint8)
    nan = ALL_BF16.isnan()
    found = encode(encoding, ALL_BF16.reshape(-1, 64)).reshape(-1)
    assert torch.equal(found[~nan], want[~nan])
    assert (found[nan] == 0x7F).all()


@pytest.mark.parametrize("scale", SCALES)
def test_the_rule_bf16_rounds_twice_as_arithmetic_on_a_bf16_tensor_does(scale):
    product = ALL_BF16 * float(torch.tensor(1.0) / torch.tensor(scale))
    assert product.dtype == torch.bfloat16
    want = product.to(torch.float8_e4m3fn).view(torch.uint8)
    found = encode(Encoding.parse(fp8_tensor(scale, "bf16")), ALL_BF16.reshape(-1, 64)).reshape(-1)
    nan = ALL_BF16.isnan()
    assert torch.equal(found[~nan], want[~nan])
    assert (found[nan] == 0x7F).all()


MAGNITUDES = [
    Fraction(m & 7, 512) if m < 8 else Fraction(8 + (m & 7), 8) * Fraction(2) ** ((m >> 3) - 7) for m in range(127)
]


def exact_e4m3(x: Fraction) -> int:
    """The code of an exact number: of its neighbours among all numbers the nearer, of two as near the even."""
    at = bisect_left(MAGNITUDES, abs(x))
    best = min(range(max(0, at - 1), min(at + 1, 127)), key=lambda m: (abs(MAGNITUDES[m] - abs(x)), m & 1), default=126)
    return best | (0x80 if x < 0 else 0)


def test_the_cast_is_to_the_nearest_and_ties_go_to_the_even():
    finite = ALL_BF16[ALL_BF16.isfinite() & (ALL_BF16.abs() < 1000) & (ALL_BF16.abs() > 2.0**-12)]
    found = encode(Encoding.parse(fp8_tensor(1.0)), finite.reshape(1, -1))[0].tolist()
    assert found == [exact_e4m3(Fraction(x)) for x in finite.tolist()]


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


def test_a_token_heads_scale_is_that_of_its_greatest_value():
    cells = torch.cat([blocks_of_all(64), edge_cells(64)])
    coded = encode(Encoding.parse(fp8_token_head()), cells)
    scales = coded[:, 64:].contiguous().view(torch.float32)[:, 0]
    most = cells.float().abs().amax(1)
    want = torch.maximum(most / 448, torch.tensor(1e-6))
    assert torch.equal(scales[~most.isnan()], want[~most.isnan()])
    assert scales[most.isnan()].isnan().all()
    assert (coded[most.isnan(), :64] == 0x7F).all()
    zero = coded[most == 0]
    assert len(zero)
    assert ((zero[:, :64] & 0x7F) == 0).all()


@pytest.mark.parametrize("format", INLINE)
def test_what_was_encoded_decodes_to_its_nearest_neighbours(format):
    encoding, cells = Encoding.parse(format), torch.randn(500, 64, generator=torch.manual_seed(1)).bfloat16()
    back = decode(encoding, encode(encoding, cells)).float()
    error = ((back - cells.float()).abs() / cells.float().abs().amax(1, keepdim=True)).max()
    assert error < (0.15 if "floor" in format else 0.07)  # half a step of 3 bits; "floor" saturates above 1.75


# Host code.


def pools_of(format, cells, shards=2, companion=""):
    """A bf16 pool that holds `cells`, and how it stages them for a peer that has `format`."""
    n, d = cells.shape
    rows = n // shards
    bf16 = hold([Stored(Logical(shards=shards, width=2 * d), n_items=rows, rows_per_item=1)])
    held = torch.from_numpy(bf16.memory[0][64:-64])
    held[:] = cells.contiguous().view(torch.uint8).reshape(-1)
    own = reformat(bf16.layout, {Key("kv", "r0", 0): "bf16"})
    width = Encoding.parse(format).nbytes(d)
    peers = [Stored(Logical("kv", shards=shards, width=width), n_items=rows, rows_per_item=1)]
    peer = reformat(hold(peers).layout, {Key("kv", "r0", 0): format})
    if companion:
        view = peer.component("kv").views[0]
        other = replace(view, key=Key("kv", "r1", 0), width=Encoding.parse(companion).nbytes(d), format=companion)
        component = replace(peer.component("kv"), views=(view, other))
        peer = Layout(peer.regions, (component,))
    return bf16, own, peer, rows


def staged_by(backend, own, staged, rows):
    select = [Select(view.key, 0, view.shards) for view in staged.views()]
    plan = Pool.of(own).plan(select, backend=backend, staged=staged, checksum=True)
    tokens, total = {"kv": (0, rows)}, np.zeros(1, np.uint64)
    out = np.full(plan.nbytes(tokens) + 128, 0xA5, np.uint8)
    items = Index.of(np.arange(rows, dtype=np.int32))
    plan.gather(out.ctypes.data, out.size - 128, {"kv": items}, tokens, sum_ptr=total.ctypes.data)
    return out, total, plan, items, tokens


def formats():
    for format in INLINE:
        yield format, ""
    for scale in SCALES[2:]:
        yield fp8_tensor(scale), ""
    yield fp8_tensor(2.0**-20, "bf16"), ""
    yield fp8_token_head("data"), fp8_token_head("scale", "r0")
    for rule in ("floor", "ceil"):
        yield mxfp8(rule, "data"), mxfp8(rule, "scale", "r0")


@native_only
@pytest.mark.parametrize("format,companion", list(formats()))
def test_host_code_gives_the_references_bits(format, companion):
    for cells in (blocks_of_all(), edge_cells(32), edge_cells(96)):
        bf16, own, peer, rows = pools_of(format, cells, companion=companion)
        offered = pair(own, peer).offered
        assert [view.format for view in offered.views()] == [f for f in (format, companion) if f]
        want, want_sum, reference, items, tokens = staged_by("reference", own, offered, rows)
        found, found_sum, plan, *_ = staged_by("host", own, offered, rows)
        np.testing.assert_array_equal(found, want)
        assert found_sum == want_sum
        # And back, from every byte there is: what no encoder writes too.
        taken = pair(peer, own).taken
        assert [(v.key, v.format, v.width) for v in taken.views()] == [
            (v.key, v.format, v.width) for v in offered.views()
        ]
        anything = np.random.default_rng(3).integers(0, 256, want.size, dtype=np.uint8)
        for staged in (want, anything):
            after = []
            for one in (plan, reference):
                total = np.zeros(1, np.uint64)
                bf16.memory[0][64:-64] = 0
                one.scatter(staged.ctypes.data, staged.size, {"kv": items}, tokens, sum_ptr=total.ctypes.data)
                after.append((bf16.memory[0].copy(), total))
            np.testing.assert_array_equal(after[0][0], after[1][0])
            assert after[0][1] == after[1][1]

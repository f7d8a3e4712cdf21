"""Pools of bf16 and how they are staged for a peer that keeps fp8: what suites of conversions have in common."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st
from pools import Logical, Stored, assert_alike, hold, indexes, ranges, storages

from pdstage import Key, Layout, Pool
from pdstage.plan import Select
from pdstage.plan.convert import Encoding, fp8_tensor, fp8_token_head, mxfp8, pair, reformat
from pdstage.plan.tables import Index

ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
INLINE = [fp8_tensor(0.1), fp8_tensor(0.1, "bf16"), fp8_token_head(), mxfp8("floor"), mxfp8("ceil")]

APART = [(fp8_token_head("data"), fp8_token_head("scale", "r0"))]
APART += [(mxfp8(rule, "data"), mxfp8(rule, "scale", "r0")) for rule in ("floor", "ceil")]
"""Data and scales in views of their own."""
_N_SPECIAL = 36


def blocks_of_all():
    """Cells of 32 values in which every bf16 occurs; most cells span magnitudes that blocks of real caches do."""
    shuffled = ALL_BF16[torch.from_numpy(np.random.default_rng(0).permutation(65536))]
    return torch.cat([ALL_BF16.reshape(-1, 32), shuffled.reshape(-1, 32)])


def edge_cells(n=32):
    """Zeros, one value among zeros, one NaN or infinity among numbers, and every power of two as the greatest value."""
    special = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 2.0**-133, 1e-30, 448.0, 464.0, 480.0, 3.3e38]
    cells = [torch.full((n,), value) for value in special]
    for value in special:
        one = torch.linspace(-2, 2, n)
        one[n // 3] = value
        cells += [one, torch.where(torch.arange(n) == n - 1, value, 0.0)]
    assert len(cells) == _N_SPECIAL
    for exponent in range(-133, 128):
        for mantissa in (1.0, 1.75, 1.7578125, 1.9921875):
            cells.append(torch.linspace(-1, 1, n).double().mul(mantissa * 2.0**exponent).float())
    return torch.stack(cells).bfloat16()


def few_edges(cells):
    """Of edge cells those with special values, and one in fifteen of the others, of every mantissa."""
    return torch.cat([cells[:_N_SPECIAL], cells[_N_SPECIAL::15]])


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


def as_bf16(held, of):
    """The layout of a pool of `of`, all of whose views are bf16."""
    return reformat(held.layout, dict.fromkeys(of.view_keys(), "bf16"))


def offered_by(own, staged):
    """`own` as it is offered to a peer that has the formats `staged`, by a peer of another page size and order."""
    views = {}
    for key, format in staged.items():
        encoding = Encoding.parse(format)
        view = own.by_key()[key._replace(role=encoding.of or key.role)]
        width = encoding.nbytes(view.width // 2)
        stride = view.shards * width
        row = view.rows[-1]._replace(stride=stride)
        views[key] = replace(
            view, key=key, format=format, width=width, shard_stride=width, rows=(row,), item_stride=stride * 4, offset=0
        )
    component = replace(own.components[0], views=tuple(views[key] for key in sorted(views)))
    return pair(own, Layout(own.regions, (component,))).offered


def mixed(format):
    """Views that are converted among some that are copied, of two components, one of them of slots in segments."""
    kv, state = Logical("kv", 2, 2, 3, 1, 128), Logical("state", 2, 1, 2, 3, 20, positional=False)
    held = hold([Stored(kv, n_items=6, rows_per_item=4), Stored(state, n_items=5, rows_per_item=1, pads={"seg": 4})])
    own = as_bf16(held, kv)
    staged = offered_by(own, {key: format for key in kv.view_keys() if key.role == "r0"})
    select = [Select(key, 1, 2) for key in kv.view_keys()] + [Select(key, 0, 2) for key in state.view_keys()]
    index = {"kv": Index.of(np.array([3, 0, 5], np.int32), 4), "state": Index.of(np.array([4, 1], np.int32))}
    return held, own, staged, select, index, {"kv": (6, 15), "state": (0, 2)}


@st.composite
def converted(draw):
    """A bf16 pool stored in any way, its peer's formats, and a part of it on its way."""
    roles, layers = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    apart = draw(st.booleans())
    make = draw(st.sampled_from([fp8_token_head, mxfp8, lambda **part: mxfp8("ceil", **part)]))
    data = make(part="data") if apart else draw(st.sampled_from(INLINE))
    n = draw(st.sampled_from([32, 64, 96] if "mx" in data else [1, 2, 7, 16, 33, 64]))
    of = Logical("kv", layers, roles, draw(st.integers(1, 3)), 1, 2 * n, draw(st.sampled_from([1, 1, 2])))
    stored = draw(storages(of))
    held = hold([stored], draw(st.integers(0, 99)))
    own = as_bf16(held, of)
    staged = {}
    for key in of.view_keys():
        if draw(st.booleans()) or not staged:
            staged[key] = data
            if apart:
                staged[key._replace(role=f"{key.role}_scale")] = make(part="scale", of=key.role)
    first = draw(st.integers(0, of.shards - 1))
    shards = (first, draw(st.integers(1, of.shards - first)))
    tokens = draw(ranges(stored))
    index = draw(indexes(stored, tokens, repeat=False))
    return held, own, staged, shards, index, tokens


def outcome(plan, held, indexes, tokens, max_sms=None):
    """What a gather leaves in staging and around it, and a scatter of anything in the pool; and both checksums."""
    before, sums, n = held.bytes(), np.full(2, 41, np.uint64), plan.nbytes(tokens)
    out = np.full(n + 160, 0xA5, np.uint8)
    at = 16 + -out.ctypes.data % 16
    plan.gather(out.ctypes.data + at, n, indexes, tokens, max_sms=max_sms, sum_ptr=sums.ctypes.data)
    found = [out[at : at + n].copy(), np.unique(np.r_[out[:at], out[at + n :]])]
    if plan._decodable:
        out[at : at + n] = np.random.default_rng(9).integers(0, 256, n, np.uint8)
        plan.scatter(out.ctypes.data + at, n, indexes, tokens, max_sms=max_sms, sum_ptr=sums[1:].ctypes.data)
    found += [sums, *held.bytes()]
    for memory, old in zip(held.memory, before, strict=True):
        memory[:] = old
    return found


def check_converts(plan, held, own, staged, select, indexes, tokens, *, max_sms=None, lists=dict):
    """Holds a plan that converts to the reference's; `lists` puts the indexes where the plan reads them."""
    reference = Pool.of(own).plan(select, backend="reference", staged=staged, checksum=True)
    found, want = outcome(plan, held, lists(indexes), tokens, max_sms), outcome(reference, held, indexes, tokens)
    assert_alike(found, want)


def of_cells(format, cells, companion=""):
    """All of a pool that holds `cells`, for `check_converts`."""
    held, own, peer, n = pools_of(format, cells, companion=companion)
    staged = pair(own, peer).offered
    select = [Select(view.key, 0, view.shards) for view in staged.views()]
    return held, own, staged, select, {"kv": Index.of(np.arange(n, dtype=np.int32))}, {"kv": (0, n)}


def formats_of(of, format):
    """Each view of `of` in `format`, with scales beside it where these are apart."""
    data, keys = Encoding.parse(format), of.view_keys()
    scales = {key._replace(role=f"{key.role}_scale"): str(replace(data, part="scale", of=key.role)) for key in keys}
    return dict.fromkeys(keys, format) | (scales if data.part == "data" else {})

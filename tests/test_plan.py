"""Ownership against a brute-force oracle on `shard_range`, staged sizes against a byte enumerator."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdstage import Key, Layout, Region, RowLevel, UsageError, View
from pdstage.kernels.device import MAX_COMPONENTS
from pdstage.layout.topology import REPLICATED, Axis, shard_axis, shard_range
from pdstage.plan import (
    HEAD_MAJOR,
    TOKEN_MAJOR,
    Rect,
    Select,
    Share,
    Staging,
    Stagings,
    shares,
    wire_order,
)
from pdstage.plan.convert import mxfp8
from pdstage.plan.ownership import EVERYTHING
from pdstage.protocol.destinations import split

SIZES = range(1, 9)


def view(key, axis, *, tokens_per_row=1, width=8, heads_first=False, page=16, segs=1):
    inner = segs * width
    rows = page // tokens_per_row
    row, shard = (inner, rows * inner) if heads_first else (axis.count * inner, inner)
    return View(
        key=Key(*key),
        region=0,
        offset=0,
        n_items=2,
        item_stride=rows * axis.count * inner,
        tokens_per_item=page,
        rows=(RowLevel(tokens_per_row, row),),
        shards=axis.count,
        shard_stride=shard,
        segs=segs,
        seg_stride=width,
        width=width,
        axis=axis,
        format="bf16",
    )


def layout_of(*views):
    return Layout.of([Region(0, 1 << 30)], views)


def model(kv_heads, tp, rank, kv_layers, latent_layers):
    """A rank of a hybrid model: sharded k and v in some layers, replicated latents in others."""
    axis = shard_axis("kv_head", kv_heads, tp, rank)
    return layout_of(
        *(view(("kv", role, layer), axis) for role in "kv" for layer in kv_layers),
        *(view(("latent", "latent", layer), REPLICATED) for layer in latent_layers),
    )


def expand(owned):
    """(component, role, layer, shard) of every share."""
    for share in owned:
        for layer in range(*share.layers):
            for shard in range(share.first, share.first + share.count):
                yield share.component, share.role, layer, shard


@pytest.mark.parametrize("total", SIZES)
def test_replicas_share_the_load(total):
    """Of one shard's replicas, none serves two destinations more than another, and over the layers none is idle."""
    for src_tp, dst_tp in itertools.product(range(total + 1, 2 * len(SIZES)), SIZES):
        n_layers = -(-src_tp // total)
        writers = {rank: model(total, src_tp, rank, range(n_layers), []) for rank in range(src_tp)}
        served: Counter = Counter()
        for rank in range(dst_tp):
            for number, owned in shares(
                writers, model(total, dst_tp, rank, range(n_layers), []), (dst_tp, rank)
            ).items():
                served.update((layer, shard, number) for _, role, layer, shard in expand(owned) if role == "k")
        for shard in range(total):
            holders = [rank for rank in range(src_tp) if shard in range(*shard_range(total, src_tp, rank))]
            wanted = sum(shard in range(*shard_range(total, dst_tp, rank)) for rank in range(dst_tp))
            for layer in range(n_layers):
                counts = [served[layer, shard, number] for number in holders]
                assert sum(counts) == wanted
                assert max(counts) - min(counts) <= 1
            assert all(any(served[layer, shard, number] for layer in range(n_layers)) for number in holders)


@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize(("src_tp", "dst_tp"), [(4, 1), (4, 2), (2, 2), (2, 4), (8, 4)])
def test_replicated_layers_are_striped_over_all_replicas(src_tp, dst_tp, stride):
    """Also when a hybrid model has such a layer at every fourth number only."""
    layers = range(stride - 1, 16 * stride, stride)
    writers = {rank: model(1, src_tp, rank, layers, layers) for rank in range(src_tp)}
    sent: Counter = Counter()
    for rank in range(dst_tp):
        for number, owned in shares(writers, model(1, dst_tp, rank, layers, layers), (dst_tp, rank)).items():
            sent[number] += len(list(expand(owned)))
            assert len(owned) <= 3, "striped layers are one run a role"
    assert set(sent.values()) == {3 * 16 * dst_tp // src_tp}


@pytest.mark.parametrize("scales", ["k_scale", "a_scale"])
@pytest.mark.parametrize("plain", [(), (0,), (1, 4)])
def test_scales_are_dealt_to_the_writer_of_what_they_are_of(scales, plain):
    """Some layers are kept in bf16, which shifts the turns of scales against those of data."""
    views = [
        replace(view(("kv", role, layer), REPLICATED, width=width), format=format)
        for layer in range(6)
        for role, width, format in (
            [("k", 256, "bf16")]
            if layer in plain
            else [("k", 128, mxfp8(part="data")), (scales, 4, mxfp8(part="scale", of="k"))]
        )
    ]
    src = dict.fromkeys(range(3), layout_of(*views))
    dealt = {writer: set(expand(owned)) for writer, owned in shares(src, layout_of(*views), (1, 0)).items()}
    for owned in dealt.values():
        coded = {layer for _, role, layer, _ in owned if role == "k" and layer not in plain}
        assert coded == {layer for _, role, layer, _ in owned if role == scales}
    assert all(dealt.values())


def test_shares_name_the_shard_nobody_holds():
    whole = model(4, 1, 0, range(4), [])
    with pytest.raises(UsageError, match=r"no prefill rank holds shard 0 of .*layer=3") as caught:
        shares({0: model(4, 1, 0, range(3), [])}, whole, (1, 0))
    error = caught.value
    assert error.fields == {"key": Key("kv", "k", 3), "shard": 0}
    with pytest.raises(UsageError, match="holds shard 2 of"):
        shares({0: model(4, 2, 0, range(4), [])}, whole, (1, 0))


HEADS = Axis("kv_head", 4, 0, 4)
SHAPES = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 3, 16, 64, 100, 128]), st.sampled_from([1, 2]))


@given(st.lists(SHAPES, min_size=1, max_size=6), st.integers(0, 20_000))
def test_tokens_within_is_the_most_that_always_fits(shapes, nbytes):
    views = [
        view(("kv", "k", layer), HEADS, tokens_per_row=per, width=width, segs=segs)
        for layer, (per, width, segs) in enumerate(shapes)
    ]
    staged = Staging(layout_of(*views), [Select(one.key, 0, HEADS.count) for one in views])
    n = staged.tokens_within("kv", nbytes)
    assert staged.tokens_within("swa", nbytes) == 0

    def worst(n_tokens):
        return max(staged.nbytes({"kv": (first, first + n_tokens)}) for first in range(4))

    assert n == 0 or worst(n) <= nbytes
    # Rows of different reach are not at their worst at the same start, so there the answer may be short of the most.
    covers = {per for per, *_ in shapes}
    assert worst(n + 1 if len(covers) == 1 else n + max(covers) + 1) > nbytes


def test_a_chunk_has_no_more_components_than_a_gpus_kernels_take():
    names = [f"c{number}" for number in range(MAX_COMPONENTS + 1)]
    layout = layout_of(*(view((name, "k", 0), Axis("kv_head", 1, 0, 1)) for name in names))
    owned = tuple(Share(name, "k", (0, 1, 1), 0, 1) for name in names)
    session = SimpleNamespace(common=EVERYTHING, stagings=Stagings(layout))
    destination = SimpleNamespace(shares=owned, session=session)
    rects = tuple(Rect(name, 0, 4, 0, 1) for name in names)
    assert [len(some) for some, _ in split(rects[1:], destination, 1 << 20)] == [MAX_COMPONENTS]
    assert max(len(some) for some, _ in split(rects, destination, 1 << 20)) <= MAX_COMPONENTS


@pytest.mark.parametrize(("layer", "start", "count"), [(9, 0, 1), (0, 3, 2), (0, -1, 2), (0, 0, 0)])
def test_staging_refuses_a_selection_of_what_is_not_there(layer, start, count):
    with pytest.raises(UsageError, match="no such view" if layer else "holds 4 shards"):
        Staging(model(4, 1, 0, range(2), []), [Select(Key("kv", "k", layer), start, count)])


@pytest.mark.parametrize(
    ("src", "dst", "order"),
    [
        ({"heads_first": True}, {"heads_first": True}, HEAD_MAJOR),
        ({"heads_first": True}, {}, TOKEN_MAJOR),
        ({"heads_first": True}, {"heads_first": True, "page": 32}, TOKEN_MAJOR),
        ({"heads_first": True, "page": 1}, {"heads_first": True, "page": 1}, TOKEN_MAJOR),
    ],
)
def test_wire_order(src, dst, order):
    a, b = layout_of(view(("kv", "k", 0), HEADS, **src)), layout_of(view(("kv", "k", 0), HEADS, **dst))
    assert wire_order(a, b) == order
    assert wire_order(b, a) == order


def test_wire_order_asks_only_views_that_both_sides_hold():
    hnd = view(("kv", "k", 0), HEADS, heads_first=True)
    other = view(("draft", "k", 0), HEADS)
    assert wire_order(layout_of(hnd, other), layout_of(hnd)) == HEAD_MAJOR
    assert wire_order(layout_of(other), layout_of(hnd)) == TOKEN_MAJOR

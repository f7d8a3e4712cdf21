"""Views by enumeration of their addresses, layouts by what they refuse and what they call equal."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdstage import Axis, UsageError
from pdstage.layout import Component, Key, Layout, Region, RowLevel, View, mismatch


def view(component="kv", role="k", layer=0, **changes):
    plain = {
        "key": Key(component, role, layer),
        "region": 0,
        "offset": 0,
        "n_items": 4,
        "item_stride": 256,
        "tokens_per_item": 4,
        "rows": (RowLevel(1, 64),),
        "shards": 2,
        "shard_stride": 32,
        "width": 32,
        "axis": Axis("kv_head", 8, 2, 2),
        "format": "bf16",
    }
    return View(**{**plain, **changes})


REGION = Region(0x10000, 4 * 256)
strides = st.integers(-300, 300)


@st.composite
def views(draw):
    inner = draw(st.integers(1, 3))
    outer = inner * draw(st.integers(1, 3))
    rows = [RowLevel(inner, draw(strides))]
    if draw(st.booleans()):
        rows.insert(0, RowLevel(outer, draw(strides)))
    shards = draw(st.integers(1, 3))
    return view(
        offset=draw(st.integers(0, 50)),
        n_items=draw(st.integers(1, 4)),
        item_stride=draw(strides),
        tokens_per_item=inner * draw(st.integers(1, 8)),
        rows=tuple(rows),
        shards=shards,
        shard_stride=draw(strides),
        segs=draw(st.integers(1, 3)),
        seg_stride=draw(strides),
        width=draw(st.integers(1, 9)),
        axis=Axis("kv_head", 3, 0, shards),
    )


def addresses(v):
    """Every byte of the view, by the formula of the module's docstring, loop by loop."""
    for item, t, shard, seg, byte in itertools.product(
        range(v.n_items), range(v.tokens_per_item), range(v.shards), range(v.segs), range(v.width)
    ):
        if len(v.rows) == 1:
            row = t // v.rows[0].tokens * v.rows[0].stride
        else:
            (n1, s1), (n2, s2) = v.rows
            row = (t // n1) * s1 + (t % n1 // n2) * s2
        yield v.offset + item * v.item_stride + row + shard * v.shard_stride + seg * v.seg_stride + byte


@given(views())
def test_extent_is_the_hull_of_all_addresses(v):
    touched = list(addresses(v))
    assert v.extent() == (min(touched), max(touched) + 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": ()}, "0 row levels"),
        ({"rows": (RowLevel(4, 1), RowLevel(2, 1), RowLevel(1, 1))}, "3 row levels"),
        ({"rows": (RowLevel(0, 1),)}, "row level of 0 tokens"),
        ({"key": Key("kv", "k", -1)}, "a layer number outside of"),
        ({"key": Key("kv", "k", (1 << 31) - 1)}, "a layer number outside of"),
        ({"rows": (RowLevel(3, 1),)}, "4 tokens per item, not a multiple of the 3"),
        ({"rows": (RowLevel(3, 1), RowLevel(2, 1))}, "not a multiple of the second"),
        ({"n_items": 0}, "size below 1"),
        ({"width": 0}, "size below 1"),
        ({"segs": 0}, "size below 1"),
        ({"shards": 3}, "declares 2 shards on axis 'kv_head' but stores 3"),
        ({"axis": Axis("kv_head", 8, 7, 2)}, "shards 7..9 of 8"),
        ({"axis": Axis("kv_head", 8, -1, 2)}, "shards -1..1 of 8"),
    ],
)
def test_a_view_refuses_what_cannot_be(changes, words):
    with pytest.raises(UsageError, match=words) as caught:
        view(**changes)
    assert caught.value.fields["key"] == changes.get("key", Key("kv", "k", 0))


@pytest.mark.parametrize(
    ("given_views", "words"),
    [
        ([view(), view(offset=0)], "given twice"),
        ([view(region=1)], "is of region 1"),
        ([view(region=-1)], "is of region -1"),
        ([view(offset=1)], "covers bytes 1..1025 of a region of 1024"),
        ([view(offset=-1)], "covers bytes -1"),
        ([view(), view(layer=1, n_items=3)], "3 items of 4 tokens"),
        ([view(), view(layer=1, tokens_per_item=2)], "4 items of 2 tokens"),
    ],
)
def test_a_layout_refuses_what_does_not_fit(given_views, words):
    with pytest.raises(UsageError, match=words):
        Layout.of([REGION], given_views)


def test_a_component_refuses_strangers_and_emptiness():
    with pytest.raises(UsageError, match="has no views"):
        Component("kv", ())
    with pytest.raises(UsageError, match="is not of component 'swa'"):
        Component("swa", (view(),))


def some_views():
    return [view(c, r, i) for c in ("swa", "kv", "draft") for r in ("v", "k") for i in (10, 2, 1)]


def test_views_are_kept_in_staged_order_whatever_order_they_come_in():
    expected = None
    for seed in range(5):
        shuffled = some_views()
        random.Random(seed).shuffle(shuffled)
        layout = Layout.of([REGION], shuffled, slots=["draft"])
        expected = expected or layout
        assert layout == expected
    assert [c.name for c in expected.components] == ["draft", "kv", "swa"]
    assert [c.positional for c in expected.components] == [False, True, True]
    kv = [(v.key.role, v.key.layer) for v in expected.component("kv").views]
    assert kv == [("k", 1), ("k", 2), ("k", 10), ("v", 1), ("v", 2), ("v", 10)]
    with pytest.raises(UsageError, match=r"no component 'mamba'.*draft, kv, swa"):
        expected.component("mamba")
    assert list(expected.by_key().values()) == list(expected.views())


def test_a_digest_knows_geometry_but_no_address():
    layout = Layout.of([REGION], some_views())
    elsewhere = Layout.of(
        [Region(0, 64), Region(0x999000, 9000, "cuda", 3)],
        [replace(v, region=1, offset=512) for v in some_views()],
    )
    assert layout.digest() == elsewhere.digest()
    assert len(layout.digest()) == 16


@pytest.mark.parametrize(
    "changes",
    [
        {"n_items": 3},
        {"rows": (RowLevel(2, 64),)},
        {"axis": Axis("kv_head", 8, 4, 2)},
        {"format": "fp16"},
        {"key": Key("kv", "k", 1)},
    ],
)
def test_a_digest_differs_when_geometry_does(changes):
    assert Layout.of([REGION], [view()]).digest() != Layout.of([REGION], [view(**changes)]).digest()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"segs": 2, "width": 16}, "1 runs of 32 bytes a kv_head at prefill, 2 of 16 at decode"),
        ({"axis": Axis("group", 8, 2, 2)}, "group of 8 at decode"),
    ],
)
def test_mismatch_says_why(changes, words):
    """What else it says: tests/protocol/test_fit.py."""
    assert words in mismatch(view(), view(**changes))

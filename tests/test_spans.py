"""Runs of items, and the direct path: its descriptors carried out by hand must do what the layout's formula says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pools import FUSED, HND, NHD, Logical, Stored, hold, kv_index
from rigs import HOST_CODES, host_code

from pdstage import Layout, UsageError
from pdstage.plan import Select
from pdstage.plan.spans import DirectPlan, Spans, split
from pdstage.plan.tables import Index

OF = Logical(roles=2, shards=4, width=16)
FAR = [0, 4, 2, 6], [3, 7, 1, 5]  # no neighbours
NEAR = [0, 1, 2, 3], [4, 5, 6, 7]


# How both sides are stored, items and shards; and how many descriptors that takes, and is estimated to.
CASES = {
    "whole pages, K and V apart": (NHD, NHD, {}, FAR, 4, 8, 8),
    "neighbouring pages join": (NHD, NHD, {}, NEAR, 4, 2, 8),
    "padded rows: token by token": (NHD, NHD, {"shard": 16}, NEAR, 4, 32, 32),
    "whole pages, heads outermost": (HND, HND, {}, FAR, 4, 8, 8),
    "half of the heads, outermost": (HND, HND, {}, FAR, 2, 8, 8),
    "half of the heads, padded pages": (HND, HND, {"shard": 16}, FAR, 2, 8, 8),
    "padded heads": (HND, HND, {"row": 16}, FAR, 2, 16, 16),
    "half of the heads, token by token": (NHD, NHD, {}, FAR, 2, 32, 32),
    "another order: cell by cell": (NHD, HND, {}, FAR, 4, 128, 128),
    "K and V fused in a head": (FUSED, FUSED, {}, FAR, 4, 4, 4),
    "K and V fused, neighbouring pages": (FUSED, FUSED, {}, NEAR, 4, 1, 4),
    "fused to split": (FUSED, NHD, {}, FAR, 4, 128, 128),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("code", HOST_CODES)
def test_as_few_descriptors_as_both_sides_allow(code, case):
    src, dst, pads, items, shards, n, estimate = CASES[case]
    stored = [Stored(OF, n_items=8, rows_per_item=4, order=order, pads=pads) for order in (src, dst)]
    held = [hold([one]) for one in stored]
    select = [Select(key, 0, shards) for key in OF.view_keys()]
    index = [kv_index(side) for side in items]
    with host_code(code):
        plan = DirectPlan(held[0].layout, select, held[1].layout, select)
        assert (plan.spans({"kv": (0, 16)}, *index).nbytes.size, plan.n_descriptors({"kv": (0, 16)})) == (n, estimate)


@pytest.mark.parametrize("code", HOST_CODES)
@pytest.mark.parametrize(
    ("src_items", "dst_items", "words"),
    [
        ([0, 1], [0, 8], "item 8 at position 1 of component 'kv'"),
        ([0, 1], [-1, 1], "item -1 at position 0 of component 'kv'"),
        ([0, 1], [3, 3], "item 3 at position 1 of component 'kv' is a destination twice"),
        ([0, 9], [0, 1], "item 9 at position 1 of component 'kv'"),
        ([0], [0, 1], "has 1 items where its tokens need 2"),
        ([0, 1], [0], "has 1 items where its tokens need 2"),
    ],
)
def test_a_peers_items_are_checked(code, src_items, dst_items, words):
    stored = Stored(OF, n_items=8, rows_per_item=4)
    held, select = (hold([Stored(OF, n_items=9, rows_per_item=4)]), hold([stored])), OF.whole()
    with host_code(code):
        plan = DirectPlan(held[0].layout, select, held[1].layout, select)
        with pytest.raises(UsageError) as caught:
            plan.spans({"kv": (0, 8)}, kv_index(src_items), kv_index(dst_items))
    assert words in str(caught.value)


@pytest.mark.parametrize("code", HOST_CODES)
@pytest.mark.parametrize("n_items", [1 << 26, (1 << 26) + 1, 1 << 60])
def test_a_peers_number_of_items_costs_no_memory(code, n_items):
    """It is the peer's word, and pages cut into pieces are many items too; repeated ones are found all the same."""
    held, select = hold([Stored(OF, n_items=8, rows_per_item=4)]), OF.whole()
    (component,) = held.layout.components
    views = tuple(replace(view, n_items=n_items, item_stride=0) for view in component.views)
    theirs = Layout(held.layout.regions, (replace(component, views=views),))
    ours = {"kv": Index.of(np.arange(4))}
    with host_code(code):
        plan = DirectPlan(held.layout, select, theirs, select)
        assert plan.spans({"kv": (0, 16)}, ours, kv_index([5, 3, 7, 1 << 25])).nbytes.size
        with pytest.raises(UsageError, match="item 3 at position 2 of component 'kv' is a destination twice"):
            plan.spans({"kv": (0, 16)}, ours, kv_index([5, 3, 3, 5]))


def test_layouts_that_do_not_match_are_refused_in_words():
    held = hold([Stored(OF)])
    wide = hold([Stored(Logical(roles=2, shards=4, width=32))])
    select = OF.whole()
    with pytest.raises(UsageError, match="16 bytes a head at prefill, 32 at decode"):
        DirectPlan(held.layout, select, wide.layout, select)
    with pytest.raises(UsageError, match="different views or shard counts"):
        DirectPlan(held.layout, select, held.layout, select[:1])
    with pytest.raises(UsageError, match="different views or shard counts"):
        DirectPlan(held.layout, select, held.layout, [s._replace(count=3) for s in select])


def test_batches_hold_every_byte_in_order_and_keep_their_limit():
    nbytes = np.arange(1, 15)
    spans = Spans(nbytes * 1000, nbytes * 1000 + 500000, nbytes)
    batches = list(split(spans, 6))
    assert [row for b in batches for row in zip(*b, strict=True)] == list(zip(*spans, strict=True))
    assert [b.nbytes.size for b in batches] == [6, 6, 2]
    assert not list(split(Spans(*(side[:0] for side in spans)), 6))

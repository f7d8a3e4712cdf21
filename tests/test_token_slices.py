"""Where two ranks hold different tokens their pages are cut into pieces: how, and what is refused.

That the bytes arrive is for tests/any_layout to see.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from pdstage import Axis, UsageError
from pdstage.layout import ALL_TOKENS, Key, Layout, Region, RowLevel, TokenShard, View
from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR
from pdstage.plan.ownership import Common
from pdstage.plan.spans import Index
from pdstage.plan.token_slices import Pair, tokens_problem


def view(role, *, page=8, row=16, item=128, base=0, n_items=4, rows=None, shards=1, shard=0):
    axis = Axis("head", shards, 0, shards)
    return View(
        key=Key("kv", role, 0), region=0, offset=base, n_items=n_items, item_stride=item, tokens_per_item=page,
        rows=rows or (RowLevel(1, row),), shards=shards, shard_stride=shard, width=8, axis=axis, format="u8",
    )  # fmt: skip


def pair_of(src_views, dst_views, dst):
    sides = [
        Layout.of([Region(1 << 20, 1 << 40)], views, owned={"kv": owned})
        for views, owned in ((src_views, ALL_TOKENS), (dst_views, dst))
    ]
    return Pair(*sides, Common.of(*sides))


def test_only_the_side_with_foreign_tokens_between_is_cut():
    """Blocks of four out of pages of eight and of sixteen: pieces of four. The part itself stays as it is."""
    pair = pair_of([view("k", page=16, item=256)], [view("k")], dst=TokenShard(2, 1, 4))
    assert pair.src.key and not pair.dst.key
    (component,) = pair.src.layouts[0].components
    assert component.tokens_per_item == 4
    lists = pair.src.indexes({"kv": Index.of(np.array([3, 0]), 16)}, {"kv": (9, 14)}).of(0)
    assert lists["kv"].first_token == 8
    assert lists["kv"].keep.tolist() == [3 * 4 + 1, 3 * 4 + 3], "tokens 20..24 and 28..32 of the page of token 16"


def test_what_a_peer_says_of_its_blocks_costs_no_memory_by_their_length():
    """A Hello of a few hundred bytes may name blocks of 2^20 tokens, and its session keeps what follows from it."""
    tracemalloc.start()
    pair = pair_of([view("k", page=1, item=16)], [view("k")], dst=TokenShard(2, 1, 1 << 20))
    assert pair.src.key
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept <= most < 100_000
    lists = pair.src.indexes({"kv": Index.of(np.arange(1 << 16), 1 << 20)}, {"kv": (70, 73)}).of(0)
    assert lists["kv"].keep.tolist() == [70, 71, 72] and lists["kv"].first_token == 70


def test_steps_with_no_common_unit_are_refused_at_hello():
    views = [view("k", page=2, row=8, item=1001, n_items=1 << 24)]
    sides = [
        Layout.of([Region(0, 1 << 40)], views, owned={"kv": owned}) for owned in (TokenShard(4, 1, 1), ALL_TOKENS)
    ]  # fmt: skip
    said = tokens_problem(*sides)
    assert "strides of (1001, 0, 8) bytes" in said and "common unit is 1;" in said
    assert not tokens_problem(sides[0], sides[0]), "where nothing is cut there is nothing to number"


@pytest.mark.parametrize(("page", "order"), [(16, HEAD_MAJOR), (32, TOKEN_MAJOR)])
def test_heads_stay_outermost_where_pieces_are_pages_of_the_other_side(page, order):
    def hnd(size):
        return view("k", page=size, row=8, item=2 * 8 * size, shards=2, shard=8 * size)

    assert pair_of([hnd(64)], [hnd(page)], dst=TokenShard(2, 1, 16)).order == order


@pytest.mark.parametrize(
    ("pages", "first", "words"),
    [([0], 0, "has 1 items from own token 0"), ([0, 1], 8, "from own token 8"), ([0, 1, 2], -3, "own token -3 on")],
)
def test_items_that_lack_a_page_are_refused(pages, first, words):
    pair = pair_of([view("k")], [view("k")], dst=TokenShard(2, 1, 4))
    with pytest.raises(UsageError, match=words):
        pair.src.indexes({"kv": Index.of(np.array(pages), first)}, {"kv": (0, 8)})


def test_pages_and_rows_in_descending_order_are_numbered_from_the_lowest():
    down = view("k", item=-128, base=3 * 128 + 7 * 16, row=-16)
    pair = pair_of([down], [view("k")], dst=TokenShard(2, 0, 4))
    (cut,) = pair.src.layouts[0].views()
    lists = pair.src.indexes({"kv": Index.of(np.array([3, 0]))}, {"kv": (0, 8)}).of(0)
    pages = [cut.offset + number * cut.item_stride for number in lists["kv"].keep.tolist()]
    assert pages == [7 * 16, 3 * 128 + 7 * 16], "tokens 0 and 8: the first rows of pages 3 and 0"
    assert min(lists["kv"].keep) >= 0 and cut.n_items == 8

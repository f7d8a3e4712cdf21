"""Bytes between ranks that hold different tokens: every byte of a destination against its owner's, cell by cell.

A prefill engine of CP x TP ranks and one decode rank, over pools of any shape, through plans, kernels and the direct
path, as nodes use them; without rooms.
"""

from __future__ import annotations

import itertools
import random
import tracemalloc
import zlib
from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdstage.errors import UsageError
from pdstage.kernels import Pool
from pdstage.layout import ALL_TOKENS, Key, Layout, Region, RowLevel, TokenShard, View
from pdstage.layout.topology import Axis, shard_range
from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR, Rect, Stagings, selects, shares
from pdstage.plan.ownership import Common
from pdstage.plan.spans import Index
from pdstage.plan.tables import memory
from pdstage.plan.token_slices import DirectPlans, Pair, tokens_problem
from pdstage.stager import Stager
from tests.owners import all_ranks, items_for, place_of, ways, with_owned
from tests.pools import GUARD, Held, Logical, Stored, hold, orders
from tests.rows import drawn


@dataclass
class Rank:
    """One rank: its memory, its part of the tokens, and the pages that hold them."""

    owned: TokenShard
    held: Held
    page: int
    n: int
    since: int

    def __post_init__(self):
        self.layout = self.held.layout
        (component,) = self.layout.components
        pages = np.random.default_rng(self.page).permutation(component.n_items).astype(np.int32)
        self.pages, self.first = items_for(self.owned, self.n, self.page, pages, self.since)
        self.places = place_of(self.owned, self.n)
        self.index = {"kv": Index.of(self.pages, self.first)}
        self.stager = Stager(Pool.of(self.layout, keep=self.held))

    def cells(self, view, token, shard):
        """(memory, offset) of each run of one token and local shard; rows of several tokens are their first's."""
        page, t = divmod(self.places[token] - self.first, view.tokens_per_item)
        at = view.offset + int(self.pages[page]) * view.item_stride + view.row_offset(t) + shard * view.shard_stride
        return [(view.region, GUARD + at + seg * view.seg_stride) for seg in range(view.segs)]


def renamed(layout, owned):
    """The component "kv~" as further roles of "kv": views of other strides under one list of items."""
    views = [
        replace(v, key=Key("kv", v.key.role + ("~" if v.key.component == "kv~" else ""), v.key.layer))
        for v in layout.views()
    ]
    return with_owned(Layout.of(layout.regions, views), owned)


@dataclass
class Case:
    srcs: dict[int, Rank]
    dst: Rank
    dst_tp: tuple[int, int]
    start: int
    marks: list[int]
    lanes: int


def truth(view, token, head):
    """What the row of `token` holds of one head."""
    seed = zlib.crc32(f"{view.key}/{token - token % view.tokens_per_row}/{head}".encode())
    return np.frombuffer(random.Random(seed).randbytes(view.segs * view.width), np.uint8).reshape(view.segs, view.width)


def fill(rank, memory):
    """Writes the truth of every token that `rank` holds from `since` on."""
    for view in rank.layout.views():
        for token in (t for t in rank.places if t >= rank.since):
            row = token - token % view.tokens_per_row
            for shard in range(view.shards):
                values = truth(view, token, view.axis.first + shard)
                for (region, at), value in zip(rank.cells(view, row, shard), values, strict=True):
                    memory[region][at : at + view.width] = value


def expected(case):
    """The destination's bytes after the transfer."""
    result = case.dst.held.bytes()
    fill(case.dst, result)
    return result


def send(case, path):
    """Each writer's chunks into the destination, staged or direct; what each rank must do comes from its own side."""
    dealt = shares({n: src.layout for n, src in case.srcs.items()}, case.dst.layout, case.dst_tp)
    sums: deque = deque()
    for number, src in case.srcs.items():
        common = Common.of(src.layout, case.dst.layout)
        pair = Pair(src.layout, case.dst.layout, common)
        low, high = common.part("kv", case.start, case.dst.n)
        for begin, end in itertools.pairwise(case.marks):
            start, stop = max(begin, low), min(end, high)
            rects = (Rect("kv", start, stop, 0, 9),)
            tokens = common.tokens(rects)
            owned = dealt[number]
            if not owned or tokens["kv"][0] >= tokens["kv"][1]:
                continue
            (staged if path == "staged" else direct)(case, src, pair, owned, rects, tokens, sums)


def staged(case, src, pair, owned, rects, tokens, sums):
    sizes = {Stagings(rank.layout).of(owned, rects).nbytes(tokens) for rank in (src, case.dst)}
    (nbytes,) = sizes
    buffer = np.full(nbytes + 2 * 256, 0xC3, np.uint8)
    at = Region(-(-buffer.ctypes.data // 256) * 256, nbytes)
    how = {"order": pair.order, "checksum": True, "tokens": tokens}
    src.stager.gather(1, owned, rects, items=src.index, dst=at, cut=pair.src, **how)
    ((_, error, gathered, *_),) = src.stager.poll()
    assert error is None, error
    case.dst.stager.scatter(1, owned, rects, items=case.dst.index, src=at, cut=pair.dst, **how)
    ((_, error, scattered, *_),) = case.dst.stager.poll()
    assert error is None, error
    assert gathered == scattered, "both sides name tokens alike"
    used = at.base + nbytes - buffer.ctypes.data
    assert (buffer[used:] == 0xC3).all()


def direct(case, src, pair, owned, rects, tokens, sums):
    ours, theirs = (selects(rank.layout, owned, rects) for rank in (src, case.dst))
    plans = DirectPlans(pair.src, ours, pair.dst, theirs)
    spans = plans.spans(tokens, src.index, case.dst.index)
    for a, b, n in zip(*spans, strict=True):
        memory(int(b), int(n))[:] = memory(int(a), int(n))
    assert plans.n_descriptors(tokens) > 0


@st.composite
def storages(draw, of, owned, shards, n, page):
    """How a rank stores its part: any order and padding, pages of `page` tokens, enough of them."""
    places = place_of(owned, n).values()
    n_items = max(places, default=0) // page + 1 + draw(st.integers(0, 2))
    pads = draw(st.dictionaries(st.sampled_from(["item", "row", "shard"]), st.sampled_from([1, 8, 16]), max_size=2))
    return Stored(
        replace(of, shards=shards[1] - shards[0]), n_items, page // of.tokens_per_row,
        draw(st.sampled_from([0, 0, 0, 1, 2, 3, 4])), draw(orders()), pads, draw(st.sampled_from([0, 0, 16])),
        shards[0], of.shards,
    )  # fmt: skip


@st.composite
def cases(draw):
    """P of CP x TP ranks, one rank of a D that cuts heads and tokens otherwise; a part of a sequence, in chunks."""
    src_way, dst_way = draw(ways()), draw(ways())
    both = [by for size, by in (src_way, dst_way) if size > 1]
    per_row = draw(st.sampled_from([per for per in (1, 1, 1, 2) if all(by and by % per == 0 for by in both)] or [1]))
    heads = draw(st.sampled_from([1, 2, 3, 4]))
    kinds = [Logical("kv", draw(st.integers(1, 2)), draw(st.integers(1, 2)), heads, 1, 8, per_row)]
    if draw(st.booleans()):
        kinds.append(Logical("kv~", 1, 1, heads, draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 4])), per_row))
    src_tp, dst_tp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3]))
    most = 3 * max([size * by for size, by in (src_way, dst_way)] + [8])
    n = draw(st.integers(1, most))
    start = draw(st.sampled_from([0, 0, draw(st.integers(0, n))]))
    page_of = {}

    def rank(side, owned, tp, number, since):
        shards = shard_range(heads, tp, number)
        page = page_of.setdefault(side, draw(st.sampled_from([p for p in (1, 2, 4, 6, 16, 64) if p % per_row == 0])))
        parts = [draw(storages(kinds[0], owned, shards, n, page))]
        parts += [replace(draw(storages(kind, owned, shards, n, page)), n_items=parts[0].n_items) for kind in kinds[1:]]
        held = hold(parts, seed=owned.rank + 10 * number)
        return Rank(owned, Held(held.memory, renamed(held.layout, owned)), page, n, since)

    ranks = itertools.product(all_ranks(*src_way), range(src_tp))
    srcs = {i: rank("src", owned, src_tp, number, 0) for i, (owned, number) in enumerate(ranks)}
    dst_rank, dst_number = draw(st.integers(0, dst_way[0] - 1)), draw(st.integers(0, dst_tp - 1))
    dst = rank("dst", TokenShard(dst_way[0], dst_rank, dst_way[1]), dst_tp, dst_number, start)
    inner = draw(st.lists(st.integers(start, n), max_size=3, unique=True))
    return Case(srcs, dst, (dst_tp, dst_number), start, sorted({start, *inner, n}), 1)


@pytest.mark.parametrize("path", ["staged", "direct"])
@settings(max_examples=drawn(25, full=60), deadline=None)
@given(case=cases())
def test_every_destination_byte(path, case):
    for src in case.srcs.values():
        fill(src, src.held.memory)
    wanted = expected(case)
    send(case, path)
    for got, want in zip(case.dst.held.memory, wanted, strict=True):
        assert np.array_equal(got, want)


def view(role, *, page=8, row=16, item=128, base=0, n_items=4, rows=None, shards=1, shard=0):
    axis = Axis("head", shards, 0, shards)
    return View(
        key=Key("kv", role, 0), region=0, offset=base, n_items=n_items, item_stride=item, tokens_per_item=page,
        rows=rows or (RowLevel(1, row),), shards=shards, shard_stride=shard, width=8, axis=axis, format="u8",
    )  # fmt: skip


def pair_of(src_views, dst_views, src=ALL_TOKENS, dst=ALL_TOKENS):
    sides = [
        Layout.of([Region(1 << 20, 1 << 40)], views, owned={"kv": owned})
        for views, owned in ((src_views, src), (dst_views, dst))
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

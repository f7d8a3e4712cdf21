"""Small pools of every shape, and what moving tokens between two of them must do, byte by byte.

A pool is described by the order in which its dimensions nest in memory, from the outermost to the innermost, and by the
padding after each; every engine's layout is one of these.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from pdstage import native
from pdstage.layout import Key, Layout, Region, Row, View
from pdstage.plan import Select
from pdstage.tables import Index
from pdstage.topology import Axis

DIMS = ("item", "block", "row", "role", "shard", "seg")
NHD = ("role", "item", "block", "row", "shard", "seg")
HND = ("role", "item", "shard", "block", "row", "seg")
FUSED = ("item", "block", "row", "shard", "role", "seg")
GUARD = 64


@dataclass(frozen=True)
class Logical:
    """What both sides of a transfer agree on: a component of `layers` layers of `roles` views."""

    name: str = "kv"
    layers: int = 1
    roles: int = 1
    shards: int = 1
    segs: int = 1
    width: int = 8
    tokens_per_row: int = 1

    def view_keys(self):
        return [Key(self.name, f"r{role}", layer) for role in range(self.roles) for layer in range(self.layers)]


@dataclass
class Held:
    """A pool with its memory: one region a component and layer, between guards."""

    memory: list[np.ndarray]
    layout: Layout

    def bytes(self):
        return [m.copy() for m in self.memory]


@dataclass(frozen=True)
class Stored:
    """How one side stores a `Logical`: `block` rows are one step of the first row level, 0 for a single level."""

    of: Logical
    n_items: int = 4
    rows_per_item: int = 2
    block: int = 0
    order: tuple[str, ...] = NHD
    pads: dict[str, int] = field(default_factory=dict)
    base: int = 0

    @property
    def tokens_per_item(self):
        return self.rows_per_item * self.of.tokens_per_row


def hold(stored, seed=0):
    """Memory full of random bytes, and the layout over it."""
    rng = np.random.default_rng(seed)
    memory, regions, views = [], [], []
    for one in stored:
        of = one.of
        block = one.block or one.rows_per_item
        n_blocks = -(-one.rows_per_item // block)
        sizes = {
            "item": one.n_items,
            "block": n_blocks,
            "row": block,
            "role": of.roles,
            "shard": of.shards,
            "seg": of.segs,
        }
        strides, extent = {}, of.width
        for dim in reversed(one.order):
            strides[dim] = extent
            extent = extent * sizes[dim] + one.pads.get(dim, 0)
        per = of.tokens_per_row
        levels = (Row(per, strides["row"]),)
        if one.block:
            levels = (Row(block * per, strides["block"]), *levels)
        for layer in range(of.layers):
            whole = rng.integers(0, 256, GUARD * 2 + one.base + extent, dtype=np.uint8)
            region = len(regions)
            regions.append(Region(whole.ctypes.data + GUARD, whole.size - 2 * GUARD))
            memory.append(whole)
            for role in range(of.roles):
                views.append(
                    View(
                        key=Key(of.name, f"r{role}", layer),
                        region=region,
                        offset=one.base + role * strides["role"],
                        n_items=one.n_items,
                        item_stride=strides["item"],
                        tokens_per_item=one.tokens_per_item,
                        rows=levels,
                        shards=of.shards,
                        shard_stride=strides["shard"],
                        segs=of.segs,
                        seg_stride=strides["seg"],
                        width=of.width,
                        axis=Axis("head", of.shards, 0, of.shards),
                        format="bytes",
                    )
                )
    return Held(memory, Layout.of(regions, views))


def cells(held, select, index, items, tokens):
    """(memory, offset) of each run of `width` bytes that `select` names, token-major, by the formula of the layout."""
    view = held.layout.by_key()[select.key]
    per = view.tokens_per_row
    found = []
    for row in range(tokens[0] // per, -(-tokens[1] // per)):
        item, t = divmod(row * per - index.first_token, view.tokens_per_item)
        for shard in range(select.start, select.start + select.count):
            for seg in range(view.segs):
                offset = view.offset + int(items[item]) * view.item_stride + view.row_offset(t)
                found.append((view.region, GUARD + offset + shard * view.shard_stride + seg * view.seg_stride))
    return found


def moved(src, src_select, src_index, dst, dst_select, dst_index, tokens):
    """The bytes of `dst` as they must be after the tokens were moved."""
    result = dst.bytes()
    for a, b in zip(sorted(src_select), sorted(dst_select), strict=True):
        name = a.key.component
        start, stop = tokens.get(name, (0, 0))
        if start == stop:
            continue
        width = src.layout.by_key()[a.key].width
        sides = (
            cells(held, s, index[name], index[name].keep, (start, stop))
            for held, s, index in ((src, a, src_index), (dst, b, dst_index))
        )
        for (i, at), (j, to) in zip(*sides, strict=True):
            result[j][to : to + width] = src.memory[i][at : at + width]
    return result


def orders():
    return st.sampled_from([NHD, HND, FUSED]) | st.permutations(DIMS).map(tuple)


@st.composite
def logicals(draw, name="kv"):
    return Logical(
        name,
        draw(st.integers(1, 2)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 1, 2, 3])),
        draw(st.sampled_from([1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64])),
        draw(st.sampled_from([1, 1, 1, 2, 4])),
    )


@st.composite
def storages(draw, of):
    rows = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    pads = draw(st.dictionaries(st.sampled_from(DIMS), st.sampled_from([1, 8, 16, 64]), max_size=2))
    return Stored(
        of,
        draw(st.integers(1, 8)),
        rows,
        draw(st.sampled_from([0, 0, 1, 2, 3, 4])),
        draw(orders()),
        pads,
        draw(st.sampled_from([0, 0, 0, 1, 16, 40])),
    )


@st.composite
def selections(draw, layout):
    """Some views and shards of each."""
    select = []
    for view in layout.views():
        if draw(st.booleans()) or not select:
            start = draw(st.integers(0, view.shards - 1))
            select.append(Select(view.key, start, draw(st.integers(1, view.shards - start))))
    return select


@st.composite
def indexes(draw, stored, tokens, repeat):
    """An index that covers `tokens`: any first token at or before the range, any items, unique unless `repeat`."""
    start, stop = tokens
    per = stored.of.tokens_per_row
    size = stored.tokens_per_item
    first = draw(st.integers(0, start // per)) * per
    # Items in front of the range are never read: they may be anything.
    needed = -(-(stop - first) // size) if stop > start else 0
    used_from = min((start - first) // size, needed)
    ids = st.integers(0, stored.n_items - 1)
    n_used = needed - used_from
    used = draw(st.lists(ids, min_size=n_used, max_size=n_used, unique=not repeat))
    if draw(st.booleans()):
        used = sorted(used)
    items = (
        [draw(st.sampled_from([-1, 10**6])) for _ in range(used_from)] + used + draw(st.lists(st.just(-7), max_size=2))
    )
    return Index.of(np.array(items, dtype=draw(st.sampled_from([np.int32, np.int64]))), first)


@st.composite
def ranges(draw, *stored):
    """A token range, maybe empty, that a list of distinct items covers on every side, wherever its first token is."""
    most = min(max(0, (one.n_items - 1) * one.tokens_per_item) for one in stored)
    start = draw(st.integers(0, 12))
    return start, start + draw(st.integers(0, min(most, 40)))


@contextlib.contextmanager
def without_native():
    """Inside, the numpy halves run."""
    held, native.ext = native.ext, None
    try:
        yield
    finally:
        native.ext = held


def host_code(name):
    """A context in which host code is `name`, "c++" or "numpy"."""
    return without_native() if name == "numpy" else contextlib.nullcontext()


HOST_CODES = ["numpy"] if native.ext is None else ["c++", "numpy"]

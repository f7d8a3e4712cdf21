"""Small pools of every shape, and what moving tokens between two of them must do, byte by byte.

A pool is described by the order in which its dimensions nest in memory, from the outermost to the innermost, and by the
padding after each; every engine's layout is one of these. rigs.py holds backends to the reference on generated
`Transfer`s.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from hypothesis import strategies as st

from pdstage import Axis, Key, Layout, Region, RowLevel, View
from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR, Select
from pdstage.plan.tables import Index

DIMS = ("item", "block", "row", "role", "shard", "seg")
NHD = ("role", "item", "block", "row", "shard", "seg")
HND = ("role", "item", "shard", "block", "row", "seg")
FUSED = ("item", "block", "row", "shard", "role", "seg")
GUARD = 64


@dataclass(frozen=True)
class Logical:
    """What both sides of a transfer agree on: a component of `layers` layers of `roles` views, of pages or of slots."""

    name: str = "kv"
    layers: int = 1
    roles: int = 1
    shards: int = 1
    segs: int = 1
    width: int = 8
    tokens_per_row: int = 1
    positional: bool = True

    def view_keys(self):
        return [Key(self.name, f"r{role}", layer) for role in range(self.roles) for layer in range(self.layers)]

    def whole(self):
        """All shards of all views, selected."""
        return [Select(key, 0, self.shards) for key in self.view_keys()]


@dataclass
class Held:
    """A pool with its memory: one region a component and layer, between guards."""

    memory: list[np.ndarray]
    layout: Layout

    def bytes(self):
        return [m.copy() for m in self.memory]


@dataclass(frozen=True)
class Stored:
    """How one side stores a `Logical`: `block` rows are one step of the first row level, 0 for a single level.

    A rank of several holds shards `[first, first + of.shards)` of `total`; 0 for all there are.
    """

    of: Logical
    n_items: int = 4
    rows_per_item: int = 2
    block: int = 0
    order: tuple[str, ...] = NHD
    pads: dict[str, int] = field(default_factory=dict)
    base: int = 0
    first: int = 0
    total: int = 0

    @property
    def tokens_per_item(self):
        return self.rows_per_item * self.of.tokens_per_row


def aligned(array):
    """A copy of these bytes at a multiple of 64: what a device's memory is at least, and numpy's now and then."""
    whole = np.empty(array.nbytes + 64, np.uint8)
    start = -whole.ctypes.data % 64
    copy = whole[start : start + array.nbytes]
    copy[:] = array
    return copy


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
        levels = (RowLevel(per, strides["row"]),)
        if one.block:
            levels = (RowLevel(block * per, strides["block"]), *levels)
        for layer in range(of.layers):
            whole = aligned(rng.integers(0, 256, GUARD * 2 + one.base + extent, dtype=np.uint8))
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
                        axis=Axis("head", one.total or of.shards, one.first, of.shards),
                        format="bytes",
                    )
                )
    slots = [one.of.name for one in stored if not one.of.positional]
    return Held(memory, Layout.of(regions, views, slots=slots))


def kv_index(items, dtype=None):
    """The one list of items that component "kv" has."""
    return {"kv": Index.of(np.array(items, dtype))}


def staging(nbytes, skew=0):
    """`nbytes` of 0xA5, `skew` bytes past a multiple of 64."""
    whole = np.full(nbytes + 64 + skew, 0xA5, np.uint8)
    return whole[-whole.ctypes.data % 64 + skew :][:nbytes]


def gathered(plan, index, tokens, **how):
    """The staged bytes."""
    out = staging(plan.nbytes(tokens))
    plan.gather(out.ctypes.data, out.size, index, tokens, **how)
    return out


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


def assert_alike(found, want):
    """Array by array."""
    for a, b in zip(found, want, strict=True):
        np.testing.assert_array_equal(a, b)


def orders():
    return st.sampled_from([NHD, HND, FUSED]) | st.permutations(DIMS).map(tuple)


WIDTHS = [1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64, 100, 144]


@st.composite
def logicals(draw, name="kv"):
    """Anything affine, and each kind that engines keep: split or fused K and V, MLA latents, conv and SSM states."""
    kind = draw(st.sampled_from(["any", "any", "any", "attention", "latent", "state"]))
    layers, width = draw(st.integers(1, 2)), draw(st.sampled_from(WIDTHS))
    shards, segs = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 1, 2, 3]))
    if kind == "attention":
        return Logical(name, layers, 2, shards, 1, width)
    if kind == "latent":
        return Logical(name, layers, 1, 1, 1, draw(st.sampled_from([72, 132, 576])))
    if kind == "state":
        return Logical(name, layers, 2, shards, segs, width, positional=False)
    return Logical(name, layers, draw(st.integers(1, 2)), shards, segs, width, draw(st.sampled_from([1, 1, 1, 2, 4])))


@st.composite
def storages(draw, of):
    rows = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 64, 128])) if of.positional else 1
    pads = draw(st.dictionaries(st.sampled_from(DIMS), st.sampled_from([1, 8, 16, 64]), max_size=2))
    return Stored(
        of,
        draw(st.integers(1, 8 if rows <= 8 else 3)),
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
    per, size = stored.of.tokens_per_row, stored.tokens_per_item

    def used(first):
        """The positions of the list that the range touches."""
        return ((start - first) // size, -(-(stop - first) // size)) if stop > start else (0, 0)

    firsts = range(0, start + 1, per) if stored.of.positional else [0]
    first = draw(st.sampled_from([f for f in firsts if used(f)[1] - used(f)[0] <= stored.n_items]))
    used_from, used_to = used(first)
    n_used = used_to - used_from
    ids = st.integers(0, stored.n_items - 1)
    items = draw(st.lists(ids, min_size=n_used, max_size=n_used, unique=not repeat))
    if draw(st.booleans()):
        items = sorted(items)
    # Items in front of the range and behind it are never read: they may be anything.
    items = [draw(st.sampled_from([-1, 10**6])) for _ in range(used_from)] + items
    items += draw(st.lists(st.just(-7), max_size=2))
    return Index.of(np.array(items, dtype=draw(st.sampled_from([np.int32, np.int64]))), first)


@st.composite
def ranges(draw, *stored):
    """A token range, maybe empty, that a list of distinct items can cover on every side."""
    most = min(one.n_items * one.tokens_per_item - one.of.tokens_per_row + 1 for one in stored)
    start = draw(st.integers(0, 12))
    return start, start + draw(st.integers(0, min(most, 40)) | st.integers(0, min(most, 150)))


@dataclass(frozen=True)
class Transfer:
    """Tokens of one pool on their way to another that stores them differently.

    `checksum` is what calls ask for. With `spare` plans could sum although no call asks them to: a copy's peer always,
    the others where `checksum` is false.
    """

    src: Held
    dst: Held
    src_select: list[Select]
    dst_select: list[Select]
    src_index: dict[str, Index]
    dst_index: dict[str, Index]
    tokens: dict[str, tuple[int, int]]
    wire: str = TOKEN_MAJOR
    checksum: bool = True
    skew: int = 0
    spare: bool = False

    def after(self):
        """The bytes of `dst` as they must be then."""
        return moved(self.src, self.src_select, self.src_index, self.dst, self.dst_select, self.dst_index, self.tokens)


@st.composite
def transfers(draw, logical=logicals, storage=storages):
    """One or two components, each rank holding its own shards of them; views move all that both have, or some."""
    sides, select, index, tokens = ([], []), ([], []), ({}, {}), {}
    for name in ("kv", "swa")[: draw(st.sampled_from([1, 1, 2]))]:
        whole = draw(logical(name))
        n_shared = draw(st.just(whole.shards) | st.integers(1, whole.shards))
        shared = draw(st.integers(0, whole.shards - n_shared))
        stop = shared + n_shared
        keys = [key for key in whole.view_keys() if draw(st.integers(0, 3))] or whole.view_keys()[:1]
        cuts = dict.fromkeys(keys, (shared, stop))
        if draw(st.sampled_from([False, False, True])):
            for key in keys:
                start = draw(st.integers(shared, stop - 1))
                cuts[key] = start, draw(st.integers(start + 1, stop))
        held = []
        for side in (0, 1):
            low, high = (draw(st.integers(0, shared)), draw(st.integers(stop, whole.shards)))
            stored = draw(storage(replace(whole, shards=high - low)))
            held.append(replace(stored, first=low, total=whole.shards))
            select[side].extend(Select(key, start - low, end - start) for key, (start, end) in cuts.items())
            sides[side].append(held[side])
        tokens[name] = draw(ranges(*held))
        for side in (0, 1):
            index[side][name] = draw(indexes(held[side], tokens[name], repeat=side == 0))
    return Transfer(
        hold(sides[0], 1),
        hold(sides[1], 2),
        *select,
        *index,
        tokens,
        draw(st.sampled_from([TOKEN_MAJOR, HEAD_MAJOR])),
        draw(st.booleans()),
        draw(st.sampled_from([0, 0, 1, 16])),
        draw(st.booleans()),
    )


def on_device(indexes, device):
    """The same lists where the host does not look at them."""
    return {name: index._replace(device=device) for name, index in indexes.items()}


@st.composite
def placed(draw, transfers, device):
    """A transfer, the lists of neither, either or both sides on the device."""
    transfer = draw(transfers)
    sides = {side: getattr(transfer, side) for side in ("src_index", "dst_index") if draw(st.booleans())}
    return replace(transfer, **{side: on_device(indexes, device) for side, indexes in sides.items()})


@st.composite
def wide_storages(draw, of, access):
    """Layouts whose every address is a multiple of `access`; HND keeps an item's rows of a shard together."""
    pads = draw(st.dictionaries(st.sampled_from(["item", "shard", "role"]), st.sampled_from([access, 64]), max_size=1))
    rows, order = draw(st.sampled_from([1, 3, 4, 8])), draw(st.sampled_from([NHD, HND, HND]))
    base = draw(st.sampled_from([0, 3 * access]))
    return Stored(of, draw(st.integers(2, 8)), rows, draw(st.sampled_from([0, 0, 2])), order, pads, base)


@st.composite
def wide_logicals(draw, name, access):
    """Runs for bulk copies."""
    widths = [access, 3 * access, 512, 1024 + access]
    shape = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 1, 3])), 1
    return Logical(name, *shape, draw(st.sampled_from(widths)))


def wide_transfers(access=16):
    """Transfers in accesses of so many bytes: staging is aligned too."""
    drawn = transfers(lambda name: wide_logicals(name, access), lambda of: wide_storages(of, access))
    return drawn.map(lambda transfer: replace(transfer, skew=0))

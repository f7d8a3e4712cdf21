"""Small pools of every shape, and what moving tokens between two of them must do, byte by byte.

A pool is described by the order in which its dimensions nest in memory, from the outermost to the innermost, and by the
padding after each; every engine's layout is one of these. `check` holds any backend to the reference on a generated
`Transfer`: a suite brings a `Rig`, which says where memory lies and how plans are made.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import strategies as st

from pdstage import native
from pdstage.errors import UsageError
from pdstage.kernels import Pool
from pdstage.layout import Key, Layout, Region, Row, View
from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR, Select
from pdstage.tables import Index
from pdstage.topology import Axis

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
                        axis=Axis("head", one.total or of.shards, one.first, of.shards),
                        format="bytes",
                    )
                )
    slots = [one.of.name for one in stored if not one.of.positional]
    return Held(memory, Layout.of(regions, views, slots=slots))


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


WIDTHS = [1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64, 100, 144]


@st.composite
def logicals(draw, name="kv"):
    """Anything affine, and each kind that engines keep: split or fused K and V, MLA latents, conv and SSM states."""
    kind = draw(st.sampled_from(["any", "any", "any", "attention", "latent", "state"]))
    layers, width = draw(st.integers(1, 2)), draw(st.sampled_from(WIDTHS))
    shards, segs = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3]))
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
    """Tokens of one pool on their way to another that stores them differently."""

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


@st.composite
def transfers(draw):
    """One or two components, each rank holding its own shards of them, and some shards that both have."""
    sides, select, index, tokens = ([], []), ([], []), ({}, {}), {}
    for name in ("kv", "swa")[: draw(st.sampled_from([1, 1, 2]))]:
        whole = draw(logicals(name))
        shared = draw(st.integers(0, whole.shards - 1))
        stop = draw(st.integers(shared + 1, whole.shards))
        keys = [key for key in whole.view_keys() if draw(st.integers(0, 3))] or whole.view_keys()[:1]
        held = []
        for side in (0, 1):
            low, high = (draw(st.integers(0, shared)), draw(st.integers(stop, whole.shards)))
            stored = draw(storages(replace(whole, shards=high - low)))
            held.append(replace(stored, first=low, total=whole.shards))
            select[side].extend(Select(key, shared - low, stop - shared) for key in keys)
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
    )


@dataclass
class Block:
    """Bytes where a rig's kernels can reach them; `owner` keeps them there."""

    ptr: int
    owner: object


class Rig:
    """Where a backend's memory lies and how its plans are made: host memory here. Suites of devices derive theirs."""

    skews = True  # staging may begin anywhere, not at multiples of 16 alone

    def __init__(self, backend="host", code="c++"):
        self.backend, self.code = backend, code

    def put(self, array):
        """A copy of `array`'s bytes."""
        copy = array.copy()
        return Block(copy.ctypes.data, copy)

    def get(self, block):
        """The bytes as they are once everything asked for has run."""
        return block.owner

    def plan(self, layout, select, wire, checksum):
        with host_code(self.code):
            return Pool.of(layout).plan(select, wire, self.backend, checksum=checksum)

    def place(self, held):
        """A pool's memory where this rig's kernels reach it, and the layout over it."""
        blocks = [self.put(memory) for memory in held.memory]
        regions = [
            replace(region, base=block.ptr + GUARD) for region, block in zip(held.layout.regions, blocks, strict=True)
        ]
        components = held.layout.components
        return blocks, Layout(tuple(regions), components)


REFERENCE = Rig("reference")
SUM_BEFORE = 41


def outcome(rig, t):
    """Everything the transfer leaves behind, by name: staging, both pools after each way, and the checksums."""
    found = {}
    skew = t.skew if rig.skews else t.skew // 16 * 16
    src_blocks, src_layout = rig.place(t.src)
    gather = rig.plan(src_layout, t.src_select, t.wire, t.checksum)
    n = gather.nbytes(t.tokens)

    def run(name, work):
        total = rig.put(np.array([SUM_BEFORE], np.uint64).view(np.uint8))
        work(total.ptr if t.checksum else 0)
        found[f"{name}: checksum"] = rig.get(total)

    staging = rig.put(np.full(n + 512, 0xA5, np.uint8))
    start = -staging.ptr % 128 + skew
    run("gather", lambda at: gather.gather(staging.ptr + start, n, t.src_index, t.tokens, sum_ptr=at))
    whole = rig.get(staging)
    found["gather: staged"] = whole[start : start + n]
    found["gather: bytes around it"] = np.unique(np.r_[whole[:start], whole[start + n :]])
    for way in ("scatter", "copy"):
        blocks, layout = rig.place(t.dst)
        plan = rig.plan(layout, t.dst_select, t.wire, t.checksum)
        assert plan.nbytes(t.tokens) == n
        if way == "scatter":
            run(way, lambda at, plan=plan: plan.scatter(staging.ptr + start, n, t.dst_index, t.tokens, sum_ptr=at))
        else:
            run(way, lambda at, plan=plan: gather.copy_to(plan, t.src_index, t.dst_index, t.tokens, sum_ptr=at))
        for number, block in enumerate(blocks):
            found[f"{way}: region {number}"] = rig.get(block)
    for number, block in enumerate(src_blocks):
        found[f"source region {number}"] = rig.get(block)
    return found


def check(rig, t):
    """Holds a backend to the reference, and both to the layout's formula, on one transfer; every byte and checksum."""
    found, expected = outcome(rig, t), outcome(REFERENCE, t)
    after = moved(t.src, t.src_select, t.src_index, t.dst, t.dst_select, t.dst_index, t.tokens)
    for number, memory in enumerate(after):
        expected[f"copy: region {number}"] = memory
        if t.wire == TOKEN_MAJOR:
            expected[f"scatter: region {number}"] = memory
    for number, memory in enumerate(t.src.memory):
        expected[f"source region {number}"] = memory
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        np.testing.assert_array_equal(found[name], want, err_msg=name)


# What a caller did wrong with a gather or a scatter, and the words that must name it; `repeated` ones are a scatter's.
MISUSE = {
    "negative item": ({"items": [1, -2, 3]}, "item -2 at position 1 of component 'kv'"),
    "item past the pool": ({"items": [1, 2, 6]}, "item 6 at position 2 of component 'kv'"),
    "too few items": ({"items": [1, 2]}, "has 2 items where its tokens need 3"),
    "no items": ({"items": []}, "has 0 items"),
    "range backwards": ({"tokens": (8, 4)}, "tokens 8..4"),
    "range before the first token": ({"first": 4}, "tokens 0..12"),
    "a row split": ({"first": -3}, "first_token -3"),
    "staging too small": ({"short": 1}, "too small"),
    "no index": ({"name": "other"}, "component 'kv' have no index"),
    "repeated item": ({"items": [4, 2, 4]}, "item 4 at position 2 of component 'kv' is a destination twice"),
    "repeated item at once": ({"items": [4, 4, 2]}, "item 4 at position 1 of component 'kv'"),
    "a compressed row split": (
        {"first": 2, "tokens": (4, 8), "per": 4},
        "first_token 2 of component 'kv' splits a row of 4",
    ),
}


def check_refused(rig, way, case, words):
    """Holds a backend to its refusal: the culprit is named, and neither pool nor staging is written."""
    of = Logical(width=16, tokens_per_row=case.get("per", 1))
    blocks, layout = rig.place(hold([Stored(of, n_items=6, rows_per_item=4 // of.tokens_per_row)]))
    before = [rig.get(block).copy() for block in blocks]
    plan = rig.plan(layout, [Select(of.view_keys()[0], 0, 1)], TOKEN_MAJOR, False)
    index = Index.of(np.array(case.get("items", [1, 2, 3]), np.int32), case.get("first", 0))
    tokens = {"kv": case.get("tokens", (0, 12))}
    n = 256 if case.get("tokens") else plan.nbytes(tokens)
    staging = rig.put(np.full(n + 256, 0xA5, np.uint8))
    with pytest.raises(UsageError) as caught:
        ptr = staging.ptr + -staging.ptr % 128
        getattr(plan, way)(ptr, n - case.get("short", 0), {case.get("name", "kv"): index}, tokens)
    assert words in str(caught.value)
    assert (rig.get(staging) == 0xA5).all()
    for block, memory in zip(blocks, before, strict=True):
        np.testing.assert_array_equal(rig.get(block), memory)


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

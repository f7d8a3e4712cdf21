"""Ranks' memory by the description alone: what each logical cell is worth, where it lies, and what must be there after.

This is the oracle. It imports nothing of the library: no view, no plan, no shard range but its own.
"""

from __future__ import annotations

import itertools
import random
import zlib
from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tests.any_layout.describe import Case, Logical, Role, Side, Stored

GUARD = 64

# A cell's bytes are a window of random ones; steps that no two cells of a role share make all windows different.
_SHARD, _ROW, _LAYER = 257, 257 * 17, 257 * 17 * 200
_TABLE = np.frombuffer(random.Random(0).randbytes(12 << 20), np.uint8)


def values(of: Logical, role: Role, n_rows: int) -> np.ndarray:
    """`[layer, row, shard, seg, byte]`: what these must hold, layers by their place in `of.layers`."""
    start = zlib.crc32(f"{of.name}/{role.name}".encode()) % (1 << 20)
    shape = (len(of.layers), n_rows, role.total, role.segs, role.width)
    assert role.segs * role.width < _SHARD
    assert role.total <= 17
    return np.ndarray(shape, np.uint8, _TABLE, start, (_LAYER, _ROW, _SHARD, role.width, 1))


def shards_of(side: Side, role: Role, rank: int) -> tuple[int, int]:
    """First shard and number of shards that a rank holds; with more ranks than shards, one each."""
    if role.axis is None:
        return 0, role.total
    cuts = side.uneven.get((role.axis, role.total))
    if cuts is not None:
        return cuts[rank], cuts[rank + 1] - cuts[rank]
    first = rank * role.total // side.tp
    return first, max(1, (rank + 1) * role.total // side.tp - first)


class Place(NamedTuple):
    """A role's geometry in its component's memory; strides of `[layer, item, block, row, shard, seg, byte]`."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def placed(of: Logical, how: Stored, n_layers: int, n_items: int, counts: list[int]) -> tuple[list[Place], int]:
    """Each role's place, and the bytes of all. `counts` are the shards that this rank holds of each role."""
    at = how.nest.index("role")
    outer, inner = how.nest[:at], how.nest[at + 1 :]
    shapes, strides, extents = [], [], []
    for role, count in zip(of.roles, counts, strict=True):
        rows, block = how.page // role.tokens_per_row, (how.block or how.page) // role.tokens_per_row
        sizes = {
            "layer": n_layers, "item": n_items, "block": -(-rows // block), "row": block, "shard": count,
            "seg": role.segs,
        }  # fmt: skip
        steps, extent = {}, role.width
        for dim in reversed(inner):
            steps[dim] = extent
            extent = extent * sizes[dim] + how.pads.get(dim, 0)
        shapes.append(sizes)
        strides.append(steps)
        extents.append(extent + how.pads.get("role", 0))
    whole = sum(extents)
    for dim in reversed(outer):
        assert len({sizes[dim] for sizes in shapes}) == 1, f"roles of different sizes share dimension {dim}"
        for steps in strides:
            steps[dim] = whole
        whole = whole * shapes[0][dim] + how.pads.get(dim, 0)
    found, offset = [], how.skew
    for role, sizes, steps, extent in zip(of.roles, shapes, strides, extents, strict=True):
        dims = ("layer", "item", "block", "row", "shard", "seg")
        found.append(
            Place(offset, (*(sizes[d] for d in dims), role.width), (*(steps[d] for d in dims), 1))
        )  # fmt: skip
        offset += extent
    return found, how.skew + whole


@dataclass
class Part:
    """One component of one rank: where its memory begins in the side's arena, and the cells of each role."""

    of: Logical
    how: Stored
    low: int
    """Layers `of.layers[low:high]` are this stage's."""
    high: int
    owned: list[tuple[int, int]]
    """First shard and number of shards of each role."""
    places: list[Place]
    nbytes: int
    items: list[int]
    owner: tuple[int, int, int] = (1, 0, 0)
    """Of how many parts of the tokens this is which, and the tokens of a block."""
    start: int = 0
    cells: tuple[np.ndarray, ...] = ()


@dataclass
class Rank:
    tp_rank: int
    cp_rank: int
    stage: int
    parts: list[Part]


class Held:
    """All ranks of one side, in one arena of bytes, each component between guards."""

    def __init__(self, case: Case, side: Side, rng: random.Random) -> None:
        self.side = side
        self.ranks = []
        geometry: dict[tuple[object, ...], tuple[list[Place], int]] = {}
        at = GUARD
        for stage, cp_rank, tp_rank in itertools.product(range(side.pp), range(side.cp), range(side.tp)):
            rank = Rank(tp_rank, cp_rank, stage, [])
            for of in case.logical:
                one = _part(case, side, of, rank, rng, geometry)
                if one is not None:
                    one.start = at
                    at += one.nbytes + GUARD
                    rank.parts.append(one)
            self.ranks.append(rank)
        fill = rng.randrange(len(_TABLE) - at)
        self.memory = _TABLE[fill : fill + at].copy()
        for rank in self.ranks:
            for one in rank.parts:
                one.cells = tuple(cells_in(self.memory, one))


def cells_in(memory: np.ndarray, one: Part) -> list[np.ndarray]:
    return [np.ndarray(p.shape, np.uint8, memory, one.start + p.offset, p.strides) for p in one.places]


def _part(case: Case, side: Side, of: Logical, rank: Rank, rng: random.Random, geometry: dict) -> Part | None:
    low, high = (bisect_left(of.layers, side.stages[rank.stage + i]) for i in (0, 1))
    if low == high:
        return None
    how = side.stored[of.name]
    stop = case.asked[of.name][1]
    owner = (side.cp, rank.cp_rank, side.parted[of.name]) if of.name in side.parted else (1, 0, 0)
    _, places_held = held_rows(owner, how.first_token, stop, 1)
    reach = int(places_held[-1]) + 1 if len(places_held) else how.first_token
    needed = -(-(reach - how.first_token) // how.page)
    most = -(-(stop - how.first_token) // how.page)
    n_items = max(1, most + how.spare_items)
    owned = [shards_of(side, role, rank.tp_rank) for role in of.roles]
    counts = [count for _, count in owned]
    key = (of.name, high - low, *counts)
    if key not in geometry:
        geometry[key] = placed(of, how, high - low, n_items, counts)
    places, nbytes = geometry[key]
    return Part(of, how, low, high, owned, places, nbytes, rng.sample(range(n_items), needed), owner)


def held_rows(owner: tuple[int, int, int], start: int, stop: int, per: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of `per` tokens that `[start, stop)` of a sequence touches and one owner holds, and the places of their
    first tokens among the tokens that it stores.
    """
    size, number, block = owner
    rows = np.arange(start // per, -(-stop // per)) if start < stop else np.arange(0)
    tokens = rows * per
    if size == 1:
        return rows, tokens
    mine = tokens // block % size == number
    tokens = tokens[mine]
    return rows[mine], tokens // (block * size) * block + tokens % block


def write(one: Part, cells: tuple[np.ndarray, ...] | list[np.ndarray], start: int, stop: int) -> int:
    """Puts what belongs there into the rows that tokens `[start, stop)` touch; returns how many bytes."""
    n = 0
    for role, (first, count), into in zip(one.of.roles, one.owned, cells, strict=True):
        per, block = role.tokens_per_row, one.how.block or one.how.page
        rows, place = held_rows(one.owner, start, stop, per)
        if not len(rows):
            continue
        page, within = np.divmod(place - one.how.first_token, one.how.page)
        item = np.array(one.items)[page]
        truth = values(one.of, role, int(rows[-1]) + 1)[one.low : one.high, rows, first : first + count]
        into[:, item, within // block, within % block // per] = truth
        n += truth.size
    return n


def chunk_nbytes(one: Part, chunk, asked: tuple[int, int]) -> int:
    """Payload bytes that this destination must get of the spans of one chunk."""
    n = 0
    for span in chunk:
        if span.component != one.of.name:
            continue
        start, stop = max(span.start, asked[0]), min(span.stop, asked[1])
        layers = sum(span.layer_start <= layer < span.layer_stop for layer in one.of.layers[one.low : one.high])
        if start < stop:
            for role, (_, count) in zip(one.of.roles, one.owned, strict=True):
                rows, _ = held_rows(one.owner, start, stop, role.tokens_per_row)
                n += layers * len(rows) * count * role.segs * role.width
    return n

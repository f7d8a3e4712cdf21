"""The contiguous runs of bytes that the direct path writes from pool to pool.

In numpy, or in the C++ of csrc/host/spans.hpp if it was built; both give the same results.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdstage import native
from pdstage.errors import UsageError
from pdstage.layout import Layout, mismatch
from pdstage.plan.tables import ComponentArgs, Index, Indexes, Int64s, Row, Table, row_addresses

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from pdstage.plan.staging import Select, Tokens

__all__ = ["DirectPlan", "Index", "Spans", "split"]


class Spans(NamedTuple):
    """Descriptors: `nbytes[i]` bytes go from address `src[i]` to address `dst[i]`. Three int64 arrays of one length."""

    src: Int64s
    dst: Int64s
    nbytes: Int64s


def split(spans: Spans, max_descriptors: int) -> Iterator[Spans]:
    """`spans` in order, in batches of at most that many descriptors.

    For transports that cap a post: Mooncake rejects batches above about 2,000 descriptors after half the bytes landed.
    """
    for at in range(0, spans.nbytes.size, max_descriptors):
        yield Spans(*(side[at : at + max_descriptors] for side in spans))


@dataclass(frozen=True, slots=True)
class _Pair:
    """A source view and the destination view that takes its bytes; `allocation` numbers their pair of regions."""

    src: Row
    dst: Row
    allocation: int

    @property
    def cell(self) -> int:
        """Bytes of one shard of one row if they are one run on both sides; else 0."""
        return self.src.width if self.src.segs == 1 else 0

    @property
    def rows_join(self) -> bool:
        """Whether a row's bytes continue in the next row of the same item, on both sides, shard by shard."""
        return self.cell > 0 and self.src.inner_stride == self.dst.inner_stride == self.cell

    @property
    def shards_first(self) -> bool:
        """Whether the order shard by shard gives longer spans than row by row."""
        return self.rows_join and self.src.shards > 1


class DirectPlan:
    """The direct path between selected views of a source and a destination layout, for many chunks.

    `src_select` and `dst_select` name the same keys with equally many shards; shard i of one goes to shard i of the
    other. Page sizes, strides and first tokens may differ. Raises `UsageError` for selections that do not match, and,
    with the reason, if bytes of one side cannot become bytes of the other.
    """

    def __init__(
        self, src_layout: Layout, src_select: Iterable[Select], dst_layout: Layout, dst_select: Iterable[Select]
    ) -> None:
        src_chosen, dst_chosen = sorted(src_select), sorted(dst_select)
        self.src = Table.of(src_layout, src_chosen)
        self.dst = Table.of(dst_layout, dst_chosen)
        src_views, dst_views = src_layout.by_key(), dst_layout.by_key()
        if [(s.key, s.count) for s in src_chosen] != [(s.key, s.count) for s in dst_chosen]:
            raise UsageError(
                "the two selections name different views or shard counts", remedy="select the same shards on both sides"
            )
        numbers: dict[tuple[int, int], int] = {}
        pairs = []
        for chosen, src, dst in zip(src_chosen, self.src.rows, self.dst.rows, strict=True):
            views = src_views[chosen.key], dst_views[chosen.key]
            if problem := mismatch(*views):
                raise UsageError(problem, remedy="the two sides must store this view alike", key=chosen.key)
            number = numbers.setdefault((views[0].region, views[1].region), len(numbers))
            pairs.append(_collapsed(_Pair(src, dst, number)))
        self._pairs = tuple(_fused(pairs))
        self._shapes = Counter(_shape(pair, self.src.names[pair.src.component]) for pair in self._pairs)
        self._native = self._compile()

    def _compile(self) -> Any:  # noqa: ANN401  (an extension class)
        if native.ext is None:
            return None
        how = np.array([(p.shards_first, p.allocation) for p in self._pairs], np.int64).reshape(-1, 2)
        sides = [
            Table(table.names, table.sizes, tuple(getattr(p, side) for p in self._pairs)).arrays()
            for table, side in ((self.src, "src"), (self.dst, "dst"))
        ]
        return native.ext.DirectPlan(sides[0][0], sides[1][0], how, sides[0][1], sides[1][1])

    def spans(self, tokens: Tokens, src_indexes: Indexes, dst_indexes: Indexes) -> Spans:
        """Descriptors for `tokens`, with absolute addresses, joined where both sides are contiguous.

        No descriptor crosses a region's end. Raises `UsageError` for an index that does not cover `tokens`, or names an
        item outside its pool, or repeats a destination.
        """
        src = self.src.parts(src_indexes, tokens)
        dst = self.dst.parts(dst_indexes, tokens)
        if self._native is None:
            return self._spans(src, dst)
        (fault, component, position, value), *arrays = self._native.spans(src, dst)
        if fault:
            n = len(self.src.names)
            table = self.src if component < n else self.dst
            table.refuse(fault, component % n, position, value)
        return Spans(*arrays)

    def _spans(self, src: Sequence[ComponentArgs], dst: Sequence[ComponentArgs]) -> Spans:
        """The numpy counterpart of DirectPlan::spans in csrc/host/spans.hpp."""
        src_items, dst_items = self.src.resolve(src, unique=False), self.dst.resolve(dst, unique=True)
        found, allocations = [Spans(*(np.empty(0, np.int64) for _ in range(3)))], [np.empty(0, np.int64)]
        for pair in self._pairs:
            n = pair.src.component
            if src[n].start == src[n].stop:
                continue
            rows = row_addresses(pair.src, src[n], src_items[n]), row_addresses(pair.dst, dst[n], dst_items[n])
            cells = _cells(pair, *rows)
            allocation = np.full(cells.nbytes.size, pair.allocation, np.int64)
            found.append(_joined(cells, allocation))
            allocations.append(allocation[: found[-1].nbytes.size])
        return _joined(Spans(*map(np.concatenate, zip(*found, strict=True))), np.concatenate(allocations))

    def n_descriptors(self, tokens: Tokens) -> int:
        """How many descriptors `spans` gives if no items are adjacent; an upper bound otherwise.

        For the cost model, before the destination's items are known: it reads no index, and assumes that first tokens
        are multiples of the page size.
        """
        total = 0
        for shape, n in self._shapes.items():
            start, stop = tokens.get(shape.component, (0, 0))
            if start < stop:
                total += n * shape.descriptors(start // shape.tokens_per_row, -(-stop // shape.tokens_per_row))
        return total


class _Shape(NamedTuple):
    """What determines the number of a pair's descriptors.

    `runs` are the runs of each row, or of each piece that `cuts` leaves (a multiple of rows per side). A piece of
    `page` rows, if not 0, is one descriptor.
    """

    component: str
    tokens_per_row: int
    runs: int
    cuts: tuple[int, int] | None
    page: int

    def descriptors(self, first: int, last: int) -> int:
        """Descriptors of rows `[first, last)`."""
        if self.cuts is None:
            return self.runs * (last - first)
        whole = max(0, last // self.page - -(-first // self.page)) if self.page else 0
        return whole + self.runs * (_pieces(first, last, *self.cuts) - whole)


def _shape(pair: _Pair, component: str) -> _Shape:
    src, dst = pair.src, pair.dst
    cuts = (src.outer_rows, dst.outer_rows) if pair.rows_join else None
    # Where heads are outermost in pages of one size, a page's shards follow each other on both sides.
    follow = pair.rows_join and src.shard_stride == dst.shard_stride == src.outer_rows * pair.cell
    page = src.outer_rows if follow and src.outer_rows == dst.outer_rows else 0
    return _Shape(component, src.tokens_per_row, src.shards * src.segs, cuts, page)


def _pieces(first: int, last: int, every: int, other: int) -> int:
    """Pieces of `[first, last)` cut at each multiple of `every` and of `other`."""

    def inside(step: int) -> int:
        return (last - 1) // step - first // step

    return 1 + inside(every) + inside(other) - inside(math.lcm(every, other))


def _collapsed(pair: _Pair) -> _Pair:
    """Merges segments, then shards, that are contiguous on both sides into width."""
    src, dst = pair.src, pair.dst
    if src.segs > 1 and src.seg_stride == dst.seg_stride == src.width:
        src, dst = (row._replace(width=row.width * row.segs, segs=1) for row in (src, dst))
    if src.segs == 1 and src.shards > 1 and src.shard_stride == dst.shard_stride == src.width:
        src, dst = (row._replace(width=row.width * row.shards, shards=1) for row in (src, dst))
    return _Pair(src, dst, pair.allocation)


def _fused(pairs: Iterable[_Pair]) -> list[_Pair]:
    """Merges pairs that are adjacent on both sides, such as K and V of one fused row."""
    fused: list[_Pair] = []
    ending: dict[tuple[object, ...], int] = {}
    for pair in pairs:
        src, dst = pair.src, pair.dst
        shape = (pair.allocation, *(row._replace(base=0, width=0, first_shard=0, seed=0) for row in (src, dst)))
        at = ending.pop((src.base, dst.base, shape), len(fused)) if src.segs == 1 else len(fused)
        if at < len(fused):
            before = fused[at]
            width = before.src.width + src.width
            src, dst = before.src._replace(width=width), before.dst._replace(width=width)
        fused[at : at + 1] = [_Pair(src, dst, pair.allocation)]
        ending[src.base + src.width, dst.base + dst.width, shape] = at
    return [_collapsed(pair) for pair in fused]


def _cells(pair: _Pair, src_rows: Int64s, dst_rows: Int64s) -> Spans:
    """One span per run of `width` bytes, in the order of writing."""
    shape = (src_rows.size, pair.src.shards, pair.src.segs)
    shard, seg = np.arange(shape[1])[:, None], np.arange(shape[2])
    sides = [
        at[:, None, None] + shard * row.shard_stride + seg * row.seg_stride
        for row, at in ((pair.src, src_rows), (pair.dst, dst_rows))
    ]
    if pair.shards_first:
        order = _shards_first(pair, src_rows, dst_rows)
        sides = [side.reshape(-1)[order] for side in sides]
    src, dst = (np.ascontiguousarray(side).reshape(-1) for side in sides)
    return Spans(src, dst, np.full(src.size, pair.src.width, np.int64))


def _shards_first(pair: _Pair, src_rows: Int64s, dst_rows: Int64s) -> NDArray[np.intp]:
    """The order of `[row][shard]` cells that goes shard by shard through each run of rows contiguous on both sides."""
    goes_on = (np.diff(src_rows) == pair.src.inner_stride) & (np.diff(dst_rows) == pair.dst.inner_stride)
    run = np.cumsum(np.r_[False, ~goes_on][: src_rows.size])
    shards = pair.src.shards
    key = np.repeat(run * shards, shards) + np.tile(np.arange(shards), src_rows.size)
    return np.argsort(key, kind="stable")


def _joined(cells: Spans, allocation: Int64s) -> Spans:
    """Joins each span to the one before it if both sides continue without a gap, within one allocation."""
    if not cells.nbytes.size:
        return cells
    gap = cells.src[1:] != cells.src[:-1] + cells.nbytes[:-1]
    gap |= cells.dst[1:] != cells.dst[:-1] + cells.nbytes[:-1]
    gap |= allocation[1:] != allocation[:-1]
    starts = np.flatnonzero(np.r_[True, gap])
    return Spans(cells.src[starts], cells.dst[starts], np.add.reduceat(cells.nbytes, starts))

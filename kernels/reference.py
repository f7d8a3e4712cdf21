"""The definition of correct: gather and scatter as plain indexing that a reader can check by eye.

Every other backend must give the same bytes. Slow; it also copies host memory where the C++ extension was not built. It
shares no addressing code with the backends that are tested against it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..plan import TOKEN_MAJOR, Staging
from ..plan.tables import FAULT_TOO_SMALL, Table, integers, memory
from .checksum import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from ..layout import Layout, View
    from ..plan import Select, Tokens
    from ..plan.tables import Index, Int64s, Row
    from .backend import Compiled, Launch, Recipe

    Bytes = NDArray[np.uint8]


def missing() -> str:
    """Host memory can always be copied."""
    return ""


def compile_plan(recipe: Recipe) -> ReferencePlan:
    """Prepares nothing: every call starts from the layout."""
    return ReferencePlan(recipe.layout, recipe.select, recipe.order)


def runtime_of(device: str) -> None:
    """Host copies are done when the call returns."""


class Moving(NamedTuple):
    """One view's part of a call: its region's bytes, and the offset there of each byte to move.

    `staged` is in staged order and `canonical` is `[row, shard, segment, byte]`. `at` is the view's offset in staging,
    `place` its index in the selection, and `tokens` the first token of each row.
    """

    row: Row
    region: Bytes
    at: int
    place: int
    staged: Int64s
    canonical: Int64s
    tokens: list[int]

    def cells(self) -> Bytes:
        """The pool's present content."""
        return self.region[self.canonical]


class ReferencePlan:
    """The formula of `pdstage.layout`, one byte address for every byte moved."""

    def __init__(self, layout: Layout, select: tuple[Select, ...], order: str, staging: Staging | None = None) -> None:
        """`staging` is the selection's, if it differs from that of `layout`."""
        self._staging = staging or Staging(layout, select)
        self._layout = layout
        self._select = select
        self._order = order
        self._table = Table.of(layout, select)

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        moving = self._moving(indexes, tokens, unique=False)
        self._check_size(dst_nbytes, tokens)
        for view in moving:
            memory(dst_ptr + view.at, len(view.staged))[:] = view.region[view.staged]
        add(launch.sum_ptr, moving, Moving.cells)

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        moving = self._moving(indexes, tokens, unique=True)
        self._check_size(src_nbytes, tokens)
        for view in moving:
            view.region[view.staged] = memory(src_ptr + view.at, len(view.staged))
        add(launch.sum_ptr, moving, Moving.cells)

    def copy_to(
        self,
        peer: Compiled,
        indexes: Mapping[str, Index],
        peer_indexes: Mapping[str, Index],
        tokens: Tokens,
        launch: Launch,
    ) -> None:
        assert isinstance(peer, ReferencePlan)
        src = self._moving(indexes, tokens, unique=False)
        dst = peer._moving(peer_indexes, tokens, unique=True, side=" of the destination")
        for from_, to in zip(src, dst, strict=True):
            to.region[to.canonical] = from_.region[from_.canonical]

    def _check_size(self, nbytes: int, tokens: Tokens) -> None:
        needed = self._staging.nbytes(tokens)
        if needed > nbytes:
            self._table.refuse(FAULT_TOO_SMALL, 0, needed, nbytes)

    def _moving(self, indexes: Mapping[str, Index], tokens: Tokens, *, unique: bool, side: str = "") -> list[Moving]:
        table = replace(self._table, side=side)
        table.resolve(table.parts(indexes, tokens), unique=unique)
        offsets = self._staging.offsets(tokens)
        views, found = self._layout.by_key(), []
        for place, (chosen, row, at) in enumerate(zip(self._select, table.rows, offsets, strict=True)):
            view, (start, stop) = views[chosen.key], tokens.get(chosen.key.component, (0, 0))
            if start == stop:
                continue
            index, region = indexes[chosen.key.component], self._layout.regions[view.region]
            covered = view.tokens_per_row
            firsts = list(range(start // covered * covered, stop, covered))
            cells = _byte_offsets(view, chosen, index, firsts)
            pages = [(token - index.first_token) // view.tokens_per_item for token in firsts]
            staged = cells.reshape(-1) if self._order == TOKEN_MAJOR else _page_by_page(cells, pages)
            found.append(Moving(row, memory(region.base, region.nbytes), at, place, staged, cells, firsts))
        return found


def _byte_offsets(view: View, chosen: Select, index: Index, firsts: list[int]) -> Int64s:
    """Each byte's offset from the region's start, `[row, shard, segment, byte]`, for rows with these first tokens."""
    items, rows = integers(index), []
    for token in firsts:
        page, t = divmod(token - index.first_token, view.tokens_per_item)
        rows.append(view.offset + int(items[page]) * view.item_stride + view.row_offset(t))
    shard = np.arange(chosen.start, chosen.start + chosen.count).reshape(-1, 1, 1)
    seg, byte = np.arange(view.segs).reshape(-1, 1), np.arange(view.width)
    row = np.array(rows, np.int64).reshape(-1, 1, 1, 1)
    offsets: Int64s = row + shard * view.shard_stride + seg * view.seg_stride + byte
    return offsets


def _page_by_page(cells: Int64s, pages: list[int]) -> Int64s:
    """Cells in head-major order: page by page, and in each page shard by shard."""
    of = np.array(pages)
    return np.concatenate([cells[of == page].swapaxes(0, 1).reshape(-1) for page in range(pages[0], pages[-1] + 1)])


def add(sum_ptr: int, moved: list[Moving], cells: Callable[[Moving], Bytes]) -> None:
    """Adds the checksum of the moved `cells`, if one was requested."""
    if sum_ptr:
        total = memory(sum_ptr, 8).view(np.uint64)
        sums = (checksum(v.row.seed, np.array(v.tokens), v.row.first_shard, cells(v)) for v in moved)
        total += np.uint64(sum(sums) % 2**64)

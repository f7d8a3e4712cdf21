"""Host half of csrc/host/copy.hpp: pools in host memory, with numpy where the extension was not built.

Layer 3. Must not know tensors, rooms or transports. Both halves give the same bytes and the same errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import native
from ..plan import HEAD_MAJOR, VIEW_ALIGNMENT
from ..tables import FAULT_TOO_SMALL, Row, Table, memory, row_addresses, rows_touched

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..plan import Tokens
    from ..tables import Index, Int64s, Part
    from .pool import Launch, Recipe


def missing() -> str:
    """Host memory can always be copied."""
    return ""


def compile_plan(recipe: Recipe) -> NativePlan | NumpyPlan:
    """The selection's tables, built once: in C++ where it is there, else for numpy."""
    table = Table.of(recipe.layout, recipe.select)
    return NumpyPlan(table, recipe.wire) if native.ext is None else NativePlan(table, recipe.wire)


class NativePlan:
    """A plan held by the extension: a call takes one tuple for each component across the border and drops the GIL."""

    def __init__(self, table: Table, wire: str) -> None:
        assert native.ext is not None
        rows, sizes = table.arrays()
        self._table = table
        self._plan = native.ext.CopyPlan(rows, sizes, wire == HEAD_MAJOR)

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        fault, *where = self._plan.gather(dst_ptr, dst_nbytes, self._table.parts(indexes, tokens))
        if fault:
            self._table.refuse(fault, *where)

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        fault, *where = self._plan.scatter(src_ptr, src_nbytes, self._table.parts(indexes, tokens))
        if fault:
            self._table.refuse(fault, *where)


class NumpyPlan:
    """The same with fancy indexing, a view at a time. Slower, with the same checks and the same bytes."""

    def __init__(self, table: Table, wire: str) -> None:
        self._table = table
        self._head_major = wire == HEAD_MAJOR

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        for at, cells, width in self._cells(dst_nbytes, indexes, tokens, unique=False):
            pool, offsets = _windows(cells, width)
            memory(dst_ptr + at, cells.size * width).reshape(-1, width)[:] = pool[offsets]

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        for at, cells, width in self._cells(src_nbytes, indexes, tokens, unique=True):
            pool, offsets = _windows(cells, width)
            pool[offsets] = memory(src_ptr + at, cells.size * width).reshape(-1, width)

    def _cells(
        self, nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, *, unique: bool
    ) -> list[tuple[int, Int64s, int]]:
        """Of each view with tokens: where its staged bytes begin, its cells' addresses in staged order, their size."""
        parts = self._table.parts(indexes, tokens)
        items = self._table.resolve(parts, unique=unique)
        found, at = [], 0
        for row in self._table.rows:
            part = parts[row.component]
            cells = self._in_order(row, part, row_addresses(row, part, items[row.component]))
            if cells.size:
                found.append((at, cells, row.width))
            at += -(-cells.size * row.width // VIEW_ALIGNMENT) * VIEW_ALIGNMENT
        if at > nbytes:
            self._table.refuse(FAULT_TOO_SMALL, 0, at, nbytes)
        return found

    def _in_order(self, row: Row, part: Part, rows: Int64s) -> Int64s:
        """Cells of rows at these addresses, `[row][shard][seg]` or `[item][shard][row][seg]`."""
        shard, seg = np.arange(row.shards), np.arange(row.segs)
        cells = rows[:, None, None] + shard[:, None] * row.shard_stride + seg * row.seg_stride
        if not self._head_major:
            return cells.reshape(-1)
        start, stop = rows_touched(row, part)
        item = np.arange(start, stop) // row.rows_per_item
        order = np.argsort((item[:, None] * row.shards + shard).reshape(-1), kind="stable")
        return cells.reshape(-1, row.segs)[order].reshape(-1)


def _windows(cells: Int64s, width: int) -> tuple[NDArray[np.uint8], Int64s]:
    """Memory around `cells` as overlapping rows of `width` bytes, and which of these rows the cells are."""
    low = int(cells.min())
    flat = memory(low, int(cells.max()) - low + width)
    windows = np.lib.stride_tricks.as_strided(flat, (flat.size - width + 1, width), (1, 1), writeable=True)
    return windows, cells - low

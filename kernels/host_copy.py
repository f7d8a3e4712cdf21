"""Host half of csrc/host/copy.hpp: copies pools in host memory, with numpy if the extension was not built.

Both give the same bytes and the same errors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import native
from ..plan import HEAD_MAJOR, VIEW_ALIGNMENT
from ..plan.tables import FAULT_TOO_SMALL, ComponentArgs, Row, Table, memory, row_addresses, rows_touched
from .checksum import checksum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from ..plan import Tokens
    from ..plan.tables import Index, Int64s
    from .backend import Compiled, Launch, Recipe


DESTINATION = " of the destination"  # follows the component's name in errors about a peer's side


def missing() -> str:
    """Host memory can always be copied."""
    return ""


def compile_plan(recipe: Recipe) -> NativePlan | NumpyPlan:
    """The selection's tables, built once: in C++ if the extension is there, else for numpy."""
    table = Table.of(recipe.layout, recipe.select)
    if native.ext is None:
        return NumpyPlan(table, recipe.order)
    how = recipe.order == HEAD_MAJOR, recipe.threads, recipe.checksum
    return NativePlan(table, native.ext.CopyPlan(*table.arrays(), *how))


def runtime_of(device: str) -> None:
    """Host copies are done when the call returns."""


class Moving(NamedTuple):
    """One view's part of a call: the addresses of its cells, `[row, shard, segment]`."""

    row: Row
    part: ComponentArgs
    cells: Int64s


class NativePlan:
    """A plan held by the extension. A call passes one tuple per component and releases the GIL."""

    fans_out = False

    def __init__(self, table: Table, plan: Any) -> None:  # noqa: ANN401  (the extension's, which has no types)
        self._table = table
        self._as_peer = replace(table, side=DESTINATION)
        self._plan = plan

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        parts = self._table.parts(indexes, tokens)
        fault, *where = self._plan.gather(dst_ptr, dst_nbytes, parts, launch.sum_ptr)
        if fault:
            self._table.refuse(fault, *where)

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        parts = self._table.parts(indexes, tokens)
        fault, *where = self._plan.scatter(src_ptr, src_nbytes, parts, launch.sum_ptr)
        if fault:
            self._table.refuse(fault, *where)

    def copy_to(
        self,
        peer: Compiled,
        indexes: Mapping[str, Index],
        peer_indexes: Mapping[str, Index],
        tokens: Tokens,
        launch: Launch,
    ) -> None:
        assert isinstance(peer, NativePlan)
        parts, peer_parts = self._table.parts(indexes, tokens), peer._as_peer.parts(peer_indexes, tokens)
        fault, component, *where = self._plan.copy_to(peer._plan, parts, peer_parts, launch.sum_ptr)
        if fault:
            n = len(self._table.names)
            (self._table if component < n else peer._as_peer).refuse(fault, component % n, *where)


class NumpyPlan:
    """The same with fancy indexing, one view at a time: slower, with the same checks and the same bytes."""

    fans_out = False

    def __init__(self, table: Table, order: str) -> None:
        self._table = table
        self._as_peer = replace(table, side=DESTINATION)
        self._head_major = order == HEAD_MAJOR

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        moving = _moving(self._table, indexes, tokens, unique=False)
        for at, (row, part, cells) in self._staged(dst_nbytes, moving):
            pool, offsets = _windows(self._in_order(row, part, cells), row.width)
            memory(dst_ptr + at, cells.size * row.width).reshape(-1, row.width)[:] = pool[offsets]
        _add(launch.sum_ptr, moving)

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        moving = _moving(self._table, indexes, tokens, unique=True)
        for at, (row, part, cells) in self._staged(src_nbytes, moving):
            pool, offsets = _windows(self._in_order(row, part, cells), row.width)
            pool[offsets] = memory(src_ptr + at, cells.size * row.width).reshape(-1, row.width)
        _add(launch.sum_ptr, moving)

    def copy_to(
        self,
        peer: Compiled,
        indexes: Mapping[str, Index],
        peer_indexes: Mapping[str, Index],
        tokens: Tokens,
        launch: Launch,
    ) -> None:
        assert isinstance(peer, NumpyPlan)
        src = _moving(self._table, indexes, tokens, unique=False)
        dst = _moving(peer._as_peer, peer_indexes, tokens, unique=True)
        for from_, to in zip(src, dst, strict=True):
            read, src_offsets = _windows(from_.cells.reshape(-1), from_.row.width)
            written, dst_offsets = _windows(to.cells.reshape(-1), to.row.width)
            written[dst_offsets] = read[src_offsets]
        _add(launch.sum_ptr, dst)

    def _staged(self, nbytes: int, moving: list[Moving]) -> list[tuple[int, Moving]]:
        """Each view with the start of its staged bytes."""
        found, at = [], 0
        for view in moving:
            found.append((at, view))
            at += -(-view.cells.size * view.row.width // VIEW_ALIGNMENT) * VIEW_ALIGNMENT
        if at > nbytes:
            self._table.refuse(FAULT_TOO_SMALL, 0, at, nbytes)
        return found

    def _in_order(self, row: Row, part: ComponentArgs, cells: Int64s) -> Int64s:
        """Cells `[row, shard, seg]` in staged order: `[row][shard][seg]` or `[item][shard][row][seg]`."""
        if not self._head_major:
            return cells.reshape(-1)
        start, stop = rows_touched(row, part)
        item = np.arange(start, stop) // row.rows_per_item
        order = np.argsort((item[:, None] * row.shards + np.arange(row.shards)).reshape(-1), kind="stable")
        return cells.reshape(-1, row.segs)[order].reshape(-1)


def _moving(table: Table, indexes: Mapping[str, Index], tokens: Tokens, *, unique: bool) -> list[Moving]:
    """The part of a call for each view that has tokens."""
    parts = table.parts(indexes, tokens)
    items = table.resolve(parts, unique=unique)
    found = []
    for row in table.rows:
        rows = row_addresses(row, parts[row.component], items[row.component])
        shard, seg = np.arange(row.shards), np.arange(row.segs)
        cells = rows[:, None, None] + shard[:, None] * row.shard_stride + seg * row.seg_stride
        if cells.size:
            found.append(Moving(row, parts[row.component], cells))
    return found


def _add(sum_ptr: int, moved: list[Moving]) -> None:
    """Adds the checksum of the cells' present content: the bytes read from them, or written to them."""
    if not sum_ptr:
        return
    total = 0
    for row, part, cells in moved:
        pool, offsets = _windows(cells, row.width)
        start, stop = rows_touched(row, part)
        firsts = np.arange(start, stop) * row.tokens_per_row + part.first_token
        total += checksum(row.seed, firsts, row.first_shard, pool[offsets])
    held = memory(sum_ptr, 8).view(np.uint64)
    held += np.uint64(total % 2**64)


def _windows(cells: Int64s, width: int) -> tuple[NDArray[np.uint8], Int64s]:
    """Memory around `cells` as overlapping rows of `width` bytes, and which of these rows are the cells."""
    low = int(cells.min())
    flat = memory(low, int(cells.max()) - low + width)
    windows = np.lib.stride_tricks.as_strided(flat, (flat.size - width + 1, width), (1, 1), writeable=True)
    return windows, cells - low

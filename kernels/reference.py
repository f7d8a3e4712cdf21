"""The definition of correct: gather and scatter as indexing that a reader believes at sight.

Layer 3. Every other backend must give bytes equal to these. Slow, and imports torch only when used. Must not know rooms
or transports, and shares no addressing code with the backends it judges.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
from typing import TYPE_CHECKING, Any

from ..plan import TOKEN_MAJOR, VIEW_ALIGNMENT, Staging
from ..tables import FAULT_TOO_SMALL, Table, integers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from ..layout import Layout, View
    from ..plan import Select, Tokens
    from ..tables import Index
    from .pool import Launch, Recipe


def missing() -> str:
    """Why the reference cannot be used here; empty if it can."""
    return "" if importlib.util.find_spec("torch") else "install pdstage[torch]"


def gather(
    buffers: Sequence[torch.Tensor],
    items: NDArray[Any],
    shards: slice,
    out: torch.Tensor,
    tokens: tuple[int, int] | None,
) -> None:
    """`pdstage.kernels.gather` for arguments that were checked."""
    at = 0
    for cells, item, row in _cells_of(buffers, items, shards, tokens):
        dense = cells[item, row].reshape(-1)
        out[at : at + dense.numel()] = dense
        at += _padded(dense.numel())


def scatter(
    src: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    items: NDArray[Any],
    shards: slice,
    tokens: tuple[int, int] | None,
) -> None:
    """`pdstage.kernels.scatter` for arguments that were checked."""
    at = 0
    for cells, item, row in _cells_of(buffers, items, shards, tokens):
        shape = (len(item), *cells.shape[2:])
        dense = src[at : at + math.prod(shape)]
        cells[item, row] = dense.reshape(shape)
        at += _padded(dense.numel())


def _cells_of(
    buffers: Sequence[torch.Tensor], items: NDArray[Any], shards: slice, tokens: tuple[int, int] | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Each buffer's chosen shards as bytes `[item, row, shard, byte]`, and item and row of each token."""
    import torch  # noqa: PLC0415

    for buffer in buffers:
        rows = buffer.shape[1]
        t = torch.arange(*(tokens or (0, len(items) * rows)))
        yield buffer.view(torch.uint8)[:, :, shards], torch.from_numpy(items)[t // rows].long(), t % rows


def _padded(nbytes: int) -> int:
    return -(-nbytes // VIEW_ALIGNMENT) * VIEW_ALIGNMENT


def compile_plan(recipe: Recipe) -> ReferencePlan:
    """Nothing is made ready: every call starts from the layout."""
    return ReferencePlan(recipe.layout, recipe.select, recipe.wire)


class ReferencePlan:
    """The formula of `pdstage.layout`, one byte address for every byte moved."""

    def __init__(self, layout: Layout, select: tuple[Select, ...], wire: str) -> None:
        self._layout = layout
        self._select = select
        self._wire = wire
        self._table = Table.of(layout, select)

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        for offset, region, cells in self._cells(dst_nbytes, indexes, tokens, unique=False):
            _bytes_at(dst_ptr + offset, len(cells))[:] = region[cells]

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        for offset, region, cells in self._cells(src_nbytes, indexes, tokens, unique=True):
            region[cells] = _bytes_at(src_ptr + offset, len(cells))

    def _cells(
        self, nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, *, unique: bool
    ) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Of each view with tokens: its offset in staging, its region, and each byte's offset there in staged order."""
        self._table.resolve(self._table.parts(indexes, tokens), unique=unique)
        staging = Staging(self._layout, self._select)
        needed = staging.nbytes(tokens)
        if needed > nbytes:
            self._table.refuse(FAULT_TOO_SMALL, 0, needed, nbytes)
        views, found = self._layout.by_key(), []
        for chosen, offset in zip(self._select, staging.offsets(tokens), strict=True):
            view, (start, stop) = views[chosen.key], tokens.get(chosen.key.component, (0, 0))
            if start < stop:
                region = self._layout.regions[view.region]
                index = indexes[chosen.key.component]
                cells = _byte_offsets(view, chosen, index, (start, stop), self._wire)
                found.append((offset, _bytes_at(region.base, region.nbytes), cells))
        return found


def _byte_offsets(view: View, chosen: Select, index: Index, tokens: tuple[int, int], wire: str) -> torch.Tensor:
    """Each byte's offset from the region's start, in staged order."""
    import torch  # noqa: PLC0415

    items = integers(index)
    start, stop = tokens
    covered = view.tokens_per_row
    pages, rows = [], []
    for token in range(start // covered * covered - index.first_token, stop - index.first_token, covered):
        page, t = divmod(token, view.tokens_per_item)
        pages.append(page)
        rows.append(view.offset + int(items[page]) * view.item_stride + view.row_offset(t))
    shard = torch.arange(chosen.start, chosen.start + chosen.count).reshape(-1, 1, 1)
    seg, byte = torch.arange(view.segs).reshape(-1, 1), torch.arange(view.width)
    cells = torch.tensor(rows).reshape(-1, 1, 1, 1) + shard * view.shard_stride + seg * view.seg_stride + byte
    if wire == TOKEN_MAJOR:
        return cells.reshape(-1)
    page_of = torch.tensor(pages)
    return torch.cat([cells[page_of == page].transpose(0, 1).reshape(-1) for page in range(pages[0], pages[-1] + 1)])


def _bytes_at(ptr: int, nbytes: int) -> torch.Tensor:
    """Host memory as bytes, without a copy."""
    import torch  # noqa: PLC0415

    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(ptr), dtype=torch.uint8)

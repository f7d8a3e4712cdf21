"""Selected views as the tables that GPU kernels read, and the host's checks before a launch.

Both GPU backends use these tables.

Views that are adjacent in staged order and differ only in their address form a *group*, so that a kernel walks a few
groups instead of hundreds of views. Tables are uploaded once, when the plan is made. A call passes the numbers of
`Spans` and the lists of items.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import UsageError
from ..plan import HEAD_MAJOR, VIEW_ALIGNMENT
from ..plan.convert import DATA, INLINE, MX, SCALE, TENSOR, TOKEN_HEAD
from ..plan.tables import (
    FAULT_FIRST_TOKEN,
    FAULT_RANGE,
    FAULT_TOO_FEW,
    FAULT_TOO_SMALL,
    ComponentArgs,
    Row,
    Table,
    address_of,
    integers,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from ..plan import Tokens
    from ..plan.tables import Index, Int64s
    from .backend import Recipe

ALIGNMENT = 16
"""Alignment of staging in bytes: every device moves that many in one access."""
_UNSIGNED: dict[int, np.dtype[Any]] = {4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
MAX_COMPONENTS = 16
# How a view is converted and what its staged cells hold, numbered as in csrc/cuda/e4m3.cuh.
COPY = 0
KINDS = {(TENSOR, "divide"): 1, (TENSOR, "bf16"): 2, (TOKEN_HEAD, ""): 3, (MX, "floor"): 4, (MX, "ceil"): 5}
HOLDS = {INLINE: 0, DATA: 1, SCALE: 2}


class Group(NamedTuple):
    """Views `[first_view, first_view + n_views)` of the table of views; fields as in `tables.Row`, in bytes.

    `access` is the widest power of two, at most the table's `widest`, that divides every address and length of the
    group in the pool, and every length in staging: the size of one load or store. In `merged` tables adjacent
    dimensions are collapsed into `width`.
    """

    component: int
    first_view: int
    n_views: int
    n_items: int
    item_stride: int
    rows_per_item: int
    outer_rows: int
    outer_stride: int
    inner_stride: int
    shards: int
    shard_stride: int
    segs: int
    seg_stride: int
    width: int
    access: int
    tokens_per_row: int
    first_shard: int

    @property
    def row_nbytes(self) -> int:
        return self.shards * self.segs * self.width


class Checked(NamedTuple):
    """One component's part of a call, with tokens counted from item 0 of its list.

    `items` are those that the call reads of a list in host memory; `skipped` are before them. None if the call has no
    tokens of the component, or `elsewhere`: the list is on the device.
    """

    span: ComponentArgs
    items: NDArray[Any] | None = None
    skipped: int = 0
    elsewhere: bool = False


class DeviceTable:
    """The groups and views of one recipe.

    `views` is int64 `[n_views, 2]`: the address of item 0, row 0 of the first selected shard, and the key's seed.
    `groups` is int64 `[n_groups, len(Group._fields)]`. Both are in staged order.
    """

    def __init__(self, recipe: Recipe, *, merged: bool, widest: int = ALIGNMENT) -> None:
        """`merged` collapses adjacent dimensions; it is not for kernels that must distinguish cells (checksums).

        `widest`: bytes of the device's widest access.
        """
        self.table = Table.of(recipe.layout, recipe.select)
        self._widest = widest
        self.head_major = recipe.order == HEAD_MAJOR
        if len(self.table.names) > MAX_COMPONENTS:
            raise UsageError(
                f"a selection of {len(self.table.names)} components",
                remedy=f"make plans of at most {MAX_COMPONENTS} components on a device",
            )
        self.group_list = list(self._groups(merged))
        self.groups: Int64s = np.array(self.group_list, dtype=np.int64).reshape(-1, len(Group._fields))
        self._rows = {(g.component, g.tokens_per_row) for g in self.group_list if g.tokens_per_row > 1}
        self._staged = [(g.component, g.tokens_per_row, g.n_views, g.row_nbytes) for g in self.group_list]
        self.views: Int64s = np.array([(row.base, row.seed) for row in self.table.rows], dtype=np.int64).reshape(-1, 2)

    def _groups(self, merged: bool) -> list[Group]:
        collapse = [self._collapsible(row) if merged else 0 for row in self.table.rows]
        return [
            first
            for first, _ in _grouped(
                [(self._shape(*pair),) * 2 for pair in zip(self.table.rows, collapse, strict=True)]
            )
        ]

    def paired(self, peer: DeviceTable) -> tuple[list[Group], list[Group]]:
        """The groups of both tables, with views of equal shape on both sides, for copies from one pool to the other.

        `peer` selects equally many shards of the same views. The second list's `first_view` and `n_views` are the
        first's.
        """
        shaped = []
        for mine, other in zip(self.table.rows, peer.table.rows, strict=True):
            collapse = min(self._collapsible(mine), peer._collapsible(other))
            shaped.append((self._shape(mine, collapse), peer._shape(other, collapse)))
        pairs = _grouped(shaped)
        return [mine for mine, _ in pairs], [other for _, other in pairs]

    def _collapsible(self, row: Row) -> int:
        """How many dimensions are contiguous with the bytes of a run: 0, 1 (segments) or 2 (and shards)."""
        if row.segs > 1 and row.seg_stride != row.width:
            return 0
        return 2 if not self.head_major and (row.shards == 1 or row.shard_stride == row.width * row.segs) else 1

    def _shape(self, row: Row, collapse: int) -> Group:
        shards, segs, width = row.shards, row.segs, row.width
        if collapse >= 1:
            width, segs = width * segs, 1
        if collapse == 2:
            width, shards = width * shards, 1
        strides = [row.base, row.item_stride, width]
        strides += [row.outer_stride] if row.outer_rows < row.rows_per_item else []
        strides += [row.inner_stride] if row.outer_rows > 1 else []
        strides += [row.shard_stride] if shards > 1 else []
        strides += [row.seg_stride] if segs > 1 else []
        access = math.gcd(self._widest, *strides)
        return Group(
            row.component, 0, 0, self.table.sizes[row.component].n_items, row.item_stride, row.rows_per_item,
            row.outer_rows, row.outer_stride, row.inner_stride, shards, row.shard_stride, segs, row.seg_stride, width,
            access, row.tokens_per_row, row.first_shard,
        )  # fmt: skip

    def checked(self, indexes: Mapping[str, Index], tokens: Tokens, *devices: str, unique: bool) -> list[Checked]:
        """One for each component, in the order of `Group.component`, everything checked that the host can see.

        A list is in host memory or on one of `devices`. Each item of one in host memory is checked (and repeated items,
        if `unique`); of one on a device only the number of items. Raises `UsageError` naming component, position and
        value.
        """
        parts, checked = self.table.parts(indexes, tokens), []
        for number, (name, part) in enumerate(zip(self.table.names, parts, strict=True)):
            if part.start == part.stop:
                checked.append(Checked(part))
                continue
            self._check_counts(number, part)
            index, (per_item, n_items) = indexes[name], self.table.sizes[number]
            if index.device not in ("cpu", *devices):
                raise UsageError(
                    f"items of component {name!r} are on {index.device!r}",
                    remedy=f"give them in host memory or on {' or '.join(devices)}",
                    component=name,
                )
            ptr, bits, n, origin, start, stop = part
            span = ComponentArgs(ptr, bits, n, origin, start - origin, stop - origin)
            if index.device != "cpu":
                check_aligned(ptr, bits // 8, f"the list of component {name!r}")
                checked.append(Checked(span, elsewhere=True))
                continue
            first = span.start // per_item
            items = listed(index)[first : (span.stop - 1) // per_item + 1]
            if not _fits(items, n_items, unique):
                self.table.resolve(parts[: number + 1], unique=unique)  # raises the error
            checked.append(Checked(span, items, first))
        self._check_rows(parts)
        return checked

    def _check_counts(self, number: int, part: ComponentArgs) -> None:
        if part.first_token < 0:
            self.table.refuse(FAULT_FIRST_TOKEN, number, 1, part.first_token)
        if not part.first_token <= part.start <= part.stop:
            self.table.refuse(FAULT_RANGE, number, part.start, part.stop)
        needed = (part.stop - part.first_token - 1) // self.table.sizes[number].tokens_per_item + 1
        if needed > part.n:
            self.table.refuse(FAULT_TOO_FEW, number, needed, part.n)

    def _check_rows(self, parts: Sequence[ComponentArgs]) -> None:
        for component, tokens_per_row in self._rows:
            first = parts[component].first_token
            if first % tokens_per_row:
                self.table.refuse(FAULT_FIRST_TOKEN, component, tokens_per_row, first)

    def check_staging(self, ptr: int, nbytes: int, spans: Sequence[ComponentArgs]) -> None:
        """Raises `UsageError` if staging is too small, or not aligned for one access."""
        needed = 0
        for component, per_row, n_views, row_nbytes in self._staged:
            needed -= n_views * (-rows(per_row, spans[component]) * row_nbytes // VIEW_ALIGNMENT) * VIEW_ALIGNMENT
        if needed > nbytes:
            self.table.refuse(FAULT_TOO_SMALL, 0, needed, nbytes)
        check_aligned(ptr, ALIGNMENT, "staging")


def _grouped(shaped: Sequence[tuple[Group, Group]]) -> list[tuple[Group, Group]]:
    """Merges adjacent groups of equal shape; shapes come with `first_view` and `n_views` zero."""
    groups, first = [], 0
    for (mine, other), same in groupby(shaped):
        n = len(list(same))
        groups.append((mine._replace(first_view=first, n_views=n), other._replace(first_view=first, n_views=n)))
        first += n
    return groups


def _fits(items: NDArray[Any], n_items: int, unique: bool) -> bool:
    """Whether all items are inside the pool, and none repeated if `unique`. Much faster than finding which are not."""
    if np.maximum.reduce(items.view(_UNSIGNED[items.itemsize])) >= n_items:  # negative ones are huge
        return False
    if not unique:
        return True
    ordered = np.sort(items)
    return not np.logical_or.reduce(ordered[1:] == ordered[:-1])


def check_aligned(ptr: int, nbytes: int, what: str) -> None:
    """Raises `UsageError` for an address that is not a multiple of `nbytes`: an access there would end the context."""
    if ptr % nbytes:
        raise UsageError(f"{what} at {ptr:#x} is not aligned", remedy=f"align it to {nbytes} bytes", ptr=ptr)


def listed(index: Index) -> NDArray[Any]:
    """An index in host memory as an array; the original array if it was made of one."""
    kept = index.keep
    if not isinstance(kept, np.ndarray) or kept.size != index.n or kept.itemsize * 8 != index.bits:
        return integers(index)
    same = address_of(kept) == index.ptr and kept.flags.c_contiguous
    return kept if same else integers(index)


def rows(tokens_per_row: int, span: ComponentArgs) -> int:
    """Rows of each view that `span` touches, from `span.start // tokens_per_row` on; a span of no tokens is 0..0."""
    return -(-span.stop // tokens_per_row) - span.start // tokens_per_row


def ordinal(device: str, n_devices: int) -> int:
    """The number of "cuda:1"; 0 for "cuda". Raises `UsageError` if there is no such device."""
    number = int(device.partition(":")[2] or 0)
    if number >= n_devices:
        raise UsageError(f"there is no {device} here", remedy=f"this process sees {n_devices} devices", device=device)
    return number

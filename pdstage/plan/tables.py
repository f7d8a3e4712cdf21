"""Selected views as rows of integers, and the checks that every index passes before a byte moves.

Numpy only.

The native code (csrc/host/views.hpp) and its numpy counterparts read the same tables and return the same fault codes.
The error texts are only here.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from pdstage import native
from pdstage.errors import UsageError
from pdstage.plan.staging import Select, Staging, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from pdstage.layout import Key, Layout, View

Int64s: TypeAlias = "NDArray[np.int64]"

# As dtypes, not types: comparing an array's dtype with a type creates a new dtype each time.
_INDEXES = (np.dtype(np.int32), np.dtype(np.int64))


class Index(NamedTuple):
    """A list of items in memory: `n` integers of `bits` bits at address `ptr`; item 0 covers tokens from `first_token`
    on.

    `keep` holds the memory's owner. For components without positions `first_token` is 0. `device` is where the list is:
    "cpu", or the pool's device. The host cannot check a list on a device without waiting for it.
    """

    ptr: int
    bits: int
    n: int
    first_token: int = 0
    keep: object = None
    device: str = "cpu"

    @classmethod
    def of(cls, items: NDArray[Any], first_token: int = 0) -> Index:
        """The index over a one-dimensional int32 or int64 array, which is kept alive and not copied."""
        if items.dtype not in _INDEXES or items.ndim != 1 or not items.flags.c_contiguous:
            raise UsageError(
                f"items are a {items.ndim}-dimensional array of {items.dtype}",
                remedy="give one contiguous list of int32 or int64",
            )
        return cls(address_of(items), items.itemsize * 8, items.size, first_token, items)


Indexes: TypeAlias = "Mapping[str, Index]"


def address_of(items: NDArray[Any]) -> int:
    """The address of the first entry of a contiguous array."""
    if native.ext is not None:
        return int(native.ext.address_of(items))
    return int(items.__array_interface__["data"][0])  # takes a fifth of the time of ctypes.data


class ComponentArgs(NamedTuple):
    """One component's part in a call; csrc/host/views.hpp reads it as six integers.

    `ptr` lists `n` items of `bits` bits. The first begins at `first_token`, a multiple of every row's tokens. `[start,
    stop)` are the tokens to copy; none if they are equal. They are positions in the sequence; kernels on a device take
    them relative to `first_token`.
    """

    ptr: int
    bits: int
    n: int
    first_token: int
    start: int
    stop: int


_NOTHING = ComponentArgs(0, 64, 0, 0, 0, 0)

# Numbered as Fault in csrc/host/views.hpp.
FAULT_RANGE, FAULT_FIRST_TOKEN, FAULT_TOO_FEW, FAULT_ITEM, FAULT_REPEATED, FAULT_TOO_SMALL = range(1, 7)


class Row(NamedTuple):
    """A selected view in the form of csrc/host/views.hpp.

    Row r of an item lies at `r // outer_rows * outer_stride + r % outer_rows * inner_stride`. `first_shard` is the
    first selected shard's number on the whole axis, `seed` is 64 bits of the view's key; checksums use both.
    """

    component: int
    base: int
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
    tokens_per_row: int
    first_shard: int
    seed: int


class Size(NamedTuple):
    """A component's page size and number of items."""

    tokens_per_item: int
    n_items: int


@dataclass(frozen=True, slots=True)
class Table:
    """Rows and their components. With two sides, `side` follows a component's name in errors."""

    names: tuple[str, ...]
    sizes: tuple[Size, ...]
    rows: tuple[Row, ...]
    side: str = ""

    @classmethod
    def of(cls, layout: Layout, select: Iterable[Select]) -> Table:
        """The rows of `select` in key order. Raises `UsageError` for shards that `layout` does not have."""
        chosen = Staging(layout, select).select
        names = tuple(dict.fromkeys(key.component for key, _, _ in chosen))
        components = [layout.component(name) for name in names]
        views = layout.by_key()
        rows = (
            _row(views[key], names.index(key.component), layout.regions[views[key].region].base, start, count)
            for key, start, count in chosen
        )
        return cls(names, tuple(Size(c.tokens_per_item, c.n_items) for c in components), tuple(rows))

    def arrays(self) -> tuple[Int64s, Int64s]:
        """Rows and sizes in the form of the native code."""
        rows = np.array(self.rows, np.int64).reshape(-1, len(Row._fields))
        return rows, np.array(self.sizes, np.int64).reshape(-1, len(Size._fields))

    def parts(self, indexes: Indexes, tokens: Tokens) -> list[ComponentArgs]:
        """One part per component, in the order of `names`. A component without tokens needs no index."""
        parts = []
        for name in self.names:
            start, stop = tokens.get(name, (0, 0))
            if start == stop:
                parts.append(_NOTHING)
                continue
            index = indexes.get(name)
            if index is None:
                raise UsageError(
                    f"tokens {start}..{stop} of component {name!r}{self.side} have no index",
                    remedy="give its items",
                    component=name,
                )
            if index.bits not in (32, 64):
                raise UsageError(f"an index of {index.bits}-bit items", remedy="give int32 or int64", component=name)
            parts.append(ComponentArgs(index.ptr, index.bits, index.n, index.first_token, start, stop))
        return parts

    def refuse(self, fault: int, component: int, position: int, value: int) -> NoReturn:
        """Raises the `UsageError` for a fault code of the native code or of `resolve`."""
        name = self.names[component]
        of = f"of component {name!r}{self.side}"
        if fault == FAULT_TOO_SMALL:
            raise UsageError(
                f"staging of {value} bytes is too small for {position}",
                remedy="give at least nbytes(tokens) bytes",
                nbytes=value,
                needed=position,
            )
        what, remedy = {
            FAULT_RANGE: (
                f"tokens {position}..{value} {of} are not a range from its index's first token on",
                "give first_token <= start <= stop",
            ),
            FAULT_FIRST_TOKEN: (
                f"first_token {value} {of} splits a row of {position} tokens",
                "start an index at a multiple of what a row covers, 0 or later",
            ),
            FAULT_TOO_FEW: (
                f"the index {of} has {value} items where its tokens need {position}",
                "give every item that the token range touches",
            ),
            FAULT_ITEM: (
                f"item {value} at position {position} {of} is outside its pool",
                f"items are 0 to {self.sizes[component].n_items - 1}",
            ),
            FAULT_REPEATED: (
                f"item {value} at position {position} {of} is a destination twice",
                "give each destination item once",
            ),
        }[fault]
        raise UsageError(what, remedy=remedy, component=name, position=position, value=value)

    def resolve(self, parts: Sequence[ComponentArgs], *, unique: bool) -> list[Int64s]:
        """The items that each part touches, as int64; the numpy counterpart of resolve() in csrc/host/views.hpp.

        `unique` refuses repeated items. Raises `UsageError` naming component, position and value.
        """
        resolved = [self._items(number, part, unique) for number, part in enumerate(parts)]
        for row in self.rows:
            first = parts[row.component].first_token
            if first % row.tokens_per_row:
                self.refuse(FAULT_FIRST_TOKEN, row.component, row.tokens_per_row, first)
        return resolved

    def _items(self, number: int, part: ComponentArgs, unique: bool) -> Int64s:
        if part.start == part.stop:
            return np.empty(0, np.int64)
        if part.first_token < 0:
            self.refuse(FAULT_FIRST_TOKEN, number, 1, part.first_token)
        if not part.first_token <= part.start <= part.stop:
            self.refuse(FAULT_RANGE, number, part.start, part.stop)
        tokens, n_items = self.sizes[number]
        needed = (part.stop - part.first_token - 1) // tokens + 1
        if needed > part.n:
            self.refuse(FAULT_TOO_FEW, number, needed, part.n)
        first = (part.start - part.first_token) // tokens
        items = integers(part)[first:needed].astype(np.int64)
        outside = np.flatnonzero((items < 0) | (items >= n_items))
        if outside.size:
            self.refuse(FAULT_ITEM, number, first + int(outside[0]), int(items[outside[0]]))
        if unique:
            _, firsts = np.unique(items, return_index=True)
            if firsts.size < items.size:
                at = int(np.setdiff1d(np.arange(items.size), firsts)[0])
                self.refuse(FAULT_REPEATED, number, first + at, int(items[at]))
        return items


def _row(view: View, component: int, region_base: int, start: int, count: int) -> Row:
    outer = view.rows[0] if len(view.rows) == 2 else None
    rows = view.rows_per_item
    outer_rows = min(outer.tokens // view.tokens_per_row, rows) if outer else rows
    return Row(
        component,
        region_base + view.offset + start * view.shard_stride,
        view.item_stride,
        rows,
        outer_rows,
        outer.stride if outer else 0,
        view.rows[-1].stride,
        count,
        view.shard_stride,
        view.segs,
        view.seg_stride,
        view.width,
        view.tokens_per_row,
        view.axis.first + start,
        _seed(view.key),
    )


@lru_cache(maxsize=4096)
def _seed(key: Key) -> int:
    """64 bits of a key, as a signed integer, equal in every process."""
    name = "\0".join((key.component, key.role, str(key.layer))).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


def rows_touched(row: Row, part: ComponentArgs) -> tuple[int, int]:
    """Rows `[start, stop)` of a part, counted from the first row of the index's first item."""
    if part.start == part.stop:
        return 0, 0
    origin = part.first_token // row.tokens_per_row
    return part.start // row.tokens_per_row - origin, -(-part.stop // row.tokens_per_row) - origin


def row_addresses(row: Row, part: ComponentArgs, items: Int64s) -> Int64s:
    """The address of each row that `part` touches, in sequence order; `items` come from `resolve`."""
    start, stop = rows_touched(row, part)
    if start == stop:
        return np.empty(0, np.int64)
    at = np.arange(start, stop, dtype=np.int64)
    within = at % row.rows_per_item
    item = items[at // row.rows_per_item - start // row.rows_per_item]
    return (
        row.base
        + item * row.item_stride
        + within // row.outer_rows * row.outer_stride
        + within % row.outer_rows * row.inner_stride
    )


def integers(part: ComponentArgs | Index) -> NDArray[Any]:
    """An index list in host memory, without a copy."""
    return memory(part.ptr, part.n * part.bits // 8).view(np.int32 if part.bits == 32 else np.int64)


def memory(ptr: int, nbytes: int) -> NDArray[np.uint8]:
    """Host memory as bytes, without a copy. The caller guarantees that it is mapped and stays mapped."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(ptr))

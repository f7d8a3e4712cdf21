"""The columns of a request's aux row: where each lies, and which of them both sides have.

A row is one run of bytes. Its columns are in the order of their names, each at a multiple of 16 bytes; the row's length
is a multiple of 64. So two sides with the same columns have the same row, whatever order they gave them in, and one
span covers it. Two sides that differ transfer the columns that both have, matched by name: an additional column on
either side moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta

from pdstage.arguments import integer, shown, text
from pdstage.errors import UsageError

ITEMSIZES = {
    "bool": 1, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip
"""The dtypes that a column may have, by their names in torch, and bytes per element."""

MAX_COLUMNS = 64
MAX_ROW_NBYTES = 1 << 26
_ALIGNMENT, _ROW_ALIGNMENT = 16, 64


class Column(NamedTuple):
    """One named value of every row: `shape` elements of `dtype` ("int32", "bfloat16", ...).

    `required`: a peer without such a column is refused in the handshake; otherwise the column is left out with that
    peer.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    required: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of one row's value."""
        return math.prod(self.shape) * ITEMSIZES[self.dtype]


class Placed(NamedTuple):
    """A column and its place in a row, as peers send each other. Only the peer may know its dtype."""

    name: Annotated[str, Meta(max_length=256)]
    dtype: Annotated[str, Meta(max_length=256)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_ROW_NBYTES)], ...], Meta(max_length=8)]
    required: bool
    offset: Annotated[int, Meta(ge=0, le=MAX_ROW_NBYTES)]
    nbytes: Annotated[int, Meta(ge=1, le=MAX_ROW_NBYTES)]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


Places: TypeAlias = tuple[Placed, ...]


class Columns:
    """The columns of one side, with their places."""

    def __init__(self, columns: Iterable[Column]) -> None:
        """Raises `UsageError` for a repeated column, an unknown dtype, an empty column, or too many."""
        self.given = tuple(sorted(_columns(columns)))
        names = [column.name for column in self.given]
        if len(set(names)) != len(names) or not 0 < len(names) <= MAX_COLUMNS:
            raise UsageError(f"aux columns {names}", remedy=f"give 1 to {MAX_COLUMNS}, each name once")
        placed, end = [], 0
        for column in self.given:
            if column.dtype not in ITEMSIZES or not column.name:
                raise UsageError(
                    f"aux column {column.name!r} of {column.dtype!r}{list(column.shape)}",
                    remedy=f"name it, and give one of {', '.join(ITEMSIZES)}",
                )
            placed.append(Placed(*column, end, column.nbytes))
            end += -(-column.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.placed = tuple(placed)
        self.row_nbytes = -(-end // _ROW_ALIGNMENT) * _ROW_ALIGNMENT
        if self.row_nbytes > MAX_ROW_NBYTES:
            raise UsageError(f"an aux row of {self.row_nbytes} bytes", remedy=f"at most {MAX_ROW_NBYTES}")


def _columns(given: object) -> list[Column]:
    try:
        columns = [Column(*column) for column in given]  # type: ignore[attr-defined]
    except Exception as error:
        raise UsageError(f"columns are {shown(given)}", remedy="give a list of Column(name, dtype, shape)") from error
    return [column._replace(name=text("a column's name", column.name), dtype=text("a column's dtype", column.dtype),
                            shape=_shape(column)) for column in columns]  # fmt: skip


def _shape(column: Column) -> tuple[int, ...]:
    try:
        shape = tuple(column.shape)
    except Exception as error:
        raise UsageError(
            f"the shape of aux column {column.name!r} is {shown(column.shape)}", remedy="give a tuple of integers"
        ) from error
    return tuple(integer(f"the shape of aux column {column.name!r}", n, low=1) for n in shape)


class Span(NamedTuple):
    """Bytes of a row here and their place in a row there."""

    src_offset: int
    dst_offset: int
    nbytes: int


@dataclass(frozen=True)
class Shared:
    """What prefill's rows (`src`) and decode's (`dst`) have in common, in name order: the same on both sides."""

    src: Places
    dst: Places
    left_out: tuple[str, ...]
    """What is not common, for the log."""

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the common columns one after the other, as in a message."""
        return sum(column.nbytes for column in self.src)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The spans of a write from row to row: one if both sides have exactly these columns."""
        spans: list[Span] = []
        for src, dst in zip(self.src, self.dst, strict=True):
            if spans:
                last = spans[-1]
                gaps = src.offset - last.src_offset - last.nbytes, dst.offset - last.dst_offset - last.nbytes
                if gaps[0] == gaps[1] and 0 <= gaps[0] < _ALIGNMENT:  # no room for another column: padding on both
                    spans[-1] = last._replace(nbytes=last.nbytes + gaps[0] + src.nbytes)
                    continue
            spans.append(Span(src.offset, dst.offset, src.nbytes))
        return tuple(spans)

    def pack(self, row: memoryview) -> bytes:
        """The common columns of one of prefill's rows, one after the other."""
        return b"".join(row[column.offset : column.offset + column.nbytes] for column in self.src)

    def unpack(self, packed: bytes) -> Iterator[tuple[Placed, memoryview]]:
        """Each common column as decode places it, and its bytes."""
        at, view = 0, memoryview(packed)
        for column in self.dst:
            yield column, view[at : at + column.nbytes]
            at += column.nbytes


def share(src: Places, dst: Places) -> Shared:
    """The columns that prefill and decode have in common."""
    at_prefill, at_decode = ({column.name: column for column in columns} for columns in (src, dst))
    common, left_out = [], []
    for name in sorted({*at_prefill, *at_decode}):
        here, there = at_prefill.get(name), at_decode.get(name)
        if here is None or there is None:
            left_out.append(f"{name!r} only at {'decode' if here is None else 'prefill'}")
        elif (here.dtype, here.shape, here.nbytes) != (there.dtype, there.shape, there.nbytes):
            left_out.append(f"{name!r} {here} at prefill and {there} at decode")
        else:
            common.append((here, there))
    return Shared(tuple(one for one, _ in common), tuple(other for _, other in common), tuple(left_out))


def lacking(src: Places, dst: Places) -> str:
    """Which required column the two sides do not have in common; empty if none."""
    shared = {column.name for column in share(src, dst).src}
    for side, columns in (("prefill", src), ("decode", dst)):
        for column in columns:
            if column.required and column.name not in shared:
                other = next((o for o in (dst if columns is src else src) if o.name == column.name), None)
                has = f"is {other} there" if other is not None else "is not there"
                return f"aux column {column.name!r}, {column} and required at {side}, {has}"
    return ""


def problem(columns: Places, row_nbytes: int) -> str:
    """What is wrong with a peer's columns in rows of `row_nbytes`; empty if nothing is."""
    if len({column.name for column in columns}) != len(columns):
        return "an aux column named twice"
    end = 0
    for column in sorted(columns, key=lambda column: column.offset):
        if column.offset < end or column.offset + column.nbytes > row_nbytes:
            return f"aux column {column.name!r} outside its row, or in another column"
        end = column.offset + column.nbytes
    return ""

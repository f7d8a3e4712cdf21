"""Columns of aux rows: where each lies, and that what two sides have in common never depends on what they have not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdstage import UsageError
from pdstage.columns import ITEMSIZES, MAX_COLUMNS, Column, Columns, lacking, problem, share

NAMES = st.sampled_from("abcdefgh")
COLUMN = st.builds(
    Column, NAMES, st.sampled_from(sorted(ITEMSIZES)), st.lists(st.integers(1, 9), max_size=2).map(tuple), st.booleans()
)
SIDE = st.lists(COLUMN, min_size=1, max_size=8, unique_by=lambda column: column.name)


def test_a_row_is_its_columns_by_name_each_aligned() -> None:
    columns = Columns([Column("b", "int64", (3,)), Column("a", "uint8", (17,)), Column("c", "bfloat16", ())])
    assert [(column.name, column.offset, column.nbytes) for column in columns.placed] == [
        ("a", 0, 17), ("b", 32, 24), ("c", 64, 2),
    ]  # fmt: skip
    assert columns.row_nbytes == 128


@pytest.mark.parametrize(
    "columns",
    [
        [],
        [Column("a", "int32", (1,)), Column("a", "int64", (1,))],
        [Column("a", "complex64", (1,))],
        [Column("a", "int32", (0,))],
        [Column("", "int32", (1,))],
        [Column("a", "int64", (1 << 24,))],
        [Column(f"{n}", "int32", (1,)) for n in range(MAX_COLUMNS + 1)],
    ],
)
def test_columns_that_make_no_row(columns: list[Column]) -> None:
    with pytest.raises(UsageError, match="aux"):
        Columns(columns)


@given(SIDE, st.randoms(use_true_random=False))
def test_the_same_columns_are_one_span_whatever_their_order(columns: list[Column], random) -> None:
    shuffled = list(columns)
    random.shuffle(shuffled)
    one, other = Columns(columns), Columns(shuffled)
    assert one.placed == other.placed
    (span,) = share(one.placed, other.placed).spans
    assert span[:2] == (0, 0)
    assert not problem(one.placed, one.row_nbytes)


@example(
    [Column("a", "int8", (16,)), Column("b", "int32", (4,)), Column("c", "int8", (16,))],
    [Column("a", "int8", (16,)), Column("b", "float32", (4,)), Column("c", "int8", (16,))],
)
@given(SIDE, SIDE)
def test_each_common_column_gets_its_bytes_and_no_other_a_byte(src: list[Column], dst: list[Column]) -> None:
    """By a write of spans and by a message alike; padding may be written."""
    ours, theirs = Columns(src), Columns(dst)
    shared = share(ours.placed, theirs.placed)
    rng = np.random.default_rng(1)
    row = rng.integers(1, 255, ours.row_nbytes, np.uint8)
    written, packed = np.zeros(theirs.row_nbytes, np.uint8), np.zeros(theirs.row_nbytes, np.uint8)
    for at, to, nbytes in shared.spans:
        written[to : to + nbytes] = row[at : at + nbytes]
    for column, data in shared.unpack(shared.pack(memoryview(row))):
        packed[column.offset : column.offset + column.nbytes] = np.frombuffer(data, np.uint8)
    starts = {(c.name, c.dtype, c.shape): c.offset for c in ours.placed}
    for column in theirs.placed:
        at = starts.get((column.name, column.dtype, column.shape))
        want = np.zeros(column.nbytes, np.uint8) if at is None else row[at : at + column.nbytes]
        for found in (written, packed):
            assert np.array_equal(found[column.offset : column.offset + column.nbytes], want), column.name
    assert len(shared.left_out) == len({c.name for c in (*src, *dst)}) - len(shared.src)


@given(SIDE, SIDE)
def test_what_is_required_is_common_or_named(src: list[Column], dst: list[Column]) -> None:
    ours, theirs = Columns(src).placed, Columns(dst).placed
    shared = {column.name for column in share(ours, theirs).src}
    lost = [column.name for column in (*ours, *theirs) if column.required and column.name not in shared]
    words = lacking(ours, theirs)
    assert bool(words) == bool(lost)
    assert not words or any(repr(name) in words for name in lost)

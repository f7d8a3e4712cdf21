"""Metadata buffers: rows, whose they are, and views of their columns without a copy."""

from __future__ import annotations

import pytest
import torch

from pdstage import UsageError
from pdstage.columns import Column, Columns, share
from pdstage.metadata import (
    AuxRow,
    MetadataBuffers,
    RowInUse,
    RowNotAllocated,
    RowsExhausted,
    usual_columns,
)

COLUMNS = (Column("ids", "int32", (4,)), Column("hidden", "bfloat16", (2, 3)), Column("room", "uint64", (1,)))


def test_rows_are_disjoint_and_in_the_region() -> None:
    held = MetadataBuffers(COLUMNS, 5)
    rows = [held.allocate() for _ in range(5)]
    assert {held.address(row) for row in rows} == {held.region.base + n * held.row_nbytes for n in range(5)}
    for n, row in enumerate(rows):
        row["ids"] = n + 1
        row["room"] = [n + 100]
    for n, row in enumerate(rows):
        assert row["ids"].tolist() == [n + 1, 0, 0, 0]
        assert row["room"].tolist() == [n + 100]
    assert held.region.nbytes == 5 * held.row_nbytes


def test_columns_that_a_peer_places_otherwise_are_written_where_it_has_them() -> None:
    """I2: our whole row, written as one, would end in the next row of a peer that has no padding."""
    ours, theirs, at = Columns(COLUMNS).placed, [], 0
    for column in reversed(ours):
        theirs.append(column._replace(offset=at))
        at += column.nbytes
    written = {(span.dst_offset, span.nbytes) for span in share(ours, tuple(theirs)).spans}
    assert written == {(column.offset, column.nbytes) for column in theirs}


def test_allocation_says_what_is_wrong() -> None:
    with pytest.raises(UsageError, match="n_rows is 0"):
        MetadataBuffers(COLUMNS, 0)
    held = MetadataBuffers(COLUMNS, 2)
    first, second = held.allocate(), held.allocate()
    with pytest.raises(RowsExhausted, match="all 2 aux rows"):
        held.allocate()
    held.free(first)
    with pytest.raises(RowNotAllocated):
        held.free(first)
    again = held.allocate()
    assert again.number == first.number
    with pytest.raises(RowNotAllocated):  # its number is another request's by now
        held.free(first)
    with pytest.raises(RowNotAllocated):
        MetadataBuffers(COLUMNS, 2).free(second)
    held.lend(second)
    with pytest.raises(RowInUse):
        held.free(second)
    with pytest.raises(RowInUse):
        held.lend(second)
    held.give_back(second)
    held.free(second)
    assert held.n_free == 1


def test_views_are_of_the_memory_itself() -> None:
    held = MetadataBuffers(COLUMNS, 1)
    row = held.allocate()
    row["ids"][2] = 7
    assert row.tensor("ids").tolist() == [0, 0, 7, 0]
    row.tensor("ids")[0] = 5
    assert row["ids"].tolist() == [5, 0, 7, 0]
    assert row.tensor("ids").data_ptr() == held.address(row) + row._at["ids"].offset
    row["hidden"] = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert row.tensor("hidden").dtype is torch.bfloat16
    assert row.tensor("hidden").tolist() == [[0, 1, 2], [3, 4, 5]]
    row["hidden"] = [9.0]
    assert row.tensor("hidden")[0, 0] == 9
    assert len(row.read()) == held.row_nbytes
    with pytest.raises(UsageError, match="which numpy lacks"):
        row["hidden"]
    with pytest.raises(UsageError, match="no column 'id'"):
        row["id"]
    with pytest.raises(UsageError, match="room for 4"):
        row["ids"] = range(5)
    assert "ids" in row
    assert "id" not in row


def test_memory_is_the_kind_that_was_asked_for() -> None:
    """Tensors stand for a device's memory: the same rows and views."""
    host = MetadataBuffers(COLUMNS, 2)
    row = host.allocate()
    on_device = AuxRow(host.columns.placed, torch.from_numpy(row.memory), row.number)
    on_device["ids"] = [1, 2]
    on_device["ids"] = torch.tensor([3])
    assert isinstance(on_device["ids"], torch.Tensor)
    assert on_device["ids"].tolist() == [3, 2, 0, 0]
    assert bytes(on_device.read()) == bytes(row.read())
    shared = share(host.columns.placed, Columns(COLUMNS[:1]).placed)
    target = AuxRow((), torch.zeros(64, dtype=torch.uint8))
    target.take(shared.pack(row.read()), shared)
    assert target.of(shared.dst)["ids"].tolist() == [3, 2, 0, 0]
    assert target.of(shared.dst).names == ("ids",)


def test_the_usual_columns_are_those_that_are_asked_for_and_closed_buffers_lend_none() -> None:
    every = {column.name for column in usual_columns(4096, speculative=True)}
    fewer = {column.name for column in usual_columns(top_logprobs=0)}
    assert every - fewer == {
        "output_top_logprobs_val", "output_top_logprobs_idx", "output_topk_p", "output_topk_index",
        "output_hidden_states",
    }  # fmt: skip
    held = MetadataBuffers(usual_columns(64), 1)
    held.close()
    with pytest.raises(UsageError, match="closed"):
        held.allocate()

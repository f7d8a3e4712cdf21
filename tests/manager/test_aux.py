"""Aux rows between real nodes: each way, columns that differ, what falls back, and whose a row is meanwhile.

What a row's columns are, and what they are for: docs/aux.md, whose fences tests/docs runs.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from pdstage import AuxRow, Column, Config, MetadataBuffers, State, UsageError
from pdstage.metadata import RowInUse, usual_columns
from tests.manager.engine import QUICK, TOKENS, Event, Rank, drive
from tests.rows import inline_or_thread, usable

TRANSPORTS = usable("local", "nixl")
DRAFT = Column("draft_state", "float16", (33,))


class Rows:
    """A prefill and a decode node with rows, and rooms between them."""

    def __init__(self, site, *, aux="rdma", src_columns=(), dst_columns=(), held=None, **options) -> None:
        self.site, columns = site, usual_columns(64, top_logprobs=4)
        self.rows = held or [MetadataBuffers((*columns, *more), 4) for more in (src_columns, dst_columns)]
        aux = (aux, aux) if isinstance(aux, str) else aux
        sides = [{"aux": way, "metadata": rows} for way, rows in zip(aux, self.rows, strict=True)]
        self.pair = site.pair(prefill=sides[0], decode=sides[1], **options)
        self.p, self.d = self.pair.nodes

    def open(self, room: int, *, row: bool = True):
        """(the room, prefill's row, decode's): all but `finish`."""
        theirs = self.rows[1].allocate() if row else None
        if theirs is not None:
            theirs["output_ids"] = -1
            theirs["bootstrap_room"] = 0
        opened = self.pair.open(room, aux=theirs)
        opened.sender.chunk(opened.pages, TOKENS)
        ours = self.rows[0].allocate()
        ours["output_ids"] = [1000 + room]
        ours["bootstrap_room"] = [room]
        ours["output_hidden_states"] = np.arange(64)
        return opened, ours, theirs

    def move(self, room: int, *, row: bool = True) -> AuxRow:
        opened, ours, theirs = self.open(room, row=row)
        opened.sender.finish(aux=ours)
        self.pair.arrives(opened)
        came = opened.receiver.aux
        assert isinstance(came, AuxRow)
        assert came["output_ids"][0] == 1000 + room
        assert came["bootstrap_room"][0] == room
        assert came.tensor("output_hidden_states").tolist() == list(range(64))
        self.rows[0].free(ours)
        if theirs is not None:
            assert theirs["output_ids"][0] == 1000 + room
            self.rows[1].free(theirs)
        return came

    def counts(self) -> tuple[int, int, int]:
        stats = (self.p.stats(), self.d.stats())
        return stats[0]["aux_rows"], stats[0]["aux_fallbacks"], stats[1]["aux_fallbacks"]


def words(caplog, about: str) -> list[str]:
    return [record.message for record in caplog.records if about in record.message]


@inline_or_thread
@pytest.mark.parametrize("aux", ["tcp", "rdma", "nvlink"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_way(site, transport, aux, progress, caplog) -> None:
    rows = Rows(site, aux=aux, transport=transport, progress=progress)
    for room in range(6):  # more than there are rows: they go round
        rows.move(room)
    assert rows.counts() == ((0, 0, 0) if aux == "tcp" else (6, 0, 0))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("aux", ["tcp", "rdma"])
@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_column_more_on_one_side(site, side, aux, caplog) -> None:
    rows = Rows(site, aux=aux, **{f"{side}_columns": (DRAFT,)})
    for room in range(3):
        assert "draft_state" not in rows.move(room)
    assert len(words(caplog, "draft_state")) == 2, "once on each side"
    assert rows.counts()[1:] == (0, 0)


@pytest.mark.parametrize(("aux", "counts"), [(("rdma", "tcp"), (0, 2, 0)), (("tcp", "rdma"), (0, 0, 2))])
def test_what_only_one_side_wants_goes_by_message(site, caplog, aux, counts) -> None:
    """Both must say so; and each room counts."""
    rows = Rows(site, aux=aux)
    for room in range(2):
        rows.move(room)
    assert rows.counts() == counts
    assert len(words(caplog, "control message")) == 1


@pytest.mark.parametrize("side", [0, 1])
def test_rows_that_the_transport_cannot_register(site, side, caplog) -> None:
    """As rows on a device would be where it moves host memory only."""
    held = [MetadataBuffers(usual_columns(64, top_logprobs=4), 4) for _ in range(2)]
    held[side].region = replace(held[side].region, kind="cuda")
    rows = Rows(site, aux="nvlink", held=held)
    for room in range(3):
        rows.move(room)
    assert rows.counts() == (0, 3, 3)
    said = words(caplog, "control message")
    assert len(said) == 3, "the node itself at its start, and each side once"
    assert "not by 'nvlink'" in said[0]
    assert "'cuda'" in said[0]


def test_a_receiver_without_a_row_has_a_copy(site) -> None:
    rows = Rows(site)
    assert rows.move(1, row=False).number == -1
    assert rows.counts() == (0, 1, 1)


def test_a_row_is_its_rooms_until_released(site) -> None:
    """I2, I8: nobody takes a row that a write may still read or land in."""
    rows = Rows(site)
    room, ours, theirs = rows.open(1)
    with pytest.raises(RowInUse):
        rows.rows[1].free(theirs)
    other = rows.pair.receive(2)
    with pytest.raises(RowInUse):
        other.bind(rows.pair.dst.allocate(4), 4, aux=theirs)
    room.sender.finish(aux=ours)
    with pytest.raises(RowInUse):
        rows.rows[0].free(ours)
    with pytest.raises(UsageError, match="finished already"):
        room.sender.finish(aux=ours)
    rows.pair.end(room)
    rows.rows[0].free(ours)
    other.bind(rows.pair.dst.allocate(4), 4, aux=theirs)
    other.abort()
    site.ends(other)
    rows.rows[1].free(theirs)


def test_rooms_that_fail_give_their_rows_back_and_those_that_are_over_take_none(site) -> None:
    """One that never met its peer, and one whose node closes."""
    rows = Rows(site)
    for bound in ("while it waits", "when it is over"):
        lonely, row = rows.d.receive(bound, "127.0.0.1:1", deadline_s=0.3), rows.rows[1].allocate()
        if bound == "when it is over":
            site.ends(lonely)
        lonely.bind(rows.pair.dst.allocate(4), 4, aux=row)
        site.ends(lonely)
        rows.rows[1].free(row)
    room, ours, theirs = rows.open(2)
    room.sender.finish(aux=ours)
    rows.p.close()
    rows.d.close()
    rows.rows[0].free(ours)
    rows.rows[1].free(theirs)


@pytest.mark.parametrize("aux", ["tcp", "rdma"])
def test_a_row_that_is_ready_later(site, aux) -> None:
    """As one that a stream still fills: nothing reads it before its event is done."""
    rows, event = Rows(site, aux=aux), Event()
    room, ours, theirs = rows.open(5)
    ours["output_ids"] = 0
    room.sender.finish(aux=ours, ready=event)
    more = rows.pair.src.allocate(4)
    for again in (lambda: room.sender.finish(aux=ours), lambda: room.sender.chunk(more, (TOKENS, TOKENS + 4))):
        with pytest.raises(UsageError, match="finish"):
            again()
    drive(site.nodes, lambda: room.receiver.state is State.TRANSFERRING)
    drive(site.nodes, lambda: rows.d.core.idle or rows.p.core.chunks.flights == {})
    assert room.receiver.state is State.TRANSFERRING
    ours["output_ids"] = 77
    event.done = True
    rows.pair.end(room)
    assert room.receiver.state is State.SUCCESS
    assert theirs["output_ids"][0] == 77


def test_as_many_bytes_as_any_message_carries(site) -> None:
    most = 8 << 20
    pair = site.pair(config=replace(QUICK, max_aux_nbytes=most))
    room = pair.begin(1, aux=bytes(most))
    pair.end(room)
    assert room.receiver.aux == bytes(most)
    with pytest.raises(UsageError, match=f"max_aux_nbytes is {most + 1}"):
        Config(max_aux_nbytes=most + 1)


def test_misuse(site) -> None:
    rows = MetadataBuffers(usual_columns(64), 2)
    small = Config(retry_s=QUICK.retry_s, max_aux_nbytes=64)
    for options, words in (
        ({"aux": "intra_node_nvlink", "metadata": rows}, "aux is 'intra_node_nvlink'"),
        ({"aux": "rdma"}, "aux 'rdma' without aux rows"),
        ({"metadata": rows, "config": small}, "the limit is 64"),
    ):
        with pytest.raises(UsageError, match=words):
            site.decode(Rank(), **options)
    receiver = site.decode(Rank()).receive(1, site.address)
    with pytest.raises(UsageError, match="a node without rows"):
        receiver.bind([0], 4, aux=rows.allocate())
    receiver.bind([0], 4)  # it was not bound by that

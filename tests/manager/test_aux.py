"""Aux rows between real nodes: each way, columns that differ, what falls back, and whose a row is meanwhile.

`test_a_request_and_its_row` is the worked example of docs/aux.md.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from pdstage import AuxRow, Column, Config, MetadataBuffers, State, UsageError
from pdstage.metadata import RowInUse, usual_columns
from tests.manager.engine import QUICK, Rank, drive
from tests.manager.test_transfer import Event
from tests.rows import usable

TRANSPORTS = usable("local", "nixl")
TOKENS = 12
DRAFT = Column("draft_state", "float16", (33,))


class Pair:
    """A prefill and a decode node with rows, and rooms between them."""

    def __init__(self, site, *, aux="rdma", src_columns=(), dst_columns=(), held=None, **options) -> None:
        self.site, self.src, self.dst = site, Rank(), Rank(page=8, hnd=True)
        columns = usual_columns(64, top_logprobs=4)
        self.rows = held or [MetadataBuffers((*columns, *more), 4) for more in (src_columns, dst_columns)]
        aux = (aux, aux) if isinstance(aux, str) else aux
        self.p = site.prefill(self.src, aux=aux[0], metadata=self.rows[0], **options)
        self.d = site.decode(self.dst, aux=aux[1], metadata=self.rows[1], **options)

    def open(self, room: int, *, row: bool = True):
        """(sender, its row, receiver, its row, into): all but `finish`."""
        pages, into = self.src.allocate(TOKENS), self.dst.allocate(TOKENS)
        self.src.write(room, TOKENS, pages)
        receiver = self.d.receive(room, self.site.address)
        theirs = self.rows[1].allocate() if row else None
        if theirs is not None:
            theirs["output_ids"] = -1
            theirs["bootstrap_room"] = 0
        receiver.bind(into, TOKENS, aux=theirs)
        sender = self.p.send(room)
        sender.chunk(pages, TOKENS)
        ours = self.rows[0].allocate()
        ours["output_ids"] = [1000 + room]
        ours["bootstrap_room"] = [room]
        ours["output_hidden_states"] = np.arange(64)
        return sender, ours, receiver, theirs, into

    def move(self, room: int, *, row: bool = True) -> AuxRow:
        sender, ours, receiver, theirs, into = self.open(room, row=row)
        sender.finish(aux=ours)
        drive(self.site.nodes, lambda: receiver.released and sender.released)
        assert (receiver.wait(0), sender.wait(0)) == (State.SUCCESS, State.SUCCESS)
        assert self.dst.holds(room, TOKENS, into)
        came = receiver.aux
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


@pytest.mark.parametrize("progress", ["inline", "thread"])
@pytest.mark.parametrize("aux", ["tcp", "rdma", "nvlink"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_way(site, transport, aux, progress, caplog) -> None:
    pair = Pair(site, aux=aux, transport=transport, progress=progress)
    for room in range(6):  # more than there are rows: they go round
        pair.move(room)
    assert pair.counts() == ((0, 0, 0) if aux == "tcp" else (6, 0, 0))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_request_and_its_row(site) -> None:
    src, dst = Rank(), Rank()
    # Both sides, once: rows for as many requests as are open at a time, and how they are to travel.
    columns = usual_columns(hidden_size=64, top_logprobs=4)
    ours, theirs = MetadataBuffers(columns, n_rows=16), MetadataBuffers(columns, n_rows=16)
    prefill = site.prefill(src, aux="rdma", metadata=ours)
    decode = site.decode(dst, aux="rdma", metadata=theirs)

    # Decode: a row beside the pages.
    into = dst.allocate(TOKENS)
    receiver = decode.receive("request 7", site.address)
    receiver.bind(into, TOKENS, aux=theirs.allocate())

    # Prefill: computes, fills a row of its own, and keeps it until the room is released.
    pages = src.allocate(TOKENS)
    src.write(7, TOKENS, pages)
    sender, row = prefill.send("request 7"), ours.allocate()
    sender.chunk(pages, TOKENS)
    row["output_ids"] = [4711]
    row["cached_tokens"] = [TOKENS, TOKENS, 0, 0]
    row["output_top_logprobs_val"] = [-0.1, -2.5]
    sender.finish(aux=row)

    # Decode: a Success means that the row is here too.
    drive(site.nodes, lambda: receiver.state is State.SUCCESS)
    first = receiver.aux
    assert isinstance(first, AuxRow)
    assert int(first["output_ids"][0]) == 4711
    assert first["cached_tokens"].tolist()[:4] == [TOKENS, TOKENS, 0, 0]
    assert first["output_top_logprobs_val"].tolist() == pytest.approx([-0.1, -2.5, 0, 0])

    # Both: a row goes back once its room is released.
    drive(site.nodes, lambda: receiver.released and sender.released)
    theirs.free(first)
    ours.free(row)
    assert (ours.n_free, theirs.n_free) == (16, 16)


@pytest.mark.parametrize("aux", ["tcp", "rdma"])
@pytest.mark.parametrize("side", ["src", "dst"])
def test_a_column_more_on_one_side(site, side, aux, caplog) -> None:
    pair = Pair(site, aux=aux, **{f"{side}_columns": (DRAFT,)})
    for room in range(3):
        assert "draft_state" not in pair.move(room)
    words = [record.message for record in caplog.records if "draft_state" in record.message]
    assert len(words) == 2, "once on each side"
    assert pair.counts()[1:] == (0, 0)


def test_what_only_one_side_wants_goes_by_message(site, caplog) -> None:
    """Both must say so; the other way round works too, and each room counts."""
    for aux in (("rdma", "tcp"), ("tcp", "rdma")):
        pair = Pair(site, aux=aux)
        for room in range(2):
            pair.move(room)
        assert pair.counts() == ((0, 2, 0) if aux[0] == "rdma" else (0, 0, 2))
    assert len([r for r in caplog.records if "control message" in r.message]) == 2


@pytest.mark.parametrize("side", [0, 1])
def test_rows_that_the_transport_cannot_register(site, side, caplog) -> None:
    """As rows on a device would be where it moves host memory only."""
    held = [MetadataBuffers(usual_columns(64, top_logprobs=4), 4) for _ in range(2)]
    held[side].region = replace(held[side].region, kind="cuda")
    pair = Pair(site, aux="nvlink", held=held)
    for room in range(3):
        pair.move(room)
    assert pair.counts() == (0, 3, 3)
    said = [record.message for record in caplog.records if "control message" in record.message]
    assert len(said) == 3, "the node itself at its start, and each side once"
    assert "not by 'nvlink'" in said[0]
    assert "'cuda'" in said[0]


def test_a_write_that_fails_falls_back(site, monkeypatch) -> None:
    """The post is refused by the transport, as where a peer's rows went away: the row comes with Close."""
    pair = Pair(site)
    post = pair.p.transport.post
    region = pair.rows[1].region

    def refuse(peer, spans, tag):
        if region.base <= spans.dst[0] < region.base + region.nbytes:
            raise UsageError("no such memory there", remedy="none")
        return post(peer, spans, tag)

    monkeypatch.setattr(pair.p.transport, "post", refuse)
    for room in range(2):
        pair.move(room)
    assert pair.counts() == (0, 2, 2)


def test_a_receiver_without_a_row_has_a_copy(site) -> None:
    pair = Pair(site)
    came = pair.move(1, row=False)
    assert came.number == -1
    assert pair.counts() == (0, 1, 1)


def test_a_row_is_its_rooms_until_released(site) -> None:
    """I2, I8: nobody takes a row that a write may still read or land in."""
    pair = Pair(site)
    sender, ours, receiver, theirs, _ = pair.open(1)
    with pytest.raises(RowInUse):
        pair.rows[1].free(theirs)
    other = pair.d.receive(2, site.address)
    with pytest.raises(RowInUse):
        other.bind(pair.dst.allocate(4), 4, aux=theirs)
    sender.finish(aux=ours)
    with pytest.raises(RowInUse):
        pair.rows[0].free(ours)
    with pytest.raises(UsageError, match="finished already"):
        sender.finish(aux=ours)
    drive(site.nodes, lambda: receiver.released and sender.released)
    pair.rows[0].free(ours)
    other.bind(pair.dst.allocate(4), 4, aux=theirs)
    other.abort()
    drive(site.nodes, lambda: other.released)
    pair.rows[1].free(theirs)


def test_a_row_may_be_freed_by_who_sees_released(site, monkeypatch) -> None:
    """However soon: an engine's thread looks at the handle while the node's thread brings it up to date."""
    pair, seen = Pair(site), []
    sender, ours, receiver, theirs, _ = pair.open(1)
    for node, handle, rows, row in ((pair.p, sender, pair.rows[0], ours), (pair.d, receiver, pair.rows[1], theirs)):
        changed = node.roster.changed

        def look(room, status, changed=changed, handle=handle, rows=rows, row=row) -> None:
            changed(room, status)
            if handle.released and handle not in seen:
                seen.append(handle)
                rows.free(row)

        monkeypatch.setattr(node.roster, "changed", look)
    sender.finish(aux=ours)
    drive(site.nodes, lambda: len(seen) == 2)
    assert receiver.aux["output_ids"][0] == 1001


def test_a_room_over_already_takes_no_row(site) -> None:
    pair = Pair(site)
    sender, ours, receiver, _, _ = pair.open(1)
    drive(site.nodes, lambda: sender.prefix_tokens is not None)
    receiver.abort()
    drive(site.nodes, lambda: receiver.released and sender.released)
    sender.finish(aux=ours)
    pair.rows[0].free(ours)
    late = pair.d.receive(2, "127.0.0.1:1", deadline_s=0.2)
    drive(site.nodes, lambda: late.released)
    row = pair.rows[1].allocate()
    late.bind(pair.dst.allocate(4), 4, aux=row)
    pair.rows[1].free(row)


def test_rooms_that_fail_give_their_rows_back(site) -> None:
    """One that never met its peer, and one whose node closes."""
    pair = Pair(site)
    lonely = pair.d.receive(1, "127.0.0.1:1", deadline_s=0.5)
    row = pair.rows[1].allocate()
    lonely.bind(pair.dst.allocate(4), 4, aux=row)
    drive(site.nodes, lambda: lonely.released)
    pair.rows[1].free(row)
    sender, ours, _, theirs, _ = pair.open(2)
    sender.finish(aux=ours)
    with ExitStack() as stack:
        for node in (pair.d, pair.p):
            stack.callback(node.close)
    pair.rows[0].free(ours)
    pair.rows[1].free(theirs)


@pytest.mark.parametrize("aux", ["tcp", "rdma"])
def test_a_row_that_is_ready_later(site, aux) -> None:
    """As one that a stream still fills: nothing reads it before its event is done."""
    pair, event = Pair(site, aux=aux), Event()
    sender, ours, receiver, theirs, _ = pair.open(5)
    ours["output_ids"] = 0
    sender.finish(aux=ours, ready=event)
    for again in (lambda: sender.finish(aux=ours), lambda: sender.chunk(pair.src.allocate(4), (TOKENS, TOKENS + 4))):
        with pytest.raises(UsageError, match="finish"):
            again()
    drive(site.nodes, lambda: receiver.state is State.TRANSFERRING)
    drive(site.nodes, lambda: pair.d.core.idle or pair.p.core.chunks.flights == {})
    assert receiver.state is State.TRANSFERRING
    ours["output_ids"] = 77
    event.done = True
    drive(site.nodes, lambda: receiver.released and sender.released)
    assert receiver.state is State.SUCCESS
    assert theirs["output_ids"][0] == 77


def test_bytes_are_still_bytes(site) -> None:
    pair = Pair(site)
    sender, _, receiver, theirs, _ = pair.open(1)
    sender.finish(aux=b"first token")
    drive(site.nodes, lambda: receiver.released and sender.released)
    assert receiver.aux == b"first token"
    assert theirs["output_ids"][0] == -1
    assert pair.counts() == (0, 0, 0)


def test_a_required_column_the_peer_lacks_fails_the_room(site) -> None:
    needed = DRAFT._replace(required=True)
    pair = Pair(site, dst_columns=(needed,))
    receiver = pair.d.receive(1, site.address)
    drive(site.nodes, lambda: receiver.state is State.FAILED)
    assert "'draft_state', float16[33] and required at decode, is not there" in str(receiver.error)


def test_misuse(site) -> None:
    rows = MetadataBuffers(usual_columns(64), 2)
    with pytest.raises(UsageError, match="aux is 'intra_node_nvlink'"):
        site.decode(Rank(), aux="intra_node_nvlink", metadata=rows)
    with pytest.raises(UsageError, match="aux 'rdma' without aux rows"):
        site.decode(Rank(), aux="rdma")
    small = Config(retry_s=QUICK.retry_s, max_aux_nbytes=64)
    with pytest.raises(UsageError, match="the limit is 64"):
        site.decode(Rank(), metadata=rows, config=small)
    plain = site.decode(Rank())
    receiver = plain.receive(1, site.address)
    with pytest.raises(UsageError, match="a node without rows"):
        receiver.bind([0], 4, aux=rows.allocate())
    receiver.bind([0], 4)  # it was not bound by that

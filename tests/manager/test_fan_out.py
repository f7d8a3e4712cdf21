"""Decode ranks that want the same bytes of a chunk: on a device one gather, with a ticket and an end for each of them.

`Device` of test_device.py stands in for a GPU's runtime; the pools are host memory, and every copy is over at once.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from pdstage import State
from pdstage.kernels import Plan
from pdstage.manager.data_path import MAX_TOGETHER, Gathers
from pdstage.protocol.prefill_chunks import Gather
from pdstage.protocol.session import Attach, Detach
from pdstage.transport.local import LocalTransport
from tests.manager import engine
from tests.manager.engine import TOKENS, Event, Rank, drive
from tests.manager.test_device import Device, rank_on


class Room:
    """One prefill rank and `tp` decode ranks, a room whose one chunk every rank holds a lease for, and its gathers."""

    def __init__(
        self,
        site,
        monkeypatch,
        *,
        heads=1,
        tp=4,
        on_device=True,
        dim=16,
        config=engine.QUICK,
        prefixes=(0,) * 4,
        **options,
    ):
        monkeypatch.setattr(engine, "HEADS", heads)
        monkeypatch.setattr(engine, "DIM", dim)
        self.src = rank_on(Device(), monkeypatch) if on_device else Rank()
        self.ranks = [Rank(tp, rank) for rank in range(tp)]
        how = {"path": "staged", "config": config, "staging_nbytes": 8 << 20}
        self.prefill = site.prefill(self.src, **(how | options))
        self.decodes = [site.decode(rank, **how) for rank in self.ranks]
        self.into = [rank.allocate(TOKENS) for rank in self.ranks]
        self.receivers = [decode.receive(1, site.address) for decode in self.decodes]
        self.prefixes = prefixes
        for receiver, pages, prefix in zip(self.receivers, self.into, prefixes, strict=True):
            receiver.bind(pages, TOKENS, prefix_tokens=prefix)
        self.sender, self.ready, self.calls = self.prefill.send(1), Event(), []
        pages = self.src.allocate(TOKENS)
        self.src.write(1, TOKENS, pages)
        self.sender.chunk(pages, TOKENS, ready=self.ready)
        self.sender.finish()
        self.nodes = [self.prefill, *self.decodes]
        drive(self.nodes, lambda: self._held() == tp)
        made = Plan.gather
        monkeypatch.setattr(Plan, "gather", lambda *args, **how: self._call(made, args, how))

    def _held(self) -> int:
        destinations = self.sender.room.destinations.values()
        chunks = [chunk for one in destinations for chunk in one.chunks.values()]
        return sum(chunk.phase.name == "HELD" for chunk in chunks)

    def _call(self, gather, args, how) -> None:
        self.calls.append(1 + len(how["also"]))
        gather(*args, **how)

    def end(self) -> None:
        self.ready.done = True
        drive(self.nodes, lambda: all(one.released for one in (*self.receivers, self.sender)))

    def exact(self) -> list[bool]:
        """Of each rank: whether its room succeeded and every byte is there."""
        return [
            receiver.state is State.SUCCESS and rank.holds(1, TOKENS, pages, prefix)
            for rank, receiver, pages, prefix in zip(self.ranks, self.receivers, self.into, self.prefixes, strict=True)
        ]


@pytest.mark.parametrize("dim", [16, 4096], ids=["small", "large"])
@pytest.mark.parametrize("progress", ["inline", "thread"])
@pytest.mark.parametrize("mapped", [True, False], ids=["leases mapped", "send buffers"])
def test_ranks_that_want_the_same_bytes_are_one_gather(site, monkeypatch, mapped, progress, dim):
    if not mapped:
        monkeypatch.setattr(LocalTransport, "mapped", lambda *_: None)
    room = Room(site, monkeypatch, progress=progress, dim=dim)
    room.end()
    assert room.calls == [4]
    assert room.exact() == [True] * 4
    assert room.prefill.stats()["chunks_staged"] == 4
    assert not room.prefill.core.chunks.flights


@pytest.mark.parametrize(
    ("how", "calls"),
    [
        ({"heads": 2}, [2, 2]),
        ({"heads": 4}, [1] * 4),
        ({"prefixes": (0, 8, 0, 8)}, [2, 2]),
        ({"config": replace(engine.QUICK, checksums=True)}, [4]),
        ({"on_device": False}, [1] * 4),
    ],
    ids=["pairs of heads", "heads", "tokens", "sums", "host memory: each is written before the next"],
)
def test_what_differs_stays_apart(site, monkeypatch, how, calls):
    room = Room(site, monkeypatch, **how)
    room.end()
    assert room.calls == calls
    assert room.exact() == [True] * 4
    assert all(session.checksums == ("config" in how) for session in room.prefill.core.sessions.values())


@pytest.mark.parametrize("what", ["source", "layers", "checksums", "staged", "order", "cut"])
def test_whatever_changes_the_staged_bytes_keeps_gathers_apart(site, monkeypatch, what):
    room = Room(site, monkeypatch)
    path = room.prefill.data_path
    chunks = [next(iter(one.chunks.values())) for one in room.sender.room.destinations.values()][:2]
    begun = [Gather(ticket, ticket, chunk, 0) for ticket, chunk in enumerate(chunks)]
    assert path.joined(begun) == [Gathers(tuple(begun))]
    session, pair = chunks[1].destination.session, path._sessions.plan(chunks[1].destination.session).pair
    match what:
        case "source":  # of another room, say, in other pages
            begun[1] = begun[1]._replace(chunk=replace(chunks[1], source=copy.copy(chunks[1].source)))
        case "layers":
            rects = tuple(rect._replace(layer_stop=rect.layer_stop - 1) for rect in chunks[1].rects)
            begun[1] = begun[1]._replace(chunk=replace(chunks[1], rects=rects))
        case "checksums":
            monkeypatch.setattr(session, "checksums", True)
        case "staged":
            monkeypatch.setattr(session, "staged", session.staged._replace(offered=copy.copy(session.staged.offered)))
        case "order":
            monkeypatch.setattr(pair, "order", "head")
        case "cut":
            monkeypatch.setattr(pair.src, "key", (("kv", 2, 0),))
    assert path.joined(begun) == begun
    monkeypatch.undo()
    room.end()


def test_none_moves_across_a_sessions_beginning_or_end(site, monkeypatch):
    room = Room(site, monkeypatch)
    chunks = [next(iter(one.chunks.values())) for one in room.sender.room.destinations.values()]
    begun = [Gather(ticket, ticket, chunk, 0) for ticket, chunk in enumerate(chunks)]
    ends = [Detach(chunks[0].destination.session), Attach(chunks[3].destination.session, {})]
    joined = room.prefill.data_path.joined
    assert joined(begun[:1]) == begun[:1]
    assert joined([begun[0], ends[0], *begun[1:3], ends[1], begun[3]]) == [
        begun[0], ends[0], Gathers(tuple(begun[1:3])), ends[1], begun[3],
    ]  # fmt: skip
    many = [Gather(ticket, 0, chunks[0], 0) for ticket in range(2 * MAX_TOGETHER + 1)]
    assert joined(many) == [
        Gathers(tuple(many[:MAX_TOGETHER])), Gathers(tuple(many[MAX_TOGETHER:-1])), many[-1],
    ]  # fmt: skip
    room.end()
    assert np.all(room.exact())

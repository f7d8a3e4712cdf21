"""A traced run: real nodes of two prefill ranks and one decode rank, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from pdstage import State
from pdstage.tools.trace import Tracer
from tests.manager.conftest import site
from tests.manager.engine import Rank, drive

__all__ = ["Run", "run", "site"]

TOKENS = 60


class Run:
    """Rooms one after the other, each from two ranks to one; every node with a tracer of its own, as in processes."""

    def __init__(self, nodes, **options) -> None:
        self.tracers = [Tracer() for _ in range(3)]
        self.src, self.dst = [Rank(2, rank) for rank in range(2)], Rank(hnd=True)
        options = {"path": "staged"} | options
        self.prefill = [
            nodes.prefill(rank, observers=(tracer,), **options)
            for rank, tracer in zip(self.src, self.tracers[:2], strict=True)
        ]
        self.decode = nodes.decode(self.dst, observers=self.tracers[2:], **options)
        self.address = nodes.address

    def move(self, room, *, chunks: Sequence[int] = (0, 20, 40, TOKENS)) -> None:
        receiver = self.decode.receive(room, self.address)
        into = self.dst.allocate(TOKENS)
        receiver.bind(into, TOKENS)
        senders = [node.send(room) for node in self.prefill]
        for sender, rank in zip(senders, self.src, strict=True):
            pages = rank.allocate(TOKENS)
            rank.write(1, TOKENS, pages)
            for start, stop in pairwise(chunks):
                sender.chunk(pages, (start, stop))
            sender.finish(aux=b"first token")
            rank.free(pages)  # nobody writes them before the room is over
        nodes = [*self.prefill, self.decode]
        drive(nodes, lambda: all(handle.released for handle in (receiver, *senders)))
        assert receiver.state is State.SUCCESS
        assert self.dst.holds(1, TOKENS, into)
        self.dst.free(into)

    def fail(self, room) -> None:
        receiver = self.decode.receive(room, self.address)
        receiver.bind(self.dst.allocate(8), 8)
        senders = [node.send(room) for node in self.prefill]
        drive([*self.prefill, self.decode], lambda: all(s.state is State.WAITING_FOR_INPUT for s in senders))
        receiver.abort("no longer wanted")
        drive([*self.prefill, self.decode], lambda: all(handle.released for handle in (receiver, *senders)))

    def traces(self):
        return [tracer.trace() for tracer in self.tracers]


@pytest.fixture
def run(site):
    return Run(site)

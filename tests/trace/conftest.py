"""A traced run: real nodes of two prefill ranks and one decode rank, in this process."""

from __future__ import annotations

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
        self.nodes, self.address = (*self.prefill, self.decode), nodes.address

    def _begin(self, room):
        into = self.dst.allocate(TOKENS)
        receiver = self.decode.receive(room, self.address)
        receiver.bind(into, TOKENS)
        return receiver, [node.send(room) for node in self.prefill], into

    def _end(self, *handles) -> None:
        drive(self.nodes, lambda: all(handle.released for handle in handles))

    def move(self, room) -> None:
        receiver, senders, into = self._begin(room)
        for sender, rank in zip(senders, self.src, strict=True):
            pages = rank.allocate(TOKENS)
            rank.write(1, TOKENS, pages)
            for start in range(0, TOKENS, 20):
                sender.chunk(pages, (start, start + 20))
            sender.finish(aux=b"first token")
            rank.free(pages)  # nobody writes them before the room is over
        self._end(receiver, *senders)
        assert receiver.state is State.SUCCESS
        assert self.dst.holds(1, TOKENS, into)
        self.dst.free(into)

    def fail(self, room) -> None:
        receiver, senders, into = self._begin(room)
        drive(self.nodes, lambda: all(sender.state is State.WAITING_FOR_INPUT for sender in senders))
        receiver.abort("no longer wanted")
        self._end(receiver, *senders)
        self.dst.free(into)

    def traces(self):
        return [tracer.trace() for tracer in self.tracers]


@pytest.fixture
def run(site):
    return Run(site)

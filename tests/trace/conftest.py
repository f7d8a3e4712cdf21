"""A traced run: real nodes of a prefill and a decode rank, in this process."""

from __future__ import annotations

import pytest

from pdstage import State
from pdstage.tools.trace import Tracer
from tests.manager.conftest import site
from tests.manager.engine import Pair, Rank, drive

__all__ = ["Run", "run", "site"]

TOKENS = 60


class Run(Pair):
    """Each node has a tracer of its own, as in processes."""

    def __init__(self, nodes, **options) -> None:
        self.tracers = Tracer(), Tracer()
        at_prefill, at_decode = ({"observers": (tracer,)} for tracer in self.tracers)
        made = nodes.pair(dst=Rank(hnd=True), prefill=at_prefill, decode=at_decode, **{"path": "staged"} | options)
        super().__init__(made.p, made.src, made.d, made.dst)

    def move(self, room):
        return super().move(room, TOKENS, cuts=(20, 40))

    def fail(self, room) -> None:
        opened = self.open(room)
        drive(self.nodes, lambda: opened.sender.state is State.WAITING_FOR_INPUT)
        opened.receiver.abort("no longer wanted")
        self.end(opened)

    def traces(self):
        return [tracer.trace() for tracer in self.tracers]


@pytest.fixture
def run(site):
    return Run(site)

"""Nodes that are closed whatever a test does."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from pdstage.control.bootstrap import BootstrapServer
from tests.manager.engine import Pair, Rank, decode_node, drive, prefill_node


class Site:
    """A bootstrap directory, and nodes on it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.address = stack.enter_context(BootstrapServer()).address
        self.nodes = []

    def prefill(self, rank: Rank, **options):
        return self.keep(prefill_node(rank, **({"directory": self.address} | options)))

    def decode(self, rank: Rank, **options):
        return self.keep(decode_node(rank, **options))

    def pair(self, src: Rank | None = None, dst: Rank | None = None, *, prefill=None, decode=None, **both) -> Pair:
        src, dst = src or Rank(), dst or Rank(page=8, hnd=True)
        return Pair(self.prefill(src, **both | (prefill or {})), src, self.decode(dst, **both | (decode or {})), dst)

    def ends(self, *handles) -> None:
        """Gives all nodes turns until nothing touches these rooms' memory any more."""
        drive(self.nodes, lambda: all(handle.released for handle in handles))

    def keep(self, node):
        self.nodes.append(node)
        self._stack.callback(node.close, 0.5)
        return node


@pytest.fixture
def site():
    with ExitStack() as stack:
        yield Site(stack)

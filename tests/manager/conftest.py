"""Nodes that are closed whatever a test does, and whose journals are judged then."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from pdstage.control.bootstrap import BootstrapServer
from pdstage.tools.judge import judge
from tests.manager.engine import Pair, Rank, decode_node, prefill_node


class Site:
    """A bootstrap directory, and nodes on it, which write their journals to `journals` unless a test says otherwise."""

    def __init__(self, stack: ExitStack, journals: Path | None = None) -> None:
        self._stack, self._journals = stack, journals
        self.address = stack.enter_context(BootstrapServer()).address
        self.nodes = []

    def prefill(self, rank: Rank, **options):
        return self.keep(prefill_node(rank, **({"bootstrap": self.address, "journal": self._journals} | options)))

    def decode(self, rank: Rank, **options):
        return self.keep(decode_node(rank, **({"journal": self._journals} | options)))

    def pair(self, src: Rank | None = None, dst: Rank | None = None, *, prefill=None, decode=None, **both) -> Pair:
        src, dst = src or Rank(), dst or Rank(page=8, hnd=True)
        return Pair(self.prefill(src, **both | (prefill or {})), src, self.decode(dst, **both | (decode or {})), dst)

    def keep(self, node):
        self.nodes.append(node)
        self._stack.callback(node.close, 0.5)
        return node


@pytest.fixture
def site(tmp_path_factory):
    journals = tmp_path_factory.mktemp("journals")
    with ExitStack() as stack:
        yield Site(stack, journals)
    wrong = judge([journals]).wrong
    assert not wrong, "\n".join(wrong)

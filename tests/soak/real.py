"""One real node, and real nodes of the other role that come, move real bytes over a real transport, and close."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from pdstage.control.bootstrap import BootstrapServer
from tests.manager.engine import Rank, decode_node, drive, prefill_node
from tests.soak.gauge import Gauge
from tests.soak.star import HASTE

CONFIG = replace(HASTE, hello_s=60.0, max_silence_s=15.0)
"""Its peers are never silent, but on a busy machine. A third of that is how often an idle session is looked at."""
TOKENS = 8


class RealPeers:
    """The node in the middle, and what it held at rest."""

    def __init__(self, role: str, stack: ExitStack, transport: str, **options) -> None:
        self.role, self.transport = role, transport
        self.address = stack.enter_context(BootstrapServer()).address
        self.rank = Rank()
        self.node = stack.enter_context(self._make(role, self.rank, "hub", **options))
        self.n_rooms = 0

    def _make(self, role: str, rank: Rank, instance: str, **options):
        how = {"transport": self.transport, "config": CONFIG, "staging_nbytes": 1 << 16} | options
        if role == "decode":
            return decode_node(rank, **how)
        return prefill_node(rank, self.address, instance=instance, **how)

    def serve(self, n: int) -> None:
        """`n` peers, one after another; every third closes while its session is still warm, the others were let go."""
        other = "prefill" if self.role == "decode" else "decode"
        for number in range(n):
            rank, instance = Rank(), f"peer {self.n_rooms}" if other == "prefill" else "hub"
            with self._make(other, rank, instance) as peer:
                ends = {other: (peer, rank), self.role: (self.node, self.rank)}
                self._move(ends, instance)
                if number % 3:
                    drive([self.node, peer], lambda: not self.node.core.sessions)
            self.node.completions()

    def _move(self, ends: dict, instance: str) -> None:
        """One room from the prefill end to the decode end, every byte of it checked."""
        (src, src_rank), (dst, dst_rank) = ends["prefill"], ends["decode"]
        self.n_rooms += 1
        pages = np.arange(2)
        src_rank.write(self.n_rooms, TOKENS, pages)
        receiver = dst.receive(self.n_rooms, self.address, instance=instance)
        receiver.bind(pages, (0, TOKENS))
        sender = src.send(self.n_rooms)
        sender.chunk(pages, (0, TOKENS))
        sender.finish(aux=b"aux")
        drive([src, dst], lambda: bool(sender.released and receiver.released))
        assert dst_rank.holds(self.n_rooms, TOKENS, pages), receiver.error

    def gauge(self, before: Gauge | None = None) -> Gauge:
        drive(
            [self.node],
            lambda: not (self.node.core.sessions or len(self.node.core.endpoint.timers) or self.node.sessions.lost),
        )
        self.node.directory.forget()
        deadline_at = time.monotonic() + 5
        while (now := Gauge(self.node)) and before is not None and now.grown(before):
            if time.monotonic() > deadline_at:
                break
            self.node.turn(1e-3)
        return now

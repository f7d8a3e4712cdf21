"""Which path a chunk takes, and the plans of the direct one.

Layer 5. Must not know transports: what a session's costs is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.cut import DirectPlans
from pdstage.plan import selects
from pdstage.protocol.outbox import clip

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.cost import CostModel
    from pdstage.cut import Pair
    from pdstage.layout import Layout
    from pdstage.plan import Rect, Stagings
    from pdstage.protocol.outbox import Chunk, Record
    from pdstage.protocol.session import Link

_MAX_PLANS = 1024


class Paths:
    """`path` is "auto", "direct" or "staged", and may be changed between rooms; chunks have at most `chunk_nbytes`."""

    def __init__(
        self,
        path: str,
        cost_of: Callable[[Link], CostModel],
        *,
        layout: Layout,
        stagings: Stagings,
        pair_of: Callable[[Link], Pair],
        chunk_nbytes: int,
    ) -> None:
        self.path, self._cost_of = path, cost_of
        self._layout, self._stagings, self._pair_of, self._chunk_nbytes = layout, stagings, pair_of, chunk_nbytes
        self._plans: dict[tuple[object, ...], DirectPlans] = {}

    def prefers_direct(self, chunk: Chunk) -> bool:
        """By what all of its source's chunks to this destination would cost, so that they go the same way."""
        if self.path != "auto":
            return self.path == "direct"
        record, rects, tokens, nbytes = chunk.record, chunk.rects, chunk.tokens, chunk.nbytes
        n_chunks = 1
        if rects != chunk.source.rects:
            stagings = record.staged_by(self._stagings)
            rects = clip(chunk.source.rects, record, stagings)
            tokens = record.link.common.tokens(rects)
            nbytes = stagings.of(record.shares, rects).nbytes(tokens)
            n_chunks = -(-nbytes // self._chunk_nbytes)
        n_descriptors = self.direct(record, rects).n_descriptors(tokens)
        return self._cost_of(record.link).prefers_direct(nbytes, n_descriptors, n_chunks)

    def direct(self, record: Record, rects: tuple[Rect, ...]) -> DirectPlans:
        layers = ((rect.component, rect.layer_start, rect.layer_stop) for rect in rects)
        key = (record.link, record.shares, *layers)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            pair = self._pair_of(record.link)
            ours, theirs = (selects(layout, record.shares, rects) for layout in (self._layout, record.link.layout))
            plan = self._plans[key] = DirectPlans(pair.src, ours, pair.dst, theirs)
        return plan

    def forget(self, link: Link) -> None:
        """The session is over."""
        for key in [key for key in self._plans if key[0] is link]:
            del self._plans[key]

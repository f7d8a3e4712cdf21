"""The least time that the machine allows for a burst: that of its busiest core or link, if all else hides behind it.

A burst is gathered at prefill, written, and scattered at decode. The steps are measured without the nodes: both sides'
copies at once, since they share the machine's memory, by the nodes' own kernels, piece by piece through staging memory
larger than caches; and one contiguous write of the same bytes. A write takes time of both sides' cores, which copies
cannot use. So a side's core is busy for its copies and its part of the write, and the bound is the longest of the two
sides' cores, of the write, and of all work divided by the cores there are. Over a transport that maps the peer's memory
prefill gathers straight into it, and there is no write.

A side's part of the write is its process's processor time during one, with pauses between its polls, less what it uses
for polling alone.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdstage.plan import Rect, Staging, selects, shares, wire_order
from pdstage.plan.tables import Index
from pdstage.tools.calibrate.pool import allocate

from .shapes import SLOTS

RING_NBYTES = 64 << 20

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pdstage.kernels import Plan, Pool
    from pdstage.layout import Layout


class Costs(NamedTuple):
    """Seconds of a burst: the copies, the contiguous write, and the processor time of the write on both sides."""

    gather_s: float
    send_s: float
    write_s: float
    receive_s: float
    scatter_s: float

    def bound_s(self, n_cores: int) -> float:
        """`n_cores`: that both sides' processes share."""
        src, dst = self.gather_s + self.send_s, self.receive_s + self.scatter_s
        return max(src, dst, self.write_s, (src + dst) / n_cores)

    def __str__(self) -> str:
        return ", ".join(f"{name.removesuffix('_s')} {value * 1e3:.1f} ms" for name, value in self._asdict().items())


class Pieces:
    """The copies of one rank's side of bursts: a plan for each peer and component, and a ring of staging memory."""

    def __init__(
        self, pool: Pool, own: Mapping[int, Layout], theirs: Mapping[int, Layout], *, rank: int, gathers: bool,
        tokens: int, nbytes: int,
    ) -> None:  # fmt: skip
        """`own` and `theirs` are all ranks' layouts. A request has `tokens` tokens; a piece has at most `nbytes`, if it
        has more than one token.
        """
        self._gathers, self._tokens = gathers, tokens
        self._parts: list[tuple[str, Plan, int]] = []
        longest = nbytes
        src, dst = (own, theirs) if gathers else (theirs, own)
        for peer in theirs:
            from_rank, to_rank = (rank, peer) if gathers else (peer, rank)
            order = wire_order(src[from_rank], dst[to_rank])
            owned = shares(src, dst[to_rank], (len(dst), to_rank)).get(from_rank, ())
            for component in pool.layout.components:
                select = selects(pool.layout, owned, [Rect(component.name, 0, 1, 0, 1 << 20)])
                if select:
                    staging = Staging(pool.layout, select)
                    longest = max(longest, staging.nbytes({component.name: (0, 1)}))
                    within = max(1, staging.tokens_within(component.name, nbytes))
                    self._parts.append((component.name, pool.plan(select, order), within))
        self._piece_nbytes, self._n_pieces = longest, max(1, RING_NBYTES // longest)
        self._ring, self._base = allocate(pool.device, longest * self._n_pieces)
        self._next = 0

    def seconds(self, requests: Sequence[tuple[NDArray[np.int64], int]]) -> float:
        """Of all copies of requests, each (pages, slot)."""
        start = time.perf_counter()
        for pages, slot in requests:
            for name, plan, within in self._parts:
                items = {name: Index.of(np.array([slot]) if name == SLOTS else pages)}
                for tokens in self._ranges(name, within):
                    copy = plan.gather if self._gathers else plan.scatter
                    at = self._base + self._next % self._n_pieces * self._piece_nbytes
                    copy(at, self._piece_nbytes, items, {name: tokens})
                    self._next += 1
        if not isinstance(self._ring, np.ndarray):
            import torch  # noqa: PLC0415  (with a GPU)

            torch.cuda.synchronize(self._ring.device)
        return time.perf_counter() - start

    def _ranges(self, name: str, within: int) -> Iterator[tuple[int, int]]:
        if name == SLOTS:
            yield 0, 1
            return
        for first in range(0, self._tokens, within):
            yield first, min(self._tokens, first + within)

"""The prefill server's scheduler: prompts are computed chunk by chunk, several in a step, and handed over as they are.

Layer 6 (demo). Must not know HTTP.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pdstage import State
from pdstage.demo.families import PAGES
from pdstage.demo.serve.blocks import Ledger
from pdstage.demo.serve.compute import Context, Part
from pdstage.demo.serve.nodes import PrefillSide
from pdstage.demo.serve.scheduler import Job, Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.demo.serve.compute import Ranks
    from pdstage.demo.serve.nodes import Said
    from pdstage.demo.serve.options import ServerOptions
    from pdstage.manager.observer import Observer

_PARTS = 8


class PrefillScheduler(Scheduler):
    """A job waits for pages, is computed, and ends when pdstage has moved all of it."""

    def __init__(self, options: ServerOptions, ranks: Ranks, observers: Sequence[Observer] = ()) -> None:
        self._out = PrefillSide(options, ranks.pools, observers)
        super().__init__(options, ranks, self._out, Ledger(ranks.kinds, options.seed, shares=True))
        self._waiting: deque[Job] = deque()
        self._computing: deque[Job] = deque()
        self.n_cached_tokens = 0

    @property
    def address(self) -> str:
        return self._out.address

    def status(self) -> dict[str, object]:
        return super().status() | {"waiting": len(self._waiting), "cached_tokens": self.n_cached_tokens}

    def _open(self, job: Job) -> None:
        job.room = list(self._out.open(job.key))
        self._waiting.append(job)

    def _on_said(self, job: Job, said: Said) -> None:
        if said.state is State.FAILED:
            self._fail(job, self._out.error_of(job.room))
        elif said.state is State.SUCCESS:
            self._end(job, "stop")

    def _admit(self) -> None:
        """Whole prompts: what was begun can be computed to its end without another room's pages."""
        while self._waiting and len(self._computing) < self.options.max_running:
            job = self._waiting[0]
            prompt = job.asked.prompt
            admitted = self.ledger.admit(prompt)
            if admitted is None:
                return
            self._waiting.popleft()
            tables, cached = admitted
            job.context = Context(tables, list(prompt), len(prompt), held=cached)
            self._computing.append(job)
            if cached:
                self.n_cached_tokens += cached
                kept = {name: (0, cached) for name, kind in self.ledger.kinds.items() if kind.kept == PAGES}
                self._out.chunk(job.room, tables, kept)

    def _step(self) -> bool:
        """A chunk of each of the first few prompts; who had one goes to the end of the line."""
        jobs = [self._computing.popleft() for _ in range(min(_PARTS, len(self._computing)))]
        parts = []
        for job in jobs:
            assert job.context is not None
            start = job.context.held
            parts.append(Part(job.context, start, min(start + self.options.chunk_tokens, job.context.n_prompt)))
        if not parts:
            return False
        for job, part, computed in zip(jobs, parts, self.ranks.prefill(parts), strict=True):
            context = part.context
            context.held = part.stop
            self.ledger.learn(context.room, context.tokens, part.stop)
            self._out.chunk(job.room, context.room, computed.spans)
            if part.stop == context.n_prompt:
                self._out.finish(job.room, computed.token)
                context.cache = None
            else:
                self._computing.append(job)
        return True

    def _forget(self, job: Job) -> None:
        for line in (self._waiting, self._computing):
            if job in line:
                line.remove(job)

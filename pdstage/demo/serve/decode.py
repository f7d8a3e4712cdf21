"""The decode server's scheduler: rooms get pages, come, and are continued together, a token each in a step.

Layer 6 (demo). Must not know HTTP. Of a prompt it uses the length only: all else it knows of it came through pdstage.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pdstage import State
from pdstage.demo.serve.blocks import Ledger
from pdstage.demo.serve.compute import Context
from pdstage.demo.serve.nodes import DecodeSide
from pdstage.demo.serve.scheduler import Job, Piece, Scheduler
from pdstage.demo.serve.text import EOS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.demo.serve.compute import Ranks
    from pdstage.demo.serve.nodes import Said
    from pdstage.demo.serve.options import ServerOptions
    from pdstage.manager.observer import Observer


class DecodeScheduler(Scheduler):
    """A job is announced at once, gets pages when there are some, comes, and runs until its answer ends.

    Pages for the longest request are kept back for rooms that prefill has computed: prefill servers with full pools
    wait for those, and could otherwise wait for rooms that wait for them.
    """

    def __init__(self, options: ServerOptions, ranks: Ranks, observers: Sequence[Observer] = ()) -> None:
        self._in = DecodeSide(options, ranks.pools, observers)
        super().__init__(options, ranks, self._in, Ledger(ranks.kinds, options.seed + 1, shares=False))
        self._waiting: deque[Job] = deque()
        self._running: deque[Job] = deque()
        self._reserve = self.ledger.needs(options.max_model_len)

    def status(self) -> dict[str, object]:
        return super().status() | {"waiting": len(self._waiting), "running": len(self._running)}

    def _open(self, job: Job) -> None:
        job.room = list(self._in.announce(job.key, job.prefill, self.options.listening.timeout_s))
        self._waiting.append(job)

    def _on_said(self, job: Job, said: Said) -> None:
        if said.state is State.FAILED:
            self._fail(job, self._in.error_of(job.room))
        elif said.state is State.SUCCESS and job.context is not None and not job.context.tokens:
            self._begin(job, job.context)

    def _begin(self, job: Job, context: Context) -> None:
        first = self._in.token(job.room)
        context.tokens = [0] * context.n_prompt
        self.ranks.adopt(context)
        self._running.append(job)
        self._say(job, context, first)

    def _admit(self) -> None:
        """First who is computed, from all pages; then the others, in their order, from all but the reserve."""
        for job in [job for job in self._waiting if self._in.is_computed(job.room)]:
            if not self._place(job, {}):
                return
        while self._waiting and self._place(self._waiting[0], self._reserve):
            pass

    def _place(self, job: Job, reserve: dict[str, int]) -> bool:
        n_prompt, room_for = len(job.asked.prompt), job.asked.max_tokens - 1
        needs = self.ledger.needs(n_prompt, room_for)
        admitted = self.ledger.admit(job.asked.prompt, room_for) if self.ledger.has(needs, reserve) else None
        if admitted is None:
            return False
        job.context = Context(admitted[0], [], n_prompt)
        self._in.bind(job.room, job.context.room)
        self._waiting.remove(job)
        return True

    def _step(self) -> bool:
        """One token of each of the next few; who had one goes to the end of the line."""
        jobs = [self._running.popleft() for _ in range(min(self.options.max_running, len(self._running)))]
        contexts = [job.context for job in jobs if job.context is not None]
        if not contexts:
            return False
        self._running.extend(jobs)
        for job, context, token in zip(jobs, contexts, self.ranks.decode(contexts), strict=True):
            self._say(job, context, token)
        return True

    def _say(self, job: Job, context: Context, token: int) -> None:
        """Adds `token` to the answer, and ends it if that was its last."""
        context.tokens.append(token)
        asked, text = job.asked, job.text
        if token == EOS and not asked.ignore_eos:
            shown, reason = text.end(), "stop"
        else:
            shown = text.add(token)
            reason = "stop" if text.stopped else ""
            if not reason and len(context.tokens) - context.n_prompt == asked.max_tokens:
                shown, reason = shown + text.end(), "length"
        job.tell(Piece(shown, 1))
        if reason:
            self._forget(job)
            context.cache = None
            self._end(job, reason)

    def _forget(self, job: Job) -> None:
        for line in (self._waiting, self._running):
            if job in line:
                line.remove(job)

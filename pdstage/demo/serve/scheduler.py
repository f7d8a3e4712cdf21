"""The loop of a server: takes requests, polls its rooms, admits, computes a step, tells who waits.

Layer 6 (demo). Must not know HTTP, nor which role it has: `prefill` and `decode` do. It has a thread of its own; the
HTTP side talks to it through `submit` and `cancel`, and hears through each job's `tell`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pdstage.demo.serve.text import Growing
from pdstage.errors import Aborted, PdstageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.demo.serve.api import Asked
    from pdstage.demo.serve.blocks import Ledger
    from pdstage.demo.serve.compute import Context, Ranks
    from pdstage.demo.serve.nodes import DecodeSide, PrefillSide, Said
    from pdstage.demo.serve.options import ServerOptions

log = logging.getLogger("pdstage.demo.serve")

# Between two looks at the nodes when there is nothing to compute: with rooms under way, and without any.
NAP_S, IDLE_S = 0.002, 0.02
STOP_S = 10.0


class Piece(NamedTuple):
    """More of an answer: `n_tokens` more, of which `text` may be shown."""

    text: str
    n_tokens: int


class Ended(NamedTuple):
    """A job's last word: `reason` as OpenAI names it, or why it failed."""

    reason: str = ""
    error: PdstageError | None = None


Event: TypeAlias = "Piece | Ended"


@dataclass(slots=True, eq=False)
class Job:
    """One request at one server. `prefill` is the directory that decode finds the other side by.

    `room` is pdstage's, on all ranks; `context` what is computed, once the job is admitted.
    """

    key: str
    asked: Asked
    tell: Callable[[Event], None]
    prefill: str = ""
    room: list[Any] = field(default_factory=list)
    context: Context | None = None
    text: Growing = field(default_factory=Growing)
    is_over: bool = False

    def end(self, reason: str = "", error: PdstageError | None = None) -> None:
        """Tells who waits, once."""
        if not self.is_over:
            self.is_over = True
            self.tell(Ended(reason, error))


class Scheduler(ABC):
    """One server's. `leaving` are jobs that ended, but whose pages a peer may still touch."""

    def __init__(self, options: ServerOptions, ranks: Ranks, side: PrefillSide | DecodeSide, ledger: Ledger) -> None:
        self.options, self.ranks, self.ledger = options, ranks, ledger
        self._side = side
        self.jobs: dict[str, Job] = {}
        self.leaving: list[Job] = []
        self._calls: queue.SimpleQueue[tuple[Callable[[Job], None], Job] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"{options.role}-scheduler", daemon=True)
        self.failure: BaseException | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self.n_done = self.n_failed = 0

    # What the HTTP side calls, from its own thread.

    def start(self, on_failure: Callable[[], None]) -> None:
        """`on_failure` is called, on the scheduler's thread, if that ends by an error."""
        self._on_failure = on_failure
        self._thread.start()

    def submit(self, job: Job) -> None:
        if self.failure is not None:
            job.end(error=_failed(self.failure))
        self._calls.put((self._take, job))

    def cancel(self, job: Job) -> None:
        """Nobody waits for `job` any more: it ends here and at the other side."""
        self._calls.put((self._on_cancel, job))

    def stop(self) -> None:
        """Ends the thread once all rooms are released, or are not after a while; then the nodes."""
        self._calls.put(None)
        self._thread.join()

    def status(self) -> dict[str, object]:
        """For people and tests; a snapshot that nobody holds still."""
        blocks = self.ledger.blocks
        return {
            "jobs": len(self.jobs),
            "leaving": len(self.leaving),
            "done": self.n_done,
            "failed": self.n_failed,
            "pages": {name: kind.n_items for name, kind in self.ledger.kinds.items()},
            "pages_available": {name: held.available for name, held in blocks.items()},
            "pages_kept": {name: held.n_kept for name, held in blocks.items()},
            "pages_evicted": {name: held.evicted for name, held in blocks.items()},
            "pdstage": self._side.stats(),
        }

    # The loop.

    def _run(self) -> None:
        try:
            busy = False
            while self._take_calls(busy):
                self._poll()
                self._admit()
                busy = self._step()
            self._leave()
        except BaseException as error:  # the server ends by it: see `on_failure`
            self.failure = error
            log.exception("the scheduler of the %s server failed", self.options.role)
            while not self._calls.empty():
                if (call := self._calls.get()) is not None:
                    call[1].end(error=_failed(error))
            for job in list(self.jobs.values()):
                job.end(error=_failed(error))
            self._on_failure()
        finally:
            self._side.close()

    def _take_calls(self, busy: bool) -> bool:
        """Carries out what was asked, waiting a moment for the first of it unless `busy`; False to stop."""
        wait_s = NAP_S if self.jobs or self.leaving else IDLE_S
        try:
            call = self._calls.get_nowait() if busy else self._calls.get(timeout=wait_s)
            while call is not None:
                carry_out, job = call
                carry_out(job)
                call = self._calls.get_nowait()
        except queue.Empty:
            return True
        return False

    def _leave(self) -> None:
        for job in list(self.jobs.values()):
            self._fail(job, Aborted("the server is going"))
        deadline_at = time.monotonic() + STOP_S
        while self.leaving and time.monotonic() < deadline_at:
            self._poll()
            time.sleep(NAP_S)

    def _take(self, job: Job) -> None:
        if len(self.jobs) >= self.options.max_waiting + self.options.max_running:
            job.end(error=Overloaded(f"{len(self.jobs)} requests are here already", remedy="try again later"))
            return
        if job.key in self.jobs:
            job.end(error=UsageError(f"room {job.key!r} is here already", remedy="use a new one for each request"))
            return
        try:
            self._open(job)
        except PdstageError as error:
            job.end(error=error)
            return
        self.jobs[job.key] = job

    def _poll(self) -> None:
        """What pdstage says of all rooms; pages are given back here, and nowhere else."""
        jobs = [*self.jobs.values(), *self.leaving]
        for job, said in zip(jobs, self._side.poll([job.room for job in jobs]), strict=True):
            if job.key in self.jobs and self.jobs[job.key] is job:
                self._on_said(job, said)
            elif said.released:
                self.leaving.remove(job)
                if job.context is not None:
                    self.ledger.free(job.context.room)
                    job.context = None

    def _end(self, job: Job, reason: str) -> None:
        """The job is done; its pages follow when nothing touches them."""
        del self.jobs[job.key]
        self.leaving.append(job)
        self.n_done += 1
        job.end(reason)

    def _on_cancel(self, job: Job) -> None:
        self._fail(job, Aborted("the client went away"))

    def _fail(self, job: Job, error: PdstageError) -> None:
        if self.jobs.get(job.key) is not job:
            return  # it ended meanwhile
        self._forget(job)
        del self.jobs[job.key]
        self.leaving.append(job)
        self.n_failed += 1
        self._side.abort(job.room, error.what)
        job.end(error=error)

    # What the roles say.

    @abstractmethod
    def _open(self, job: Job) -> None:
        """A new job: names its room to pdstage, and puts it in the queue. Raises `PdstageError`."""

    @abstractmethod
    def _on_said(self, job: Job, said: Said) -> None:
        """How the room of a job that has not ended stands now."""

    @abstractmethod
    def _admit(self) -> None:
        """Gives pages to as many waiting jobs as there are pages for, in their order."""

    @abstractmethod
    def _step(self) -> bool:
        """Computes one step of what is admitted; whether there was anything."""

    @abstractmethod
    def _forget(self, job: Job) -> None:
        """The job is not to be admitted or computed any more."""


class Overloaded(PdstageError):
    """More requests than this server takes."""


def _failed(cause: BaseException) -> PdstageError:
    return PdstageError(f"the server failed: {cause!r}", remedy="see its log")

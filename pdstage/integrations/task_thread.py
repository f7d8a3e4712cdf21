"""A thread for work that a worker's step must not wait for.

It makes calls to nodes. The node's own thread may hold the node's lock for milliseconds, and a call to a node sends its
messages itself. The forward pass must wait for neither.

Waking this thread must not cost the worker its processor either. If all processors are busy, a waking thread preempts a
running one, often the one that woke it, for milliseconds. Under Linux's SCHED_BATCH it does not (sched(7)).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_LOOK_S = 0.1
"""How often a waiting caller checks whether an earlier call raised and ended the thread."""


class TaskThread:
    """Makes calls one at a time, in order. A call that raises ends the thread, and later calls are not made."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Queues `task`, and returns at once."""
        self._tasks.put(task)

    def run(self, task: Callable[[], None]) -> None:
        """Queues `task`, and returns once it was called. Raises what it or an earlier call raised."""
        ended: queue.SimpleQueue[None] = queue.SimpleQueue()

        def last() -> None:
            task()
            ended.put(None)

        self.put(last)
        while True:
            self.check()
            with contextlib.suppress(queue.Empty):
                return ended.get(timeout=_LOOK_S)

    def check(self) -> None:
        """Raises the error of an earlier call."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Makes the calls that are queued, then ends."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # only Linux has it, and a sandbox may refuse it
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # 0: this thread
        try:
            while (task := self._tasks.get()) is not None:
                task()
        except Exception as error:
            log.exception("a task of a worker's step failed")
            self._failure = error

"""A thread for what a worker's step must not wait for.

It is given calls. A node's lock may be held for milliseconds by the node's own thread, and a call to a node sends its
messages itself; neither is the forward pass's to wait for.

Nor must waking this thread cost the worker's its processor: where all are busy, a thread that wakes takes one from
whoever runs there, and that is often who woke it: milliseconds. Under Linux's SCHED_BATCH it does not (sched(7)).
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
"""How often one who waits looks whether an earlier call raised, and ended the thread."""


class TaskThread:
    """Makes calls one at a time, in the order they were put. One that raises ends it: no later one is made."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Has `task` called soon, and returns at once."""
        self._tasks.put(task)

    def run(self, task: Callable[[], None]) -> None:
        """Has `task` called after those that were put before, and returns once it was. Raises what any of them
        raised.
        """
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
        """Raises what a call raised."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Makes the calls that were put before, then ends."""
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
            log.exception("a worker's step was not carried out")
            self._failure = error

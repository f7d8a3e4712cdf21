"""The thread that makes large host copies, so that the driver can write one chunk while the next is gathered.

Layer 5. Must not know what it runs.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Copier:
    """Runs functions in the order given, in a daemon thread that starts with the first; calls `wake` after each."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pdstage-copier", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """Ends the thread once everything submitted has run: until then the memory is in use."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            self._wake()

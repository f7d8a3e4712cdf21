"""Stops a process, so that nothing of it runs any more when that is said."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_STOPS_S = 240.0


def stop(pid: int) -> None:
    """Until SIGCONT. The thread that takes the signal stops the others: on a busy machine they run on for a while."""
    os.kill(pid, signal.SIGSTOP)
    deadline_at = time.monotonic() + _STOPS_S
    while any(_state(task) not in "TZX" for task in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < deadline_at, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    """One letter, as proc(5) has it: T is stopped, and who has ended does not run either."""
    try:
        return task.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"

"""Runs a probe in another process, so that a crash or hang harms only that process.

`probes` holds them by name. A probe writes lines of JSON to a pipe, so that output of libraries does not mix with them:
its current step, its findings, and at the end that it is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

_TAIL_NBYTES = 2000

End = Literal["done", "failed", "crashed", "hung", "crashed at exit"]


@dataclass(slots=True)
class Outcome:
    """How a probe ended, at which step, and what it had found by then.

    "failed": it gave a reason, in `why` and `remedy`. "crashed at exit": it was done, and then died or did not end.
    """

    end: End = "crashed"
    step: str = "start"
    facts: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    remedy: str = ""
    printed: str = ""
    """The last lines of its stderr."""

    @property
    def good(self) -> bool:
        return self.end in ("done", "crashed at exit")


class Children:
    """The probes in progress; `close` ends those that are left, whichever thread waits for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def ask(
        self, probe: str, given: Mapping[str, object], *, deadline_s: float, environment: Mapping[str, str]
    ) -> Outcome:
        """Runs a probe to its end, or ends it and everything it started after `deadline_s`."""
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "pdstage.tools.doctor.probes", str(writing), probe, json.dumps(given)]
        with tempfile.TemporaryFile() as errors, os.fdopen(reading, "rb", buffering=0) as said:
            try:
                child = self._start(command, writing, errors.fileno(), {**os.environ, **environment})
            finally:
                os.close(writing)
            outcome = Outcome()
            try:
                hung = not _listen(said.fileno(), outcome, time.monotonic() + deadline_s)
                hung = hung or not _ends(child, deadline_s)
            finally:
                self._end(child)
            _judge(outcome, child.returncode, hung=hung, deadline_s=deadline_s)
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _TAIL_NBYTES))
            outcome.printed = errors.read().decode(errors="replace").strip()
        return outcome

    def _start(
        self, command: list[str], writing: int, errors: int, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise InterruptedError("the doctor was ended")
            child = subprocess.Popen(
                command, pass_fds=[writing], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
                env=environment, start_new_session=True,
            )  # fmt: skip
            self._running.add(child)
        return child

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        """Ends the probe's whole session: it may have started other processes."""
        with self._lock:
            self._running.discard(child)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for child in self._running:
                os.killpg(child.pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listen(said: int, outcome: Outcome, until: float) -> bool:
    """Reads the probe's lines until it closes the pipe or reports its end; False if the time ran out first."""
    waiting, held = select.poll(), b""
    waiting.register(said, select.POLLIN)
    while True:
        if not waiting.poll(max(0.0, until - time.monotonic()) * 1e3):
            return False
        data = os.read(said, 1 << 16)
        if not data:
            return True
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            _take(outcome, json.loads(line))
        if outcome.end != "crashed":  # it reported its end; another process may hold the pipe open
            return True


def _take(outcome: Outcome, line: dict[str, Any]) -> None:
    outcome.step = line.get("step", outcome.step)
    outcome.facts.update(line.get("facts", {}))
    if "end" in line:
        outcome.end, outcome.why, outcome.remedy = line["end"], line.get("why", ""), line.get("remedy", "")


def _ends(child: subprocess.Popen[bytes], deadline_s: float) -> bool:
    """Whether it ends in time. It is not reaped yet, so that its pid is not reused."""
    pidfd = os.pidfd_open(child.pid)
    try:
        waiting = select.poll()
        waiting.register(pidfd, select.POLLIN)
        return bool(waiting.poll(deadline_s * 1e3))
    finally:
        os.close(pidfd)


def _judge(outcome: Outcome, code: int, *, hung: bool, deadline_s: float) -> None:
    if outcome.end == "done" and (hung or code < 0):
        how = f"did not end within {deadline_s:g} s" if hung else f"died of {_name(-code)} at exit"
        outcome.why, outcome.end = f"its process {how}", "crashed at exit"
    elif hung and outcome.end == "crashed":
        outcome.why, outcome.end = f"did not answer within {deadline_s:g} s, at {outcome.step}", "hung"
    elif outcome.end == "crashed":
        how = f"died of {_name(-code)}" if code < 0 else f"ended with exit code {code}"
        outcome.why = f"its process {how} at {outcome.step}{f' ({outcome.why})' if outcome.why else ''}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""Processes that serve HTTP: started, waited for, killed, restarted, and ended, with their logs kept.

A server is a process group of its own, so that its workers end with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from tests.processes import die_with_parent, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

UP_S = 900.0
"""How long a server may take to be up: many start at once on few cores."""


def name_of(engine: Any) -> str:
    """A dataclass by its fields that are not as usual: fit for a file's name."""
    own = [f"{one.name} {value}" for one in fields(engine) if (value := getattr(engine, one.name)) != one.default]
    return re.sub(r"[^\w.]+", "-", " ".join(own or ["usual"])).strip("-")


@dataclass
class Server:
    """One server. `command` is made for a port, anew at each start; `log` grows over all of its lives."""

    name: str
    command: Callable[[int], list[str]]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    ready: str = "/health"
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    was_up: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Server:
        """Starts it; `wait` says when it serves. The port stays the same over all of its lives."""
        assert self.process is None, f"{self.name} runs"
        self.port = self.port or free_port()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(self.port),
                env=os.environ | self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=self.log.parent,  # not the repository, whose kernels/ is not the package of that name
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),  # noqa: PLW1509  (started by the only thread)
            )
        self.was_up = False
        return self

    def wait(self) -> Server:
        """Waits until it answers `ready` with 200. Raises AssertionError, with the log's end, if it dies or is late."""
        end = time.monotonic() + UP_S
        while not self.was_up:
            assert self.process is not None, f"{self.name} was not started"
            if self.process.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self.process.returncode} at start\n{self.tail()}")
            if time.monotonic() > end:
                raise AssertionError(f"{self.name} is not up after {UP_S:.0f} s\n{self.tail()}")
            with contextlib.suppress(OSError):  # HTTPError and refused connections are one
                urllib.request.urlopen(self.url + self.ready, timeout=5).close()
                self.was_up = True
                break
            time.sleep(0.25)
        return self

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """Ends all of its processes at once, as a dying host does."""
        self._end(signal.SIGKILL)

    def stop(self, deadline_s: float = 30.0) -> bool:
        """Asks it to end, and kills what is left after the deadline. Whether it had ended by then."""
        process = self.process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(deadline_s)
        ended = process is None or process.poll() is not None
        self._end(signal.SIGKILL)
        return ended

    def restart(self) -> Server:
        """Kills it and starts it at the same port."""
        self.kill()
        return self.start()

    def _end(self, how: signal.Signals) -> None:
        process, self.process, self.was_up = self.process, None, False
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        process.wait()

    def tail(self, n_lines: int = 60) -> str:
        """The end of its log, with lines of errors first: an engine's own reason is above its traceback's end."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        errors = [line for line in lines if "Error" in line or "ERROR" in line][-20:]
        shown = [f"--- {self.log}: errors", *errors, f"--- {self.log}: end", *lines[-n_lines:]]
        return "\n".join(shown)

    def says(self, words: str) -> bool:
        """Whether its log has `words`."""
        return words in self.log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        """Its /metrics: each sample's sum over labels, by name."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as answer:
            text = answer.read().decode()
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if "le" not in sample.labels:
                    sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    def post(self, path: str) -> None:
        """An empty POST that must answer 200."""
        urllib.request.urlopen(urllib.request.Request(self.url + path, method="POST"), timeout=60).close()


def up(servers: Iterable[Server]) -> None:
    """Starts those that do not run, all at once, and waits for all."""
    wanted = list(servers)
    for one in wanted:
        if not one.runs:
            one.process = None
            one.start()
    for one in wanted:
        one.wait()


def wait_until(true: Callable[[], object], deadline_s: float, *, every_s: float = 0.2) -> bool:
    """Asks again and again, until the deadline, and says whether `true` came true."""
    end = time.monotonic() + deadline_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(every_s)
    return True

"""One rank as its supervisor sees it: the process, what it said, and how it is ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests import processes

_ROOT = Path(__file__).resolve().parents[2]
_ENDS_S = 60.0
CONFIG = {"hello_s": 60.0, "open_s": 30.0, "transfer_s": 60.0, "drain_s": 20.0, "max_silence_s": 10.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank is. `where` is its network namespace and `fabric` its UCX_TLS, if any."""

    role: str
    tp: int = 1
    rank: int = 0
    instance: str = ""
    directory: str = ""
    transport: str = "local"
    path: str = "auto"
    page: int = 16
    hnd: bool = False
    layers: int = 2
    hybrid: bool = True
    tokens: int = 4096
    staging_nbytes: int = 1 << 20
    progress: str = "inline"
    turn_s: float = 0.002
    host: str = "127.0.0.1"
    port: int = 0
    where: str = ""
    fabric: str = ""
    keys: str | None = None
    journals: str | None = None
    room_s: float = 120.0
    close_s: float = 20.0
    config: dict[str, float] = field(default_factory=lambda: dict(CONFIG))


class Member:
    """A process that runs `job`; its last words go to `log`."""

    def __init__(self, job: Job, log: Path) -> None:
        self.job, self.log = job, log
        self.endpoint = self.directory = ""
        self.state = "starting"
        self._up_at = 0.0
        self.report: dict | None = None
        self.closed: dict | None = None
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.fleet.rank", json.dumps(asdict(job))]
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=_ROOT
            )
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._tail = b""

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def order(self, what: str, **fields: object) -> None:
        """Lost if it is dead: `hear` will learn that."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write((json.dumps({"do": what, **fields}) + "\n").encode())
            self.process.stdin.flush()

    def hear(self) -> Iterator[dict]:
        """What it has said since; the last is `gone`, with its exit code, once it has ended."""
        assert self.process.stdout is not None
        while (data := self.process.stdout.read(1 << 16)) is not None:
            if not data:
                break
            self._tail += data
        *lines, self._tail = self._tail.split(b"\n")
        for line in lines:
            yield self._note(json.loads(line))
        if data == b"" and self.state != "gone":
            self.state = "gone"
            yield {"say": "gone", "code": self.process.wait(_ENDS_S)}

    def _note(self, said: dict) -> dict:
        match said["say"]:
            case "up":
                self.endpoint, self.directory = said["endpoint"], said["directory"]
                self.state, self._up_at = "up", time.monotonic()
            case "report":
                self.report = said
            case "closed":
                self.closed = said
        return said

    @property
    def age_s(self) -> float:
        """Since it said that it is up."""
        return time.monotonic() - self._up_at

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    def stop(self) -> None:
        processes.stop(self.process.pid)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        """Whatever its state; nothing is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

"""One rank as the supervisor sees it: its process now, and those before."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from dataclasses import replace
from multiprocessing.connection import Connection

from tests import processes
from tests.chaos.rank import Job, run

multiprocessing.set_forkserver_preload(["tests.chaos.rank", "nixl._api"])
_ENDS_S = 20.0
_UCX_ABORT = "stubs.c:107  Assertion `0' failed"


class Member:
    """`state`: down, starting, up, stopped, closing. Everything it says is read by `hear`."""

    def __init__(self, job: Job) -> None:
        self.job, self.name = job, f"{job.engine.name} {job.rank}"
        self.state = "down"
        self.busy = self.rests = False
        """A fault is being done to it; no room is sent to it."""
        self.life = -1
        self.endpoint = ""
        self.last_report: dict = {}
        self._asked = False
        self.closed: tuple | None = None
        self.pids: list[int] = []
        self._process = None
        self._n_ucx_aborts = 0
        self.pipe: Connection | None = None

    def start(self, *, same_port: bool = True) -> None:
        assert self.state == "down"
        self.life += 1
        port = int(self.endpoint.rpartition(":")[2]) if same_port and self.endpoint else 0
        job = replace(self.job, life=self.life, port=port)
        self._process, self.pipe = processes.child(run, job)
        self.state, self.closed, self.last_report, self._asked = "starting", None, {}, False
        self.busy = False
        self.pids.append(self._process.pid)

    @property
    def serves(self) -> bool:
        """As far as a router can tell."""
        return self.state in ("up", "stopped") and not self.rests

    @property
    def alive(self) -> bool:
        return self.state != "down"

    def send(self, kind: str, value: object = None) -> None:
        with contextlib.suppress(OSError):  # it is dead: `hear` will learn it
            self.pipe.send((kind, value))

    def hear(self) -> list[tuple[str, object]]:
        """What it has said; last ("gone", exit code) if it ended by itself."""
        said: list[tuple[str, object]] = []
        while self.pipe is not None:
            try:
                if not self.pipe.poll():
                    break
                kind, value = self.pipe.recv()
            except (EOFError, OSError):
                said.append(("gone", self._reap()))
                break
            if kind == "ready":
                self.endpoint = value
                self.state = "up" if self.state == "starting" else self.state
            elif kind == "report":
                self.last_report, self._asked = value | {"life": self.life}, False
            elif kind == "closed":
                self.closed = value
            said.append((kind, value))
        return said

    def stop(self) -> None:
        processes.stop(self.pids[-1])
        self.state = "stopped"

    def resume(self) -> None:
        os.kill(self.pids[-1], signal.SIGCONT)
        self.state = "up"

    def was_aborted_by_ucx(self) -> bool:
        """Whether its last life ended in an assertion of UCX that nothing here can prevent (docs/transports.md)."""
        before, self._n_ucx_aborts = self._n_ucx_aborts, self.job.log.read_text(errors="replace").count(_UCX_ABORT)
        return self._n_ucx_aborts > before

    def kill(self) -> list[tuple[str, object]]:
        """What it had still said."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[-1], signal.SIGKILL)
        self._process.join(_ENDS_S)
        return [said for said in self.hear() if said[0] != "gone"]

    def close(self) -> None:
        self.send("close")
        self.state, self.rests = "closing", False

    def ask(self) -> None:
        """For a report; asked once until it came."""
        if self.state == "up" and not self._asked:
            self._asked = True
            self.send("report")

    def _reap(self) -> int | None:
        self._process.join(_ENDS_S)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
        self._process.close()
        self.pipe.close()
        self.pipe, self.state, self.rests = None, "down", False
        return code

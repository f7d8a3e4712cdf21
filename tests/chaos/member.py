"""One rank as the supervisor sees it: its process now, and those before."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from tests import processes
from tests.chaos import account, network, worker

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.chaos.worker", "nixl._api"])
_ENDS_S = 20.0
_UCX_ABORT = "stubs.c:107  Assertion `0' failed"


class Member:
    """`state`: down, starting, up, stopped, closing. Everything it says is read by `hear`."""

    def __init__(self, job: worker.Job) -> None:
        self.job, self.name = job, job.name
        self.state = "down"
        self.closing_since = 0.0
        self.busy = False
        """A fault is being done to it."""
        self.life = -1
        self.pid = 0
        self.port = 0
        self.fds_at_start = 0
        self.last_report: dict = {}
        self._asked = False
        self.closed: tuple | None = None
        self.pids: list[int] = []
        self.shm: set[str] = set()
        self._process = None
        self._n_ucx_aborts = 0
        self.pipe: Connection | None = None

    def start(self, *, same_port: bool = True) -> None:
        assert self.state == "down"
        self.life += 1
        job = replace(self.job, life=self.life, port=self.port if same_port else 0)
        self.pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=worker.run, args=(job, theirs), name=self.name, daemon=True)
        self._process.start()
        theirs.close()
        self.state, self.closed, self.last_report, self._asked = "starting", None, {}, False
        self.pids.append(self._process.pid)
        self.pid = self._process.pid

    @property
    def serves(self) -> bool:
        """As far as a router can tell."""
        return self.state in ("up", "stopped")

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
                _, self.port, self.fds_at_start = value
                self.state = "up" if self.state == "starting" else self.state
            elif kind == "report":
                self.last_report, self._asked = value | {"life": self.life}, False
                self.shm |= value["shm"]
            elif kind == "closed":
                self.closed = value
            said.append((kind, value))
        return said

    def stop(self) -> None:
        processes.stop(self.pid)
        self.state = "stopped"

    def was_aborted_by_ucx(self) -> bool:
        """Whether its last life ended in an assertion of UCX that nothing here can prevent (docs/transports.md)."""
        before, self._n_ucx_aborts = self._n_ucx_aborts, self._log().count(_UCX_ABORT)
        return self._n_ucx_aborts > before

    def _log(self) -> str:
        return self.job.log.read_text(errors="replace") if self.job.log.exists() else ""

    def show_stacks(self) -> None:
        """Its log gets what each of its threads does."""
        if self.state == "up":
            os.kill(self.pid, signal.SIGUSR1)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.state = "up"

    def kill(self) -> list[tuple[str, object]]:
        """What it had still said."""
        self.shm |= account.shared_memory(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.join(_ENDS_S)
        return [said for said in self.hear() if said[0] != "gone"]

    def close(self) -> None:
        self.send("close")
        self.state, self.closing_since = "closing", time.monotonic()

    def ask(self) -> None:
        """For a report; asked once until it came."""
        if self.state == "up" and not self._asked:
            self._asked = True
            self.send("report")

    def _reap(self) -> int | None:
        self._process.join(_ENDS_S)
        code = self._process.exitcode
        if code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._process.join()
        self._process.close()
        self.pipe.close()
        self.pipe, self.state, self.busy = None, "down", False
        return code

    def end(self) -> None:
        """Whatever its state."""
        if self.alive:
            self.kill()


class Directory:
    """The bootstrap's process, in the hub's namespace if there is one."""

    def __init__(self, net: network.Namespaces | network.SameNetwork) -> None:
        self.pipe, theirs = _context.Pipe()
        proxied = isinstance(net, network.SameNetwork)
        args = (net.where("hub"), net.host("hub"), proxied, theirs)
        self._process = _context.Process(target=_directory, args=args, daemon=True)
        self._process.start()
        self.pid = self._process.pid
        theirs.close()
        if not self.pipe.poll(30):
            raise TimeoutError("the directory did not start")
        self.address: str = self.pipe.recv()
        if isinstance(net, network.SameNetwork):
            net.pipe = self.pipe

    def close(self) -> None:
        self.pipe.close()
        self._process.join(_ENDS_S)
        self._process.kill()
        self._process.join()


def _directory(*args) -> None:
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    network.serve_directory(*args)


def left_behind(pids: list[int]) -> list[str]:
    """Processes of ours that are still there, zombies included. The forkserver reaps them: it is given a moment."""
    until = time.monotonic() + 5.0
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in pids):
        threading.Event().wait(0.01)
    return [f"process {pid} is left behind" for pid in pids if Path(f"/proc/{pid}").exists()]

"""`pdstage serve all`: servers and router as child processes, started again when they die, ended together.

Layer 6 (demo). Must not know what its children do beyond the line in which they tell their URL.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pdstage.demo.serve.options import ROUTER, TOLD
from pdstage.errors import PdstageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FIRST_DELAY_S, _LONGEST_DELAY_S, _STEADY_S = 0.2, 10.0, 30.0
_GRACE_S = 15.0


class Told(NamedTuple):
    child: Child
    url: str


class Ended(NamedTuple):
    child: Child
    code: int


class Again(NamedTuple):
    child: Child


class Stop(NamedTuple):
    """A signal came."""


News: TypeAlias = "Told | Ended | Again | Stop"


@dataclass(slots=True, eq=False)
class Child:
    """One process and those that follow it, all at the same port."""

    name: str
    argv: Sequence[str]
    url: str = ""
    process: subprocess.Popen[str] | None = None
    started_at: float = 0.0
    delay_s: float = _FIRST_DELAY_S
    n_starts: int = field(default=0)

    def start(self, news: queue.SimpleQueue[News]) -> None:
        """Starts it, and has its words and its end put into `news`."""
        port = ["--port", self.url.rpartition(":")[2]] if self.url else []
        # A session of its own: Ctrl-C is for the parent, which ends its children in order. Should the parent be
        # killed, its end of their standard input closes, and they end too.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdstage.cli", "serve", *self.argv, *port, "--with-parent"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.started_at = time.monotonic()
        self.n_starts += 1
        threading.Thread(target=_listen, args=(self, self.process, news), daemon=True).start()

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def tell(self, sign: signal.Signals) -> None:
        if self.process is not None and self.is_running:
            self.process.send_signal(sign)

    def end(self, grace_s: float) -> None:
        """Waits for its end; kills it after `grace_s`."""
        if self.process is None:
            return
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _listen(child: Child, process: subprocess.Popen[str], news: queue.SimpleQueue[News]) -> None:
    assert process.stdout is not None
    assert process.stdin is not None
    with process.stdout, process.stdin:
        for line in process.stdout:
            if TOLD in line:
                news.put(Told(child, line.rpartition(TOLD)[2].strip()))
        news.put(Ended(child, process.wait()))


class Everything:
    """The children of one command. `say` prints a line for the operator."""

    def __init__(
        self, servers: Sequence[tuple[str, Sequence[str]]], router: Sequence[str], *, drain_s: float,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        number: Counter[str] = Counter()
        self._servers = []
        for role, argv in servers:
            self._servers.append(Child(f"{role} {number[role]}", (role, *argv)))
            number[role] += 1
        self._router = Child(ROUTER, (ROUTER, *router))
        self._drain_s, self._say = drain_s, say
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()

    def run(self, ready: Callable[[str], None]) -> int:
        """Until SIGINT or SIGTERM; the exit code. `ready` gets the router's URL, once."""
        for sign in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sign, lambda *_: self._news.put(Stop()))
        for child in self._servers:
            child.start(self._news)
        try:
            self._watch(ready)
            self._drain()
        finally:
            for child in (self._router, *self._servers):
                child.tell(signal.SIGKILL)
                child.end(_GRACE_S)
        return 0

    def _watch(self, ready: Callable[[str], None]) -> None:
        said = False
        while True:
            match self._news.get():
                case Stop():
                    return
                case Told(child, url):
                    self._on_told(child, url)
                    if child is self._router and not said:
                        said = True
                        ready(url)
                case Ended(child, code):
                    self._on_ended(child, code)
                case Again(child):
                    child.start(self._news)

    def _on_told(self, child: Child, url: str) -> None:
        child.url = url
        process = child.process
        self._say(f"{child.name} is at {url}, process {process.pid if process else '?'}")
        if self._router.process is None and all(server.url for server in self._servers):
            urls = [(server.argv[0], server.url) for server in self._servers]
            self._router.argv = (*self._router.argv, *(word for role, one in urls for word in (f"--{role}", one)))
            self._router.start(self._news)

    def _on_ended(self, child: Child, code: int) -> None:
        if not child.url:  # it never served: another start would end the same way
            raise PdstageError(f"{child.name} ended with exit code {code}", remedy="see its last lines above")
        steady = time.monotonic() - child.started_at > _STEADY_S
        child.delay_s = _FIRST_DELAY_S if steady else min(2 * child.delay_s, _LONGEST_DELAY_S)
        self._say(f"{child.name} ended with exit code {code}: starts again")
        again = threading.Timer(child.delay_s, self._news.put, [Again(child)])
        again.daemon = True
        again.start()

    def _drain(self) -> None:
        """The router first: what it has begun needs the servers. A second signal ends everything at once."""
        self._say("draining; once more to end at once")
        deadline_at = time.monotonic() + self._drain_s + _GRACE_S
        for children in ([self._router], self._servers):
            running = [child for child in children if child.is_running]
            for child in running:
                child.tell(signal.SIGTERM)
            while any(child.is_running for child in running):
                try:
                    news = self._news.get(timeout=max(0.0, deadline_at - time.monotonic()))
                except queue.Empty:
                    return
                if isinstance(news, Stop):
                    return

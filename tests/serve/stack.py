"""A whole stack of real processes under test, and the single-process model that it is held against."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx
import torch

from pdstage.demo.options import Options
from pdstage.demo.reference import build_model, continue_greedily
from pdstage.demo.serve.text import EOS, encode, syllable

if TYPE_CHECKING:
    from collections.abc import Callable

START_S = 180.0
WAIT_S = 120.0
_CHILD = re.compile(r"pdstage serve: (\w+) ?(\d*) is at (\S+), process (\d+)")


class Stack:
    """`pdstage serve all` with `argv`. Use as a context: leaving it ends what it started."""

    def __init__(self, *argv: str) -> None:
        command = [sys.executable, "-u", "-m", "pdstage.cli", "serve", "all", "--port", "0", *argv]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._client = httpx.Client(timeout=30.0, trust_env=False, verify=False)
        self.said: list[str] = []
        self.children: dict[str, dict[int, tuple[str, int]]] = {"prefill": {}, "decode": {}, "router": {}}
        """URL and pid, of each role by number; a restarted one takes its predecessor's place."""
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Stack:
        self.hear("ready at")
        wait_until(lambda: self.get("/ready").status_code == 200, "the router finds its servers")
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60.0)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)  # at once
            self.process.wait(60.0)
        self._reader.join()
        self._client.close()

    def _read(self) -> None:
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def hear(self, what: str) -> str:
        """The next line with `what` in it."""
        deadline_at = time.monotonic() + START_S
        while True:
            line = self._lines.get(timeout=max(0.0, deadline_at - time.monotonic()))
            assert line is not None, f"it ended before {what!r}:\n{''.join(self.said)}"
            self.said.append(line)
            if told := _CHILD.match(line):
                self.children[told[1]][int(told[2] or 0)] = told[3], int(told[4])
            if what in line:
                return line

    @property
    def url(self) -> str:
        return self.children["router"][0][0]

    def get(self, path: str, url: str = "") -> httpx.Response:
        return self._client.get((url or self.url) + path)

    def stats(self, role: str, number: int = 0) -> dict[str, Any]:
        return self.get("/stats", self.children[role][number][0]).json()

    def wait_free(self, role: str, number: int = 0) -> None:
        """Until a server has no job, and nobody has a page of it."""

        def is_free() -> bool:
            told = self.stats(role, number)
            return not told["jobs"] and not told["leaving"] and told["pages_available"] == told["pages"]

        wait_until(is_free, f"{role} {number} is free")


def wait_until(done: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    deadline_at = time.monotonic() + timeout_s
    while True:
        try:
            if done():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline_at, f"not in {timeout_s} s: {what}"
        time.sleep(0.05)


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@cache
def _model(name: str) -> Any:
    torch.set_num_threads(1)
    return build_model(Options(model=name))


def truth(model: str, prompt: str | list[int], max_tokens: int, *, ignore_eos: bool = True) -> str:
    """What one process with a cache of its own answers."""
    tokens = encode(prompt) if isinstance(prompt, str) else prompt
    answer = continue_greedily(_model(model), tokens, max_tokens).tokens
    if not ignore_eos and EOS in answer:
        answer = answer[: answer.index(EOS)]
    return "".join(map(syllable, answer))

"""Child processes that end with everything they started: at their deadline, or with the waiting process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pdstage

from . import kit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import IO

ROOT = Path(pdstage.__file__).resolve().parent.parent
_TICK_S = 1.0
# A child dies with its parent, even if the parent is killed and can end nothing. 1 is PR_SET_PDEATHSIG.
_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or os._exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)


class Command(NamedTuple):
    """A program with arguments, additional environment variables, and its name in the log."""

    name: str
    arguments: Sequence[str]
    env: Mapping[str, str] = {}


class Ended(NamedTuple):
    """`code` is None if it was ended at the deadline; `printed` is all of its output."""

    code: int | None
    printed: str


class _Child:
    """A running command. Its output goes to a file first, so that several commands do not mix in the log."""

    def __init__(self, command: Command, folder: Path, number: int) -> None:
        self.name = command.name
        self.path = folder / f"{number}.out"
        self._shown = 0
        self.code: int | None = None
        with self.path.open("wb") as out:
            # A process group, to be ended as a whole; not a session, which would survive a machine's cleanup.
            self.process = subprocess.Popen(
                [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), *command.arguments], stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env={**environment(), **command.env}, process_group=0,
            )  # fmt: skip

    def show(self, log: IO[str]) -> None:
        """Copies new output to the log."""
        with self.path.open("rb") as out:
            out.seek(self._shown)
            new = out.read()
        if new:
            self._shown += len(new)
            log.write(f"== {self.name}\n{new.decode(errors='replace')}\n")
            log.flush()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def environment() -> dict[str, str]:
    """This process's environment, with the package at its present place and the kit: nothing need be installed."""
    paths = [str(ROOT), *kit.paths(), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **kit.variables(), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def call(
    commands: Sequence[Command], most_s: float, log: IO[str], tick: Callable[[], object] = lambda: None
) -> list[Ended]:
    """Runs all side by side, and copies their output to `log`. Commands still running after `most_s` are ended.

    `tick` is called about once a second. However the call ends, none of the processes is left.
    """
    stop_at, started = time.monotonic() + most_s, list[_Child]()
    with tempfile.TemporaryDirectory(prefix="pdstage-children-") as folder:
        try:
            for number, command in enumerate(commands):
                started.append(_Child(command, Path(folder), number))
            for child in started:
                while (code := child.process.poll()) is None and (left_s := stop_at - time.monotonic()) > 0:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.process.wait(min(_TICK_S, left_s))
                    for one in started:
                        one.show(log)
                    tick()
                child.code = code
        finally:
            for child in started:
                child.end()
                child.show(log)
        return [Ended(child.code, child.path.read_text(errors="replace")) for child in started]

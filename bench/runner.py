"""Runs sections one after another until the time is up, each in separate processes, and records their results.

A kernel that faults ends its process's whole CUDA context, which must not lose the other sections' numbers.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import children, variants
from .children import Command
from .nvml import Clocks
from .record import DROPPED, Lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import IO, Any

    from .children import Ended
    from .record import Record

LEAST_S = 5.0
"""No section is started with less time left."""
OUT = "{out}"
_TAIL = 600
_NOTHING_CHOSEN = 5  # pytest's exit code


class Section(NamedTuple):
    """One part of a run. It gets `most_s` at most; `keeps_s` of the time are its own, whatever comes before it.

    With `tests`, files of tests that run side by side, with `env`; else the section of the benchmark that has its name.
    `by_kernel`: it measures kernels, which may be run each by itself.
    """

    name: str
    most_s: float
    tests: tuple[str, ...] = ()
    keeps_s: float = 0.0
    env: Mapping[str, str] = {}
    by_kernel: bool = True


class Runner:
    """`device` "cpu" tries everything but the numbers, in small."""

    def __init__(self, record: Record, log: IO[str], *, stop_at: float, device: str, quick: bool) -> None:
        self.record, self._log = record, log
        self._device, self._quick = device, quick
        self._stop_at = stop_at
        self._clocks = Clocks()

    def run(self, sections: Sequence[Section]) -> None:
        """All that there is time for, in their order."""
        for i, section in enumerate(sections):
            self._one(section, self._stop_at - sum(later.keeps_s for later in sections[i + 1 :]))

    def _one(self, section: Section, stop_at: float) -> None:
        entry: dict[str, Any] = {"name": section.name, "state": "running"}
        self.record.report["sections"].append(entry)
        begun, n_rows = time.monotonic(), len(self.record.rows)
        left_s = min(section.most_s, stop_at - begun)
        if left_s < LEAST_S:
            entry |= {"state": DROPPED, "why": "no time was left"}
        else:
            entry["allowed_s"] = round(left_s, 1)
            self.record.write()
            problems = self._section(section, begun + left_s)
            entry |= {"state": "failed" if problems else "done", "seconds": round(time.monotonic() - begun, 1)}
            entry |= {"why": "; ".join(problems)} if problems else {}
            entry |= {} if section.tests else {"rows": len(self.record.rows) - n_rows}
            entry["clocks"] = self._clocks.take()
            self.record.report["failed"] += [f"{section.name}: {problem}" for problem in problems]
        self.record.write()
        print(_line(entry), flush=True)

    def _section(self, section: Section, stop_at: float) -> list[str]:
        """Where the process of a benchmark's section dies, a kernel at a time: only the culprit's numbers are lost."""
        if section.tests:
            return self._tests(section, stop_at)
        problem, in_time = self._bench(section, (), stop_at)
        if not problem or not in_time or self._device == "cpu" or not section.by_kernel:
            return [problem] if problem else []
        alone = [self._bench(section, (variant,), stop_at)[0] for variant in variants.ON_GPU]
        return [*filter(None, alone)] or [f"{problem} (but not with each kernel by itself)"]

    def _bench(self, section: Section, only: tuple[str, ...], stop_at: float) -> tuple[str, bool]:
        """What went wrong, in words, empty if nothing; and whether it ended in time."""
        arguments = ["-m", "pdstage.bench.gpu", section.name, OUT, "--device", self._device]
        arguments += [part for variant in only for part in ("--variant", variant)]
        arguments += ["--quick"] if self._quick else []
        named = " with ".join((section.name, *only))
        (ended,) = self._children([Command(named, arguments)], stop_at)
        if ended.code == 0:
            return "", True
        return _words(" ".join(("with", *only)) + ": " if only else "", ended), ended.code is not None

    def _tests(self, section: Section, stop_at: float) -> list[str]:
        """Each file in a process of its own, side by side. On the CPU those too that a GPU is not needed for."""
        options = ["-q", "-p", "no:cacheprovider", "-p", "pdstage.bench.outcomes", "--outcomes", OUT]
        options += ["-m", "gpu or multigpu"] if self._device != "cpu" else []
        commands = [Command(path, ["-m", "pytest", path, *options], section.env) for path in section.tests]
        problems = []
        for command, ended in zip(commands, self._children(commands, stop_at), strict=True):
            if ended.code not in (0, _NOTHING_CHOSEN):
                problems.append(_words(f"{command.name}: ", ended))
        return problems

    def _children(self, commands: Sequence[Command], stop_at: float) -> list[Ended]:
        """Runs them until `stop_at`; `OUT` is where each writes its lines."""
        left_s = stop_at - time.monotonic()
        with tempfile.TemporaryDirectory(prefix="pdstage-gpu-") as folder:
            lines = [Lines(Path(folder) / f"{number}.jsonl") for number in range(len(commands))]
            filled = [_writing_to(command, one.path) for command, one in zip(commands, lines, strict=True)]
            n_left = [0] * len(commands)

            def tick() -> None:
                self._clocks.sample()
                for number, one in enumerate(lines):
                    new = one.new()
                    n_left[number] += sum(entry.get("collected", 0) - ("ended" in entry) for entry in new)
                    self.record.take(new)
                    if new:
                        self.record.write()

            tick()
            ended = children.call(filled, max(left_s, 0.1), self._log, tick)
            tick()
        self.record.report["tests"]["not_run"] += sum(n_left)
        return ended


def _writing_to(command: Command, path: Path) -> Command:
    return command._replace(arguments=[sys.executable, *(str(path) if a == OUT else a for a in command.arguments)])


def _words(named: str, ended: Ended) -> str:
    if ended.code is None:
        return f"{named}not done in the time it had"
    return f"{named}exit code {ended.code}: {ended.printed.strip()[-_TAIL:]}"


def _line(entry: dict[str, Any]) -> str:
    seconds = f" in {entry['seconds']:.0f} s" if "seconds" in entry else ""
    return f"{entry['name']}: {entry['state']}{seconds}" + (
        f": {entry['why'].splitlines()[-1]}" if "why" in entry else ""
    )

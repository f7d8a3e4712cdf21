"""Runs sections one after another until the time is up, each in separate processes, and records their results.

A kernel that faults ends its process's whole CUDA context, which must not lose the other sections' numbers. Children
end with everything they started: at their deadline, or with the process that waits for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pdstage

from . import kit, variants
from .harness import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import IO

ROW_FIELDS = tuple(field.name for field in fields(Row))
DROPPED = "dropped"
"""The state of a section that was dropped for lack of time."""
LEAST_S = 5.0
"""No section is started with less time left."""
OUT = "{out}"
_TAIL = 600
_NOTHING_CHOSEN = 5  # pytest's exit code


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
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


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


class Record:
    """What a run has found so far, and the files it is written to: one JSON that is complete at any moment, by way of a
    name beside it. Children write lines of JSON, each complete or absent; `take` puts them into the report.
    """

    def __init__(self, paths: Sequence[Path], **about: Any) -> None:  # noqa: ANN401  (JSON)
        self.paths = tuple(paths)
        self.rows: dict[str, Row] = {}
        self.skipped: list[tuple[str, str]] = []
        """Tests, and why."""
        self.report: dict[str, Any] = {
            **about, "finished": False, "sections": [], "left_out": [], "failed": [], "rows": [],
            "tests": {"passed": 0, "failed": 0, "skipped": 0, "not_run": 0, "skips": [], "failures": []},
        }  # fmt: skip

    def write(self) -> None:
        counts = Counter((test.partition("::")[0], why) for test, why in self.skipped)
        self.report["tests"]["skips"] = [{"file": file, "why": why, "n": n} for (file, why), n in counts.items()]
        self.report["rows"] = [row.to_dict() for row in self.rows.values()]
        finite = json.loads(json.dumps(self.report), parse_constant=lambda _: None)  # JSON has no NaN
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            partial.write_text(json.dumps(finite, indent=1) + "\n")
            partial.replace(path)

    def left_out(self) -> list[str]:
        """What was not measured, and why."""
        dropped = [f"{one['name']}: {one['why']}" for one in self.report["sections"] if one["state"] == DROPPED]
        return [*self.report["left_out"], *dropped]

    def take(self, lines: Iterable[dict[str, Any]]) -> None:
        """Of a row measured twice the later counts."""
        for line in lines:
            if "row" in line:
                row = Row(**line["row"])
                self.rows.pop(row.name, None)
                self.rows[row.name] = row
            elif "test" in line:
                tests, test, why = self.report["tests"], line["test"], line["why"]
                tests[line["outcome"]] += 1
                if line["outcome"] == "failed":
                    tests["failures"].append({"test": test, "why": why})
                if line["outcome"] == "skipped":
                    self.skipped.append((test, why))
            self.report["machine"] |= line.get("machine", {})
            self.report["left_out"] += [
                said for said in line.get("left_out", ()) if said not in self.report["left_out"]
            ]


class Lines:
    """A file of JSON lines that somebody is writing: `new` are those that were finished since it was last asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0

    def new(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._at)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._at += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]


class Section(NamedTuple):
    """One part of a run. It gets `most_s` at most; `keeps_s` of the time are its own, whatever comes before it.

    With `tests`, files of tests that run side by side, with `env`; else `work`, a function of a module of benches.
    `by_kernel`: it measures kernels, which may be run each by itself.
    """

    name: str
    most_s: float
    work: str = ""
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
                for number, one in enumerate(lines):
                    new = one.new()
                    n_left[number] += sum(entry.get("collected", 0) - ("ended" in entry) for entry in new)
                    self.record.take(new)
                    if new:
                        self.record.write()

            tick()
            ended = call(filled, max(left_s, 0.1), self._log, tick)
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

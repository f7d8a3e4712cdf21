"""What a run on a GPU has found so far: one JSON file that is complete at any moment, whenever the run is killed.

Children write lines of JSON, each complete or absent; `Record.take` puts them into the report.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from .harness import Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

MAX_SHOWN = 40
"""Failures and kinds of skips that the report names; all are counted."""
DROPPED = "dropped"
"""The state of a section that was dropped for lack of time."""
_MULTI_GPU = "CUDA devices, this machine has 1"


class Skip(NamedTuple):
    """A test, a part of the benchmark or a section that did not run, and why."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


class Record:
    """The report, and the files it is written to. A file is replaced by a whole one, by way of one name beside it."""

    def __init__(self, paths: Sequence[Path], **about: Any) -> None:  # noqa: ANN401  (JSON)
        self.paths = tuple(paths)
        self.report: dict[str, Any] = {
            **about,
            "finished": False,
            "sections": [],
            "tests": {"passed": 0, "failed": 0, "skipped": 0, "not_run": 0, "skips": [], "failures": []},
            "left_out": [],
            "failed": [],
            "rows": [],
        }
        self._rows: dict[str, Row] = {}
        self._skipped: list[Skip] = []

    def write(self) -> None:
        self.report["rows"] = [row.to_dict() for row in self.rows]
        text = json.dumps(_finite(self.report), indent=1, allow_nan=False) + "\n"
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            partial.write_text(text)
            partial.replace(path)

    @property
    def rows(self) -> list[Row]:
        return list(self._rows.values())

    def left_out(self) -> list[str]:
        """What was not measured, and why."""
        dropped = [f"{one['name']}: {one['why']}" for one in self.report["sections"] if one["state"] == DROPPED]
        return [*self.report["left_out"], *dropped]

    def skips(self) -> list[Skip]:
        """What was left out and each test that was skipped, but for what one GPU is too few for."""
        return [
            *(Skip(what, why) for what, _, why in (said.partition(": ") for said in self.left_out())),
            *self._skipped,
        ]

    def take(self, lines: Iterable[dict[str, Any]]) -> None:
        """Of a row measured twice the later counts."""
        for line in lines:
            if "row" in line:
                row = Row(**line["row"])
                self._rows.pop(row.name, None)
                self._rows[row.name] = row
            elif "test" in line:
                self._take_test(line)
            for name, found in line.get("machine", {}).items():
                self.report["machine"][name] = found
            for said in line.get("left_out", ()):
                if said not in self.report["left_out"]:
                    self.report["left_out"].append(said)

    def _take_test(self, line: dict[str, Any]) -> None:
        tests = self.report["tests"]
        tests[line["outcome"]] += 1
        if line["outcome"] == "failed" and len(tests["failures"]) < MAX_SHOWN:
            tests["failures"].append({"test": line["test"], "why": line["why"]})
        if line["outcome"] == "skipped":
            if _MULTI_GPU not in line["why"]:
                self._skipped.append(Skip(line["test"], line["why"]))
            self._count_skip(line["test"].partition("::")[0], line["why"])

    def _count_skip(self, file: str, why: str) -> None:
        skips = self.report["tests"]["skips"]
        for held in skips:
            if (held["file"], held["why"]) == (file, why):
                held["n"] += 1
                return
        if len(skips) < MAX_SHOWN:
            skips.append({"file": file, "why": why, "n": 1})


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


ROW_FIELDS = tuple(field.name for field in fields(Row))


def _finite(held: Any) -> Any:  # noqa: ANN401
    """Without NaN and infinity, which JSON has not."""
    if isinstance(held, dict):
        return {name: _finite(value) for name, value in held.items()}
    if isinstance(held, (list, tuple)):
        return [_finite(value) for value in held]
    return None if isinstance(held, float) and not math.isfinite(held) else held

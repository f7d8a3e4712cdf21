"""How benches measure: both sides of a ratio in turn within one run, medians, and the machine's description."""

from __future__ import annotations

import importlib
import inspect
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from pdstage import environment, native
from pdstage.errors import UsageError
from pdstage.watch import terminal

from . import BENCHES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdstage.watch.terminal import Advance

TRACED = ("rooms", "transfer", "kv-transfer")


class _Progress:
    """Shown while a bench runs: each row is a finished measurement."""

    def __init__(self) -> None:
        self.advance: Advance | None = None

    def row(self, row: Row) -> None:
        if self.advance is not None:
            self.advance(row.name)


_progress = _Progress()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement beside its baseline.

    `ratio` is value / baseline, both in `unit`. `target`, if given, applies to the ratio or to the value, as `on` says;
    `better` says which direction is good. `point` describes the measurement for programs, as the name does for readers:
    the coordinates of a plot or a table. `quartiles` and `baseline_quartiles`, if given, are the first and third
    quartiles around the medians `value` and `baseline`, the lower number first.
    """

    name: str
    value: float
    baseline: float
    unit: str
    target: float | None = None
    on: Literal["ratio", "value"] = "ratio"
    better: Literal["higher", "lower"] = "higher"
    detail: str = ""
    point: dict[str, Any] = field(default_factory=dict)
    quartiles: tuple[float, float] | None = None
    baseline_quartiles: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        _progress.row(self)

    @property
    def ratio(self) -> float:
        return self.value / self.baseline if self.baseline else float("nan")

    @property
    def met(self) -> bool | None:
        """Whether the target was reached; None without one."""
        if self.target is None:
            return None
        reached = self.ratio if self.on == "ratio" else self.value
        return bool(reached >= self.target if self.better == "higher" else reached <= self.target)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


class Spread(NamedTuple):
    """Median, 99th percentile, and first and third quartile of many seconds."""

    median: float
    p99: float
    quartiles: tuple[float, float]

    @classmethod
    def of(cls, times: list[float]) -> Spread:
        first, third, last = (float(np.quantile(times, share)) for share in (0.25, 0.75, 0.99))
        return cls(statistics.median(times), last, (first, third))


def rate(name: str, nbytes: int, took: Spread, base: Spread, detail: str, **more: Any) -> Row:  # noqa: ANN401
    """GB/s, if each of these moved `nbytes`; `more` of `Row`."""
    (first, third), (base_first, base_third) = took.quartiles, base.quartiles
    return Row(
        name=name, value=nbytes / took.median / 1e9, baseline=nbytes / base.median / 1e9, unit="GB/s", detail=detail,
        quartiles=(nbytes / third / 1e9, nbytes / first / 1e9),
        baseline_quartiles=(nbytes / base_third / 1e9, nbytes / base_first / 1e9), **more,
    )  # fmt: skip


class Measured(NamedTuple):
    """A bench's rows with more data: what they ran on, what was left out and why, and what failed."""

    rows: list[Row]
    machine: dict[str, Any]
    left_out: list[str]
    failed: list[str]


def seconds(work: Callable[[], object], inner: int = 1) -> float:
    """Seconds that one call of `work` takes, with `inner` calls timed together."""
    start = time.perf_counter()
    for _ in range(inner):
        work()
    return (time.perf_counter() - start) / inner


def interleaved(works: Sequence[Callable[[], object]], *, repeats: int, inner: int = 1) -> list[float]:
    """Median seconds of each of `works`, run in turn (A B A B ...), so that slow phases affect all alike."""
    for work in works:
        work()
    rounds = [[seconds(work, inner) for work in works] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def machine() -> dict[str, Any]:
    """The processor, its usable cores, and the versions that a number depends on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    for name in ("torch", "nixl", "pyzmq", "pdstage"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu,
        "cores": cores,
        "system": f"{platform.system()} {platform.machine()}",
        "host_code": native.active(),
        "versions": versions,
    }


def commit() -> str | None:
    """PDSTAGE_COMMIT, else the checkout's commit, with "+" if files were changed; None if neither is there."""
    git, configured = shutil.which("git"), environment.COMMIT.read()
    if git is None or configured:
        return configured
    root = Path(__file__).resolve().parents[1]

    def ask(*arguments: str) -> str:
        done = subprocess.run([git, "-C", str(root), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    if ask("rev-parse", "--show-toplevel") != str(root):  # the tree is a copy, maybe inside another repository
        return None
    return ask("rev-parse", "--short=12", "HEAD") + ("+" if ask("status", "--porcelain") else "")


def run_named(name: str, quick: bool = False, **options: object) -> dict[str, Any]:
    """Runs the bench called `name`, prints its table, and returns it with its command, machine and commit.

    `options` are its own. Raises `UsageError` for those that it has not.
    """
    if name not in BENCHES:
        raise UsageError(f"no bench {name!r}", remedy=f"use one of {', '.join(BENCHES)}", name=name)
    module = importlib.import_module(f"{__package__}.{name.replace('-', '_')}")
    for option in options.keys() - inspect.signature(module.run).parameters.keys():
        raise UsageError(f"bench {name} has no --{option}", remedy="leave it out", field=option)
    try:
        with terminal.progress(name) as _progress.advance:
            found: list[Row] | Measured = module.run(quick, **options)
    finally:
        _progress.advance = None
    measured = found if isinstance(found, Measured) else Measured(found, {}, [], [])
    report = {
        "name": name,
        "quick": quick,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": {**machine(), **measured.machine},
        "commit": commit(),
        "left_out": measured.left_out,
        "failed": measured.failed,
        "rows": [row.to_dict() for row in measured.rows],
    }
    print(table(report))
    for line in measured.left_out:
        print(f"left out: {line}")
    for line in measured.failed:
        print(f"failed: {line}")
    return report


def run_traced(name: str, quick: bool, trace: Path, **options: object) -> dict[str, Any]:
    """`run_named`, with a trace of all its nodes written to `trace`. Its numbers include the cost of tracing."""
    if name not in TRACED:
        raise UsageError(f"bench {name} moves no rooms", remedy=f"trace one of {', '.join(TRACED)}", field="trace")
    # The GPU bench needs neither nodes nor their packages.
    from pdstage.tools.trace import check, merge_files  # noqa: PLC0415

    from . import ranks  # noqa: PLC0415

    check(trace)
    with tempfile.TemporaryDirectory(prefix="pdstage-trace-") as folder, ranks.traced(Path(folder)):
        report = run_named(name, quick, **options)
        merge_files(Path(folder).iterdir(), trace)
    report["left_out"].append("the numbers include what tracing costs")
    print(report["left_out"][-1])
    return report


def command_of(report: dict[str, Any]) -> str:
    """The command that a report was made by, as it is given today."""
    return str(report["command"]).replace(" --json ", " --output ")


def table(report: dict[str, Any]) -> str:
    """A report as text, one line per row."""
    rows = []
    for row in report["rows"]:
        sign = ">=" if row["better"] == "higher" else "<="
        target = (
            ""
            if row["target"] is None
            else f"{sign} {row['target']:g}{'' if row['on'] == 'ratio' else ' ' + row['unit']}"
        )
        met = {True: "yes", False: "NO", None: ""}[row["met"]]
        cells = (f"{row['value']:.3g}", f"{row['baseline']:.3g}", row["unit"], f"{row['ratio']:.3g}")
        rows.append((row["name"], *cells, target, met, row["detail"]))
    on = f"{report['machine']['cpu']}, {report['machine']['cores']} cores, host code {report['machine']['host_code']}"
    head = ("", "value", "baseline", "unit", "ratio", "target", "met", "")
    return "\n".join([f"{report['name']} on {on}", *terminal.table(head, rows)])

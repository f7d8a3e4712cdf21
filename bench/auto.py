"""Whether "auto" takes the better path, for every run length and pair of TP sizes, with a fresh calibration.

A cell is one transport, one pair and one run length. It compares the time of "auto" with that of the better of the two
paths, as the median of ratios of rooms timed in turn. A cell that misses is timed again, and its new times are added:
on a busy machine two medians of the same path differ by more than the margin.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pdstage.errors import TransportError

from .harness import Measured, Row
from .sides import PAIRS, RUNS, Shape, Sides, fabrics, median_ratio

if TYPE_CHECKING:
    from .sides import Fabric

WAYS = ("direct", "staged", "auto")
WITHIN, NEVER_WORSE = 1.10, 1.25
_REPEATS, _MAX_ROUNDS = 5, 4
_PATIENCE_S = 270.0  # after this long nothing is timed again
QUICK_PAIRS, QUICK_RUNS, QUICK_NBYTES = ((2, 1),), (256, 4096, 65536), 8 << 20


def run(quick: bool) -> Measured:
    until = time.monotonic() + _PATIENCE_S
    shapes = [Shape(*pair, QUICK_NBYTES) for pair in QUICK_PAIRS] if quick else [Shape(*pair) for pair in PAIRS]
    rows, left_out = [], []
    for fabric in fabrics():
        with tempfile.TemporaryDirectory() as folder:
            calibration = str(Path(folder) / "calibration.json")
            try:
                calibrate(fabric, calibration, quick)
                for shape in shapes:
                    rows += cells(fabric, shape, calibration, QUICK_RUNS if quick else RUNS, until)
            except (TransportError, RuntimeError) as error:
                left_out.append(f"{fabric.name}: {error}")
    return Measured(summary(rows) + rows, {}, left_out, [])


def calibrate(fabric: Fabric, path: str, quick: bool) -> None:
    """Calibrates as an operator would: by the command, in the environment of that fabric."""
    command = [sys.executable, "-m", "pdstage.cli", "calibrate", "--transport", fabric.transport, "--out", path]
    done = subprocess.run(
        [*command, *(["--quick"] if quick else [])], env=os.environ | fabric.env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise TransportError(f"calibration failed: {done.stderr.strip()}")
    print(f"{fabric.name}\n{done.stdout}")


def cells(fabric: Fabric, shape: Shape, calibration: str, runs: tuple[int, ...], until: float) -> list[Row]:
    rows = []
    with Sides(shape, fabric, calibration) as sides:
        for run_nbytes in runs:
            chosen = sides.chosen(run_nbytes)
            took: dict[str, list[float]] = {way: [] for way in WAYS}
            for _ in range(_MAX_ROUNDS):
                for way, times in sides.times(WAYS, run_nbytes, _REPEATS).items():
                    took[way] += times
                row = cell(fabric, shape, run_nbytes, chosen, took)
                if row.ratio >= 1 / WITHIN or time.monotonic() > until:
                    break
            rows.append(row)
    return rows


def cell(fabric: Fabric, shape: Shape, run_nbytes: int, chosen: str, took: dict[str, list[float]]) -> Row:
    """`took` are seconds by path. The baseline is the better path's speed; the ratio is auto's speed to it."""
    seconds = {way: statistics.median(times) for way, times in took.items()}
    better = min(("direct", "staged"), key=lambda way: seconds[way])
    gb = shape.nbytes / 1e9
    speeds = {way: gb / one for way, one in seconds.items()}
    size = f"{run_nbytes} B" if run_nbytes < 1024 else f"{run_nbytes // 1024} KiB"
    return Row(
        name=f"auto beside the better path, {fabric.name}, TP{shape.src_tp} -> TP{shape.dst_tp}, {size} runs",
        value=speeds[better] / median_ratio(took["auto"], took[better]),
        baseline=speeds[better],
        unit="GB/s",
        target=1 / NEVER_WORSE,
        detail=f"took {chosen}; direct {speeds['direct']:.2f}, staged {speeds['staged']:.2f} GB/s",
        point={
            "table": "auto", "transport": fabric.name, "src_tp": shape.src_tp, "dst_tp": shape.dst_tp,
            "run_nbytes": run_nbytes, "chosen": chosen, "repeats": len(took["auto"]), **speeds,
        },
    )  # fmt: skip


def summary(rows: list[Row]) -> list[Row]:
    """The two targets, for all cells together and for each transport."""
    found = []
    fabrics_named = list(dict.fromkeys(row.point["transport"] for row in rows))
    for name, part in [("all", rows), *((n, [r for r in rows if r.point["transport"] == n]) for n in fabrics_named)]:
        if part:
            within = sum(row.ratio >= 1 / WITHIN for row in part)
            worst = min(part, key=lambda row: row.ratio)
            found.append(
                Row(
                    name=f"cells where auto is within 10 % of the better path, {name}",
                    value=100 * within / len(part),
                    baseline=100.0,
                    unit="%",
                    target=95.0,
                    on="value",
                    detail=f"{within} of {len(part)}; worst {100 * (1 / worst.ratio - 1):.0f} % longer: {worst.name}",
                )
            )
    return found

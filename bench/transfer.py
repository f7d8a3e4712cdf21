"""Rooms between two TP sizes, for every length of the runs that two ranks share: staged and direct beside one bulk
write, and "auto", with a fresh calibration, beside the better of the two.

A cell is one transport, one pair of TP sizes and one run length, in processes of its own; its ways take turns, and
every ratio is the median of those of times taken in turn. A cell whose "auto" misses is timed again, and its new times
are added: on a busy machine two medians of the same path differ by more than the margin.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING

from pdstage import environment
from pdstage.errors import TransportError

from . import shapes
from .harness import Measured, Row
from .kv_transfer import BULK, Bed, Case, Kept
from .sides import fabrics, median_ratio, rounds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .sides import Fabric

PATHS = ("direct", "staged")
WAYS = (*PATHS, "auto", BULK)
RUNS = tuple(256 << n for n in range(9))  # 256 B to 64 KiB
PAIRS = ((4, 2), (2, 4), (4, 4), (3, 2), (8, 4))
LAYERS, PAGE, ROOM_NBYTES = 8, 16, 32 << 20
WITHIN, NEVER_WORSE = 1.10, 1.25
_REPEATS, _MAX_ROUNDS = 5, 4
_PATIENCE_S = 270.0  # after this long nothing is timed again
QUICK_PAIRS, QUICK_RUNS, QUICK_NBYTES = ((2, 1),), (256, 4096, 65536), 8 << 20


def run(quick: bool) -> Measured:
    until = time.monotonic() + _PATIENCE_S
    pairs, runs, nbytes = (QUICK_PAIRS, QUICK_RUNS, QUICK_NBYTES) if quick else (PAIRS, RUNS, ROOM_NBYTES)
    rows: list[Row] = []
    left_out = []
    for fabric in fabrics():
        with tempfile.TemporaryDirectory() as folder:
            calibration = str(Path(folder) / "calibration.json")
            try:
                calibrate(fabric, calibration, quick)
                calibrated = fabric._replace(env=fabric.env | {environment.CALIBRATION.name: calibration})
                for pair, run_nbytes in product(pairs, runs):
                    rows += measured(calibrated, case_of(*pair, run_nbytes, nbytes), run_nbytes, until)
            except (TransportError, RuntimeError) as error:
                left_out.append(f"{fabric.name}: {error}")
    return Measured([*summary(rows), *rows], {}, left_out, [])


def calibrate(fabric: Fabric, path: str, quick: bool) -> None:
    """Calibrates as an operator would: by the command, in the environment of that fabric."""
    command = [sys.executable, "-m", "pdstage.cli", "calibrate", "--transport", fabric.transport, "--output", path]
    done = subprocess.run(
        [*command, *(["--quick"] if quick else [])], env=os.environ | fabric.env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise TransportError(f"calibration failed: {done.stderr.strip()}")
    print(f"{fabric.name}\n{done.stdout}")


def case_of(src_tp: int, dst_tp: int, run_nbytes: int, nbytes: int) -> Case:
    """Rooms of about `nbytes`, of which the two sides share runs of that length.

    Heads are one a rank of the larger side; where that does not deal them out evenly to the smaller, enough that do.
    Pages have 16 tokens; between equal sizes, which share whole pages, one, so that no two runs join.
    """
    larger, smaller = max(src_tp, dst_tp), min(src_tp, dst_tp)
    heads, page = larger if larger % smaller == 0 else larger * smaller, 1 if src_tp == dst_tp else PAGE
    model = shapes.Model(f"runs of {run_nbytes}", shapes.kv(range(LAYERS), heads, run_nbytes), page)
    tokens = max(1, nbytes // (2 * LAYERS * heads * run_nbytes))
    return Case(model, tokens, Kept(src_tp, page), Kept(dst_tp, page))


def measured(fabric: Fabric, case: Case, run_nbytes: int, until: float) -> tuple[Row, ...]:
    with Bed(case, fabric) as bed:
        chosen = bed.chosen()
        took: dict[str, list[float]] = {way: [] for way in WAYS}
        for way in WAYS:
            bed.seconds(way, 1)
        for _ in range(_MAX_ROUNDS):
            for way in chain.from_iterable(rounds(WAYS, _REPEATS)):
                took[way].append(bed.seconds(way, 1))
            rows = cell(fabric.name, case, run_nbytes, chosen, took)
            if rows[-1].ratio >= 1 / WITHIN or time.monotonic() > until:
                break
        return rows


def cell(fabric: str, case: Case, run_nbytes: int, chosen: str, took: dict[str, list[float]]) -> tuple[Row, Row]:
    """Of seconds by way: staged beside direct, and "auto", which took the path `chosen`, beside the better of them."""
    seconds = {way: statistics.median(times) for way, times in took.items()}
    better = min(PATHS, key=lambda way: seconds[way])
    speeds = {way.replace(BULK, "raw"): case.nbytes / 1e9 / one for way, one in seconds.items()}
    size = f"{run_nbytes} B" if run_nbytes < 1024 else f"{run_nbytes // 1024} KiB"
    what = f"{fabric}, TP{case.src.tp} -> TP{case.dst.tp}, {size} runs"
    point = {
        "transport": fabric, "src_tp": case.src.tp, "dst_tp": case.dst.tp, "run_nbytes": run_nbytes, **speeds,
    }  # fmt: skip
    return (
        Row(
            name=f"staged beside direct, {what}",
            value=speeds["direct"] / median_ratio(took["staged"], took["direct"]),
            baseline=speeds["direct"],
            unit="GB/s",
            detail=f"raw write {speeds['raw']:.2f} GB/s, staged {median_ratio(took[BULK], took['staged']):.2f} of it",
            point={"table": "paths", **point},
        ),
        Row(
            name=f"auto beside the better path, {what}",
            value=speeds[better] / median_ratio(took["auto"], took[better]),
            baseline=speeds[better],
            unit="GB/s",
            target=1 / NEVER_WORSE,
            detail=f"took {chosen}; direct {speeds['direct']:.2f}, staged {speeds['staged']:.2f} GB/s",
            point={"table": "auto", "chosen": chosen, "repeats": len(took["auto"]), **point},
        ),
    )


def summary(rows: list[Row]) -> Iterator[Row]:
    """How often "auto" takes the better path, of all cells together and for each transport."""
    rows = [row for row in rows if row.point["table"] == "auto"]
    names = dict.fromkeys(row.point["transport"] for row in rows)
    for name in ("all", *names) if rows else ():
        part = [row for row in rows if name in ("all", row.point["transport"])]
        within = sum(row.ratio >= 1 / WITHIN for row in part)
        worst = min(part, key=lambda row: row.ratio)
        yield Row(
            name=f"cells where auto is within 10 % of the better path, {name}",
            value=100 * within / len(part),
            baseline=100.0,
            unit="%",
            target=95.0,
            on="value",
            detail=f"{within} of {len(part)}; worst {100 * (1 / worst.ratio - 1):.0f} % longer: {worst.name}",
        )

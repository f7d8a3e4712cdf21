"""The benches of the wire and of real processes run in small, and report rows for a reader and for a program."""

from __future__ import annotations

import json
import math

import pytest

from pdstage.bench import rooms, sides, transfer
from pdstage.bench.harness import run_named, table
from pdstage.bench.kv_transfer import Bed


def check(report: dict, *needed: str) -> None:
    """The rows hold what their names promise, and the report survives JSON. Times themselves are never judged."""
    assert json.loads(json.dumps(report)) == report
    names = [row["name"] for row in report["rows"]]
    assert all(any(part in name for name in names) for part in needed), names
    for row in report["rows"]:
        assert row["value"] > 0 and row["baseline"] > 0 and math.isfinite(row["ratio"]), row
        assert (row["met"] is None) == (row["target"] is None)
        assert row["unit"] and row["detail"]
        assert row["name"] in table(report)


def test_wire():
    report = run_named("wire", quick=True)
    check(report, "100000 pages", "checks")
    assert [row["target"] for row in report["rows"]].count(100) == 1, "of repeated calls"


def test_rooms(monkeypatch):
    monkeypatch.setattr(rooms, "WINDOW", 16)
    check(run_named("rooms", quick=True), "rooms a second", "idle main threads, p50", "busy main threads, p99")


def test_a_failed_rank_is_told_and_not_waited_for():
    with rooms.Pair("local", "inline") as pair, pytest.raises(RuntimeError, match="no_such_method"):
        pair.decode.call("no_such_method")


def only_local() -> list[sides.Fabric]:
    return [fabric for fabric in sides.fabrics() if fabric.name == "local"]


@pytest.mark.full
def test_transfer(monkeypatch):
    """And a fabric that cannot be calibrated is left out, in words."""
    monkeypatch.setattr(transfer, "QUICK_NBYTES", 1 << 20)
    monkeypatch.setattr(transfer, "fabrics", lambda: [*only_local(), sides.Fabric("pigeon post", "pigeon", {})])
    report = run_named("transfer", quick=True)
    check(report, "cells where auto is within 10 % of the better path, local", "256 B runs", "64 KiB runs")
    cells = [row["point"] for row in report["rows"] if row["point"]]
    assert [cell["run_nbytes"] for cell in cells if cell["table"] == "paths"] == [256, 4096, 65536]
    assert all(cell["chosen"] in ("direct", "staged", "both") for cell in cells if cell["table"] == "auto")
    (left_out,) = report["left_out"]
    assert "pigeon post" in left_out and "no transport 'pigeon'" in left_out


def test_cells_are_held_against_the_better_path():
    took = {"direct": [2.0, 4.0, 2.0], "staged": [1.0, 2.0, 1.0], "auto": [1.2, 2.4, 1.1], "bulk": [0.5, 0.5, 0.5]}
    case = transfer.case_of(4, 2, 256, 1 << 30)
    paths, bad = transfer.cell("x", case, 256, "staged", took)
    assert bad.ratio == pytest.approx(1 / 1.2) and bad.met
    assert paths.ratio == pytest.approx(2.0) and "0.50 of it" in paths.detail
    assert paths.point["raw"] == pytest.approx(case.nbytes / 0.5e9)
    _, awful = transfer.cell("y", case, 256, "direct", {**took, "auto": took["direct"]})
    assert awful.ratio == pytest.approx(0.5) and not awful.met
    _, good = transfer.cell("y", case, 512, "staged", {**took, "auto": took["staged"]})
    assert [(row.value, row.met) for row in transfer.summary([paths, bad, awful, good])] == [
        (pytest.approx(100 / 3), False), (0.0, False), (50.0, False),
    ]  # fmt: skip


@pytest.mark.parametrize("pair", [(3, 2), pytest.param((4, 4), marks=pytest.mark.full)])
def test_rooms_of_any_sizes_arrive(pair):
    """Every byte of every rank is compared, on either path."""
    for run in (256, 65536):
        with Bed(transfer.case_of(*pair, run, 1 << 20), only_local()[0]) as bed:
            for path in ("staged", "direct", "auto"):
                bed.seconds(path, 1)
            assert bed.chosen() in ("direct", "staged", "both")

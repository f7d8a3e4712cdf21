"""The benches of the wire and of real processes run in small, and report rows for a reader and for a program."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil

import pytest

from pdstage.bench import auto, load, rooms, sides, transfer, watch, wire
from pdstage.bench.harness import run_named, table
from tests.rows import everything


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
    check(report, "100000 pages", "checks", "Reserve")
    assert [row["target"] for row in report["rows"]].count(100) == 3, "of repeated calls"


def test_wire_baselines_keep_every_page():
    import numpy as np  # noqa: PLC0415

    pages = np.array([0, 1, 2**31 - 1, -(2**31)], np.int32)
    for way in (wire._travel, wire._by_struct, wire._by_msgpack, wire._by_digits):
        assert way(pages).tolist() == pages.tolist(), way


def test_rooms(monkeypatch):
    monkeypatch.setattr(rooms, "WINDOW", 16)
    report = run_named("rooms", quick=True)
    check(report, "rooms a second", "idle main threads, p50", "busy main threads, p99", "open beside", "poll_many")


def test_directory():
    report = run_named("directory", quick=True)
    check(report, "HTTP, ranks registered", "HTTP with keys, look-ups", "HTTP, until a rank is found")
    is_there = any("etcd" in row["name"] for row in report["rows"])
    assert is_there == bool(shutil.which("etcd")) == (not report["left_out"])


@pytest.mark.full
def test_watch(monkeypatch):
    monkeypatch.setattr(watch, "QUICK", (20, 1, 50, 2))
    monkeypatch.setattr(watch, "EVERY_S", 0.1)
    report = run_named("watch", quick=True)
    check(report, "rooms a second, watched", "idle, p50, watched, thread", "/metrics, 50 rooms open", "/rooms")


@pytest.mark.full
def test_load_ends_and_leaves_nobody_behind(monkeypatch):
    monkeypatch.setattr(load, "END_S", 0.1)
    assert load.load(0.5, "local", "staged") > 0


def test_a_failed_rank_is_told_and_not_waited_for():
    with rooms.Pair("local", "inline") as pair, pytest.raises(RuntimeError, match="no_such_method"):
        pair.decode.call("no_such_method")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(transfer, "QUICK_NBYTES", 1 << 20)
    monkeypatch.setattr(transfer, "fabrics", only_local)
    monkeypatch.setattr(auto, "QUICK_NBYTES", 1 << 20)
    monkeypatch.setattr(auto, "fabrics", only_local)


def only_local() -> list[sides.Fabric]:
    return [fabric for fabric in sides.fabrics() if fabric.name == "local"]


@pytest.mark.full
@pytest.mark.skipif(not importlib.util.find_spec("nixl"), reason="nixl is not installed")
def test_transfer(small):
    report = run_named("transfer", quick=True)
    check(report, "staged beside direct", "one raw write, shared memory", "one raw write, TCP")
    check(report, "scatter-gather put beside direct, TCP")
    swept = [row["point"]["run_nbytes"] for row in report["rows"] if row["point"].get("table") == "paths"]
    assert swept == [1024, 65536]


@pytest.mark.skipif(not importlib.util.find_spec("nixl"), reason="nixl is not installed")
def test_a_rooms_bytes_arrive_by_scatter_gather(small):
    """The sinks compare every head; a NIXL that cannot put lists has no such rows."""
    rows = transfer._scatter_gather(quick=True, transport="nixl")
    assert [row.name.split(", ")[1] for row in rows] == ["shared memory", "TCP"]
    assert all(row.detail.startswith("1024 descriptors") for row in rows)
    assert transfer._scatter_gather(quick=True, transport="local") == []


def test_transfer_over_local_moves_the_right_bytes(small):
    """The sinks compare every head with its source's mark; six ranks with FULL=1, three else."""
    case = transfer.Case(*((4, 2) if everything else (2, 1)), 256, 1 << 20)
    with transfer.Bed(case, ("staged", "direct"), transport="local") as bed:
        took = bed.medians(("staged", "direct", "raw"), 1)
        n = {path: bed.n_descriptors(path) / bed.n_rooms(path) for path in ("staged", "direct")}
    assert sorted(took) == ["direct", "raw", "staged"]
    assert n["direct"] == (1 << 20) / 256  # each run is one descriptor
    assert n["staged"] < 64


@pytest.mark.full
def test_auto(small):
    report = run_named("auto", quick=True)
    check(report, "cells where auto is within 10 % of the better path, local", "256 B runs", "64 KiB runs")
    cells = [row["point"] for row in report["rows"] if row["point"]]
    assert all(cell["chosen"] in ("direct", "staged", "both") for cell in cells)


@pytest.mark.full
def test_a_fabric_that_cannot_be_calibrated_is_left_out_in_words(monkeypatch, small):
    monkeypatch.setattr(auto, "fabrics", lambda: [sides.Fabric("pigeon post", "pigeon", {})])
    report = run_named("auto", quick=True)
    assert report["rows"] == []
    assert "pigeon post" in report["left_out"][0] and "no transport 'pigeon'" in report["left_out"][0]


def test_autos_cells_are_held_against_the_better_path():
    took = {"direct": [2.0, 4.0, 2.0], "staged": [1.0, 2.0, 1.0], "auto": [1.2, 2.4, 1.1]}
    shape = sides.Shape(4, 2, 1 << 30)
    bad = auto.cell(sides.Fabric("x", "x", {}), shape, 256, "staged", took)
    assert bad.ratio == pytest.approx(1 / 1.2) and bad.met
    awful = auto.cell(sides.Fabric("y", "y", {}), shape, 256, "direct", {**took, "auto": took["direct"]})
    assert awful.ratio == pytest.approx(0.5) and not awful.met
    good = auto.cell(sides.Fabric("y", "y", {}), shape, 512, "staged", {**took, "auto": took["staged"]})
    assert [(row.value, row.met) for row in auto.summary([bad, awful, good])] == [
        (pytest.approx(100 / 3), False), (0.0, False), (50.0, False),
    ]  # fmt: skip


@pytest.mark.parametrize("pair", [(3, 2), pytest.param((4, 4), marks=pytest.mark.full)])
def test_sides_move_the_right_bytes(pair):
    """Every head of every rank holds its source's mark, on either path; a mark that is off is found."""
    with sides.Sides(sides.Shape(*pair, 1 << 20), only_local()[0]) as both:
        for run in (256, 65536):
            for path in ("staged", "direct", "auto"):
                both.room(path, run, check=True)
    shape = sides.Shape(2, 1, 1 << 20)
    sink = sides.Sinks.__new__(sides.Sinks)
    sink.shape, sink._memories = shape, [shape.pool(1, 0, 1)[1]]
    with pytest.raises(AssertionError, match="other bytes"):
        sink._check(256, shape.pages(256, 0))


def test_a_wrong_byte_is_found():
    case = transfer.Case(2, 1, 512, 1 << 20)
    sink = transfer.Sink.__new__(transfer.Sink)
    sink.case, sink.first_mark = case, 1
    good = case.shape(1, 0).pool(fill=1).keep
    good[..., 2:, :] = 2  # of the four heads, two come from either rank
    sink._check(good)
    good[1, 3, 5, 7, 2, 9] = 1
    with pytest.raises(AssertionError, match="other bytes"):
        sink._check(good)

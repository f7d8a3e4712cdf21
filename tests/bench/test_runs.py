"""The benches of the wire and of real processes run in small, and report rows for a reader and for a program."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest

from pdstage.bench import rooms, transfer, wire
from pdstage.bench.harness import run_named, table


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


def test_a_failed_rank_is_told_and_not_waited_for():
    with rooms.Pair("local", "inline") as pair, pytest.raises(RuntimeError, match="no_such_method"):
        pair.decode.call("no_such_method")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(transfer, "QUICK_NBYTES", 1 << 20)


@pytest.mark.skipif(not importlib.util.find_spec("nixl"), reason="nixl is not installed")
def test_transfer(small):
    report = run_named("transfer", quick=True)
    check(report, "staged beside direct", "one raw write, shared memory", "one raw write, TCP")


def test_transfer_over_local_moves_the_right_bytes(small):
    """The sinks compare every head with its source's mark; six ranks."""
    case = transfer.Case(4, 2, 256, 1 << 20)
    with transfer.Bed(case, ("staged", "direct"), transport="local") as bed:
        took = bed.medians(("staged", "direct", "raw"), 1)
        n = {path: bed.n_descriptors(path) / bed.n_rooms(path) for path in ("staged", "direct")}
    assert sorted(took) == ["direct", "raw", "staged"]
    assert n["direct"] == (1 << 20) / 256  # each run is one descriptor
    assert n["staged"] < 64


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

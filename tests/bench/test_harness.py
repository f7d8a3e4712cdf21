"""The harness: what counts as met, and a report that a program and a person can read. No number is judged here."""

from __future__ import annotations

import json
import subprocess

import pytest

from pdstage import UsageError, cli
from pdstage.bench import harness
from pdstage.bench.harness import Row


@pytest.mark.parametrize(
    ("value", "target", "on", "better", "met"),
    [
        (8.0, 0.8, "ratio", "higher", True),
        (7.9, 0.8, "ratio", "higher", False),
        (8.0, 0.8, "ratio", "lower", True),
        (101.0, 100.0, "value", "lower", False),
        (101.0, None, "ratio", "higher", None),
    ],
)
def test_met_is_by_the_ratio_or_by_the_value(value, target, on, better, met):
    row = Row(name="x", value=value, baseline=10.0, unit="us", target=target, on=on, better=better)
    assert row.met is met
    assert row.to_dict()["met"] is met
    assert row.to_dict()["ratio"] == pytest.approx(value / 10)


def test_both_sides_are_measured_in_turn():
    seen = []
    medians = harness.interleaved([lambda: seen.append("a"), lambda: seen.append("b")], repeats=3)
    assert "".join(seen) == "ab" + "ab" * 3  # the first of each warms up
    assert len(medians) == 2


def test_a_report_names_its_machine_and_its_rows(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert cli.main(["bench", "plan", "--quick", "--output", str(path)]) == 0
    held, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert held["machine"]["cpu"] and held["machine"]["cores"] >= 1 and "commit" in held
    assert {"python", "numpy"} <= held["machine"]["versions"].keys()
    assert all(row["value"] > 0 and row["baseline"] > 0 and row["name"] in printed for row in held["rows"])


def test_the_commit_is_the_one_it_was_told_or_of_this_very_checkout(monkeypatch, tmp_path):
    monkeypatch.delenv("PDSTAGE_COMMIT", raising=False)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a", "-C", tmp_path]
    for what in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run([*git, *what], check=True)
    with monkeypatch.context() as patch:
        patch.setattr(harness, "__file__", str(tmp_path / "copy" / "bench" / "harness.py"))
        assert harness.commit() is None, "the repository around a copy is another"
        patch.setattr(harness, "__file__", str(tmp_path / "bench" / "harness.py"))
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
        assert head.startswith(harness.commit())
        patch.setenv("PDSTAGE_COMMIT", "abc")
        assert harness.commit() == "abc"
    monkeypatch.setattr(harness.shutil, "which", lambda name: None)
    assert harness.commit() is None


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [("speed", {}, "no bench 'speed'"), ("wire", {"scale": 2}, "bench wire has no --scale")],
)
def test_a_bench_or_an_option_that_is_not_there_is_refused(name, options, said):
    with pytest.raises(UsageError, match=said):
        harness.run_named(name, **options)

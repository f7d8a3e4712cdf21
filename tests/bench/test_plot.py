"""The pages of plots are made of the committed results."""

from __future__ import annotations

import json

import pytest

from pdstage import UsageError
from pdstage.bench import plot


def test_the_pages_are_made_from_the_committed_results():
    held = plot.reports()
    for path, part in ((plot.PAGE, plot.section), (plot.PATHS_PAGE, plot.paths_section)):
        page = (plot.ROOT / path).read_text()
        assert plot.written(page, part(held), path) == page, "run `make plots`"
    for one in plot.plots_of(held):
        assert (plot.ROOT / plot.PLOTS / one.file).exists(), "run `make plots`"


def test_curves_are_in_order_and_targets_are_counted():
    report = plot.reports()["nvidia-h200"]
    runs, *sms = plot.gpu_plots(report, "x")
    assert [line.label for line in runs.lines][:2] == ["gather, cuda bulk", "gather, cuda plain"]
    assert all(line.points == sorted(line.points) for one in (runs, *sms) for line in one.lines)
    aimed = [row for row in report["rows"] if row["target"] is not None]
    said = f"{sum(row['met'] for row in aimed)} of {len(aimed)} targets were met."
    assert said in plot.section({"x": report})


def test_quick_looks_are_not_results(tmp_path):
    (tmp_path / plot.RESULTS).mkdir(parents=True)
    for name, quick in (("a", False), ("b", True)):
        (tmp_path / plot.RESULTS / f"{name}.json").write_text(json.dumps({"quick": quick}))
    assert list(plot.reports(tmp_path)) == ["a"]


def test_a_page_without_the_part_is_refused():
    with pytest.raises(UsageError, match="no measured part"):
        plot.written("# a page", "part")


def test_plots_are_drawn_alike(tmp_path):
    pytest.importorskip("matplotlib")
    one = plot.path_plots(plot.reports()["transfer"])[0]
    for name in ("a", "b"):
        plot.draw(one, tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert b"<svg" in (tmp_path / "a").read_bytes()

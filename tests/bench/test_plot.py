"""The page of plots: its numbers are those of the committed results, and it claims no GPU that was not measured."""

from __future__ import annotations

import json

import pytest

from pdstage.bench import plot
from pdstage.bench.harness import Row
from pdstage.errors import UsageError


def gpu_report(**more):
    rows = [
        Row(
            name=f"{way} {run}",
            value=value,
            baseline=2000.0,
            unit="GB/s",
            target=0.9,
            point={"table": "runs", "way": way, "variant": "cuda plain", "run_nbytes": run},
        )
        for way in ("gather", "scatter")
        for run, value in ((4096, 1900.0), (64, 900.0))
    ]
    rows += [
        Row(
            name=f"curve {n}",
            value=30.0 * n,
            baseline=2000.0,
            unit="GB/s",
            point={"table": "sms", "way": "gather", "variant": "triton", "run_nbytes": 256, "max_sms": n},
        )
        for n in (16, 1, 2)
    ]
    return {
        "name": "gpu",
        "quick": False,
        "command": "pdstage bench gpu",
        "machine": {"cpu": "c", "gpu": {"name": "NVIDIA X1"}},
        "commit": "abc",
        "rows": [row.to_dict() for row in rows],
        **more,
    }


def test_curves_are_in_order_and_ratios_of_a_copy():
    runs, sms = plot.gpu_plots(gpu_report(), "nvidia-x1")
    assert [line.label for line in runs.lines] == ["gather, cuda plain", "scatter, cuda plain"]
    assert runs.lines[0].points == [(64, 0.45), (4096, 0.95)]
    assert runs.file == "nvidia-x1-roofline.svg"
    assert sms.lines == [plot.Line("gather, triton", [(1, 30.0), (2, 60.0), (16, 480.0)])]
    assert sms.file == "nvidia-x1-sms-256.svg"


def test_a_measured_gpu_takes_the_hosts_place():
    text = plot.section({"nvidia-x1": gpu_report(), **plot.reports()})
    assert plot.NO_GPU not in text
    assert "NVIDIA X1, commit `abc`" in text
    assert "host-kernels-roofline" not in text
    assert "2 of 4 targets were met." in text
    assert "* gather 64: 900 GB/s, ratio 0.45" in text


def test_without_a_gpu_the_page_says_so():
    held = {"host-kernels": plot.reports()["host-kernels"]}
    text = plot.section(held)
    assert plot.NO_GPU in text
    assert [one.file for one in plot.plots_of(held)] == ["host-kernels-roofline.svg"]
    labels = [line.label for line in plot.plots_of(held)[0].lines]
    assert labels == [f"{way}, {access}" for way in ("gather", "scatter") for access in ("one head of 8", "slots")]


def test_quick_looks_are_not_results(tmp_path):
    folder = tmp_path / plot.RESULTS
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps(gpu_report()))
    (folder / "b.json").write_text(json.dumps(gpu_report(quick=True)))
    assert list(plot.reports(tmp_path)) == ["a"]


def test_the_page_is_made_from_the_committed_results():
    page = (plot.ROOT / plot.PAGE).read_text()
    held = plot.reports()
    assert plot.section(held) in page, "run `make plots`"
    for one in plot.plots_of(held):
        assert (plot.ROOT / plot.PLOTS / one.file).exists(), "run `make plots`"


def paths_report(**more):
    cells = [
        {"table": "paths", "transport": "nixl, TCP", "src_tp": 4, "dst_tp": 2, "run_nbytes": run, "raw": 2.0, **speeds}
        for run, speeds in ((1024, {"staged": 1.5, "direct": 0.5}), (256, {"staged": 1.4, "direct": 0.2}))
    ]
    rows = [Row(name="x", value=1.5, baseline=0.5, unit="GB/s", point=cell).to_dict() for cell in cells]
    return {**gpu_report(), "name": "transfer", "machine": {"cpu": "c", "cores": 2}, "rows": rows, **more}


def test_paths_are_shares_of_a_bulk_write():
    [one] = plot.path_plots(paths_report())
    assert one.file == "transfer-nixl-tcp.svg"
    assert one.lines == [
        plot.Line("direct, TP4 to TP2", [(256, 0.1), (1024, 0.25)]),
        plot.Line("staged, TP4 to TP2", [(256, 0.7), (1024, 0.75)]),
    ]
    text = plot.paths_section({"transfer": paths_report()})
    assert "plots/transfer-nixl-tcp.svg" in text and "0.75" in text and "Not measured" not in text


def test_what_auto_reached_is_told_by_its_summary():
    row = Row(name="cells within, all", value=96.0, baseline=100.0, unit="%", detail="48 of 50").to_dict()
    text = plot.paths_section({"transfer": paths_report(rows=[row])})
    assert "* cells within, all: 96 % (48 of 50)" in text
    assert "Not measured" in text


def test_the_page_of_transports_is_made_from_the_committed_results():
    held = plot.reports()
    assert plot.paths_section(held) in (plot.ROOT / plot.PATHS_PAGE).read_text(), "run `make plots`"
    for one in plot.path_plots(held["transfer"]):
        assert (plot.ROOT / plot.PLOTS / one.file).exists(), "run `make plots`"


def test_a_page_without_the_part_is_refused():
    with pytest.raises(UsageError, match="no measured part"):
        plot.written("# a page", "part")


def test_plots_are_drawn_alike(tmp_path):
    pytest.importorskip("matplotlib")
    for one in plot.gpu_plots(gpu_report(), "nvidia-x1"):
        for name in ("a", "b"):
            plot.draw(one, tmp_path / name)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        assert b"<svg" in (tmp_path / "a").read_bytes()


def burst_report():
    def row(way, requests, value, **other):
        point = {
            "table": "kv-transfer", "transport": "NIXL, TCP", "way": way, "model": "M", "tokens": 8192,
            "requests": requests, "src": {"page": 16}, "dst": {"page": 16},
        }  # fmt: skip
        name = f"{way}, NIXL, TCP: M, {requests} at once" + "".join(f", {key}" for key in other)
        return Row(name=name, value=value, baseline=2.0, unit="GB/s", point=point | other).to_dict()

    rows = [row(way, n, n / 4) for way in ("staged", "direct") for n in (1, 4)]
    rows.append(row("staged", 1, 0.5, dst={"page": 64}))
    rows.append(
        row("staged beside its bound", 4, 1.5, table="kv-bound") | {"name": "its bound, NIXL, TCP: M, 4 at once"}
    )
    return {"rows": rows, "machine": {"cpu": "c", "cores": 2}, "commit": "abc", "command": "pdstage bench kv-transfer"}


def test_requests_at_once_are_shares_of_one_write():
    (found,) = plot.burst_plots(burst_report())
    assert found.file == "kv-transfer-nixl-tcp-16.svg"
    assert found.lines == [plot.Line("direct", [(1, 0.125), (4, 0.5)]), plot.Line("staged", [(1, 0.125), (4, 0.5)])]
    assert "kv-transfer-nixl-tcp-16.svg" in plot.paths_section({"kv-transfer": burst_report()})


def test_the_simulated_part_is_what_was_committed():
    held = plot.reports()
    found = plot.sizing_plot(held["cluster"])
    assert [line.label for line in found.lines] == [f"{n}% of the NIC" for n in (20, 40, 60, 80, 90)]
    assert {x for line in found.lines for x, _ in line.points} == {16, 32, 64, 128, 256}
    page = (plot.ROOT / plot.SIZING_PAGE).read_text()
    assert plot.written(page, plot.sizing_section(held), plot.SIZING_PAGE) == page, "run `make plots`"

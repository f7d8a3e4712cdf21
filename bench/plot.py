"""The measured parts of docs/kernels.md and transports.md, made from bench/results: plots and tables of them.

Only the plots need matplotlib.

    python -m pdstage.bench.plot
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pdstage
from pdstage.errors import UsageError

from .harness import command_of

ROOT = Path(pdstage.__file__).resolve().parent.parent
PAGE, PATHS_PAGE = Path("docs/kernels.md"), Path("docs/transports.md")
PLOTS, RESULTS = Path("docs/plots"), Path("bench/results")
BEGIN, END = "<!-- measured: made by `make plots`, do not edit -->", "<!-- /measured -->"
_N_MISSED = 20


class Line(NamedTuple):
    """One curve of a plot."""

    label: str
    points: list[tuple[float, float]]


class Plot(NamedTuple):
    """A plot as numbers: what it is called, its axes, its curves, and the heights that are targets."""

    file: str
    title: str
    x: str
    y: str
    lines: list[Line]
    targets: list[tuple[str, float]]


def roofline(name: str, title: str, points: list[tuple[str, int, float]]) -> Plot:
    """Fraction of a copy by run length; `points` are (label, run's bytes, fraction)."""
    return Plot(
        f"{name}-roofline.svg", f"{title}: share of a copy's speed", "bytes of one run", "share of a same-bytes copy",
        _lines(points), [("target from 256 B on", 0.9)],
    )  # fmt: skip


def _lines(points: list[tuple[str, int, float]]) -> list[Line]:
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for label, x, y in points:
        found[label].append((x, y))
    return [Line(label, sorted(line)) for label, line in sorted(found.items())]


def gpu_plots(report: dict[str, Any], name: str) -> list[Plot]:
    """The roofline by run length, and the curve over multiprocessors for each run length measured."""
    title = report["machine"]["gpu"]["name"]
    runs, sms = (_of_table(report, table) for table in ("runs", "sms"))
    plots = [roofline(name, title, [(_label(row), row["point"]["run_nbytes"], row["ratio"]) for row in runs])]
    for run in sorted({row["point"]["run_nbytes"] for row in sms}):
        points = [
            (_label(row), row["point"]["max_sms"], row["value"]) for row in sms if row["point"]["run_nbytes"] == run
        ]
        targets = [("a 400 Gb NIC", 50.0), ("NVLink", 400.0)]
        words = f"{title}: runs of {run} B by multiprocessors", "multiprocessors", "GB/s"
        plots.append(Plot(f"{name}-sms-{run}.svg", *words, _lines(points), targets))
    return plots


def _of_table(report: dict[str, Any], table: str) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if row["point"].get("table") == table]


def _label(row: dict[str, Any]) -> str:
    return f"{row['point']['way']}, {row['point']['variant']}"


def reports(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Committed reports by file name; quick looks are not results."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted((root / RESULTS).glob("*.json"))}
    return {name: report for name, report in found.items() if not report["quick"]}


def _gpus(held: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: report for name, report in held.items() if report["name"] == "gpu"}


def plots_of(held: dict[str, dict[str, Any]]) -> list[Plot]:
    """Of every GPU measured; of paths and bursts."""
    gpus = [plot for name, report in _gpus(held).items() for plot in gpu_plots(report, name)]
    return [*gpus, *path_plots(held["transfer"]), *burst_plots(held["kv-transfer"])]


def path_plots(report: dict[str, Any]) -> list[Plot]:
    """Staged and direct beside one bulk write by fragment size: one plot a transport, one curve a path and TP pair."""
    cells: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in _of_table(report, "paths"):
        cells[row["point"]["transport"]].append(row["point"])
    plots = []
    for name, found in sorted(cells.items()):
        points = [
            (f"{path}, TP{cell['src_tp']} to TP{cell['dst_tp']}", cell["run_nbytes"], cell[path] / cell["raw"])
            for cell in found
            for path in ("staged", "direct")
        ]
        file = f"transfer-{re.sub(r'[^a-z0-9]+', '-', name.lower())}.svg"
        words = f"{name}: a room's speed beside one bulk write", "bytes of one run", "share of a bulk write's speed"
        plots.append(Plot(file, *words, _lines(points), [("target", 0.7)]))
    return plots


def _taken(name: str, report: dict[str, Any]) -> list[str]:
    """On what, of which commit and by which command a report was taken."""
    on = report["machine"]
    return [
        f"`{name}.json`: {on['cpu']}, {on['cores']} cores, commit `{report['commit']}`, `{command_of(report)}`.",
        "",
    ]


def paths_section(held: dict[str, dict[str, Any]]) -> str:
    """docs/transports.md's measured part."""
    text = _taken("transfer", held["transfer"])
    for plot in path_plots(held["transfer"]):
        text += [f"![{plot.title}](plots/{plot.file})", "", *_table(plot), ""]
    rows = [row for row in held["transfer"]["rows"] if not row["point"]]
    text += [f"* {row['name']}: {row['value']:.0f} % ({row['detail']})" for row in rows]
    text += ["", "Whole requests, as CollectiveX measures them:", "", *_taken("kv-transfer", held["kv-transfer"])]
    for plot in burst_plots(held["kv-transfer"]):
        text += [f"![{plot.title}](plots/{plot.file})", ""]
    return "\n".join([BEGIN, "", *text, END])


def burst_plots(report: dict[str, Any]) -> list[Plot]:
    """Requests at once beside one contiguous write: one plot a transport and page size, one curve a way."""
    points: dict[tuple[str, int], list[tuple[str, int, float]]] = defaultdict(list)
    rows = _of_table(report, "kv-transfer")
    ladder = max((row["point"] for row in rows), key=lambda point: point["requests"])
    for row in rows:
        point = row["point"]
        if point["src"] == point["dst"] and (point["model"], point["tokens"]) == (ladder["model"], ladder["tokens"]):
            points[point["transport"], point["src"]["page"]].append((point["way"], point["requests"], row["ratio"]))
    plots = []
    for (name, page), found in sorted(points.items()):
        file = f"kv-transfer-{re.sub(r'[^a-z0-9]+', '-', name.lower())}-{page}.svg"
        title = f"{name}, pages of {page}: requests beside one contiguous write"
        plots.append(Plot(file, title, "requests at once", "share of one write's speed", _lines(found), []))
    return plots


def section(held: dict[str, dict[str, Any]]) -> str:
    """The page's measured part: what was measured, on what, and each plot with its numbers."""
    text = []
    for name, report in _gpus(held).items():
        where = report["machine"]["gpu"]["name"]
        text += [f"`{name}.json`: {where}, commit `{report['commit']}`, `{command_of(report)}`.", ""]
        for plot in gpu_plots(report, name):
            text += [f"![{plot.title}](plots/{plot.file})", "", *_table(plot), ""]
        text += [*_missed(name, report), ""]
    return "\n".join([BEGIN, "", *text, END])


def _table(plot: Plot) -> list[str]:
    at = sorted({x for line in plot.lines for x, _ in line.points})
    head = [f"| {plot.x} | {' | '.join(f'{x:g}' for x in at)} |", f"|---|{'---:|' * len(at)}"]
    body = []
    for line in plot.lines:
        held = dict(line.points)
        body.append(f"| {line.label} | {' | '.join(f'{held[x]:.3g}' if x in held else '' for x in at)} |")
    return head + body


def _missed(name: str, report: dict[str, Any]) -> list[str]:
    """How many targets were met, and the rows that missed theirs by most."""
    aimed = [row for row in report["rows"] if row["target"] is not None]
    missed = sorted((row for row in aimed if not row["met"]), key=_share)
    n_met = len(aimed) - len(missed)
    text = [f"{n_met} of {len(aimed)} targets were met. Missed by most (all: `bench/results/{name}.json`):", ""]
    for row in missed[:_N_MISSED]:
        reached = f"{row['value']:.4g} {row['unit']}, ratio {row['ratio']:.3g}; {_share(row):.2f} of the target"
        text.append(f"* {row['name']}: {reached}")
    return text


def _share(row: dict[str, Any]) -> float:
    """What a row reached, as a share of its target."""
    reached = row["ratio"] if row["on"] == "ratio" else row["value"]
    share: float = reached / row["target"] if row["better"] == "higher" else row["target"] / reached
    return share


def written(page: str, part: str, path: Path = PAGE) -> str:
    """The page with its measured part replaced. Raises `UsageError` where the page has no place for it."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"{path} has no measured part", remedy=f"put {BEGIN} and {END} into it", field="page")
    return before + part + after


def draw(plot: Plot, path: Path) -> None:
    """Writes the plot as an SVG that is the same whenever the numbers are."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "pdstage", "svg.fonttype": "none"})
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for line in plot.lines:
        axes.plot(*zip(*line.points, strict=True), marker="o", markersize=3, linewidth=1.2, label=line.label)
    for label, height in plot.targets:
        axes.axhline(height, color="grey", linestyle="--", linewidth=0.8)
        axes.annotate(label, (1, height), xycoords=("axes fraction", "data"), fontsize=8, ha="right", va="bottom")
    axes.set(xlabel=plot.x, ylabel=plot.y, title=plot.title)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    pyplot.close(figure)


def main(root: Path = ROOT) -> int:
    if not importlib.util.find_spec("matplotlib"):
        raise UsageError("plots need matplotlib", remedy="pip install 'pdstage[dev]'", field="matplotlib")
    held = reports(root)
    (root / PLOTS).mkdir(parents=True, exist_ok=True)
    for plot in plots_of(held):
        draw(plot, root / PLOTS / plot.file)
        print(root / PLOTS / plot.file)
    for path, part in (
        (PAGE, section(held)),
        (PATHS_PAGE, paths_section(held)),
    ):
        page = root / path
        page.write_text(written(page.read_text(), part, path))
    return 0


if __name__ == "__main__":
    sys.exit(main())

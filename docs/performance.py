"""docs/performance.md, made from bench/results: every committed number with its baseline, target, machine and commit.

    python docs/performance.py

Must not know any bench by name, so that a new result is on the page once it is committed. Cells of plots are left to
the pages that show the plots. `tests/docs/test_generated.py` fails while the page is stale.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "bench" / "results"
PLOTS = ROOT / "docs" / "plots"
N_OPEN = 20  # rows that are shown without a click
HEAD = """# Performance

<!-- made by `make docs` from bench/results, do not edit -->

Every number stands beside a baseline that was measured in the same run, in turn with it. *ratio* is value by
baseline. *met* is against the target: a target with x is of the ratio. Numbers are medians, without a GPU unless the
heading names one. [kernels](kernels.md) explains the sections and how to take the numbers yourself;
[transports](transports.md) compares staged and direct over every transport.

Targets were missed on two shared cores for these reasons:

* Staged cannot be 6 x and 20 x direct where the raw bulk write itself is 5 x (1 KiB runs) and 9 to 14 x (256 B runs),
  as over TCP. Direct spans are coalesced and posted as arrays, so direct is fast too. With one process a side, TP4 ->
  TP2, staged is 5.3 x and 21 x direct ([transports](transports.md)).
* Gather, the transport's own copy and scatter share one memory. Two processes that copy at once get 4 GB/s each; one
  alone gets 7 GB/s. Staging moves about three times the raw write's bytes.
* Host copies of 64 and 128 B from pool to pool cost an address each on both sides, which the tuned loop has in a list
  already. A gather of single heads of 64 B reads a line of 512: neither it nor the loop is near a streaming copy.
* Beside a busy main thread, a bare echo over the same kind of socket already takes longer than the target of 2 ms.
"""


def reports() -> dict[str, dict[str, Any]]:
    """Committed reports by file name; quick looks are not results."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    return {name: report for name, report in found.items() if not report["quick"]}


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(section(name, report) for name, report in reports().items())])


def section(name: str, report: dict[str, Any]) -> str:
    """One report: what it ran on, its plots, its rows."""
    on = report["machine"]
    where = ", ".join(
        filter(
            None,
            (on.get("gpu", {}).get("name"), on["cpu"], "cores" in on and f"{on['cores']} cores", on.get("system")),
        )
    )
    text = [f"## {name}", "", f"{where}; commit `{report['commit']}`; `{report['command']}`.", ""]
    text += [f"Not measured: {one}." for one in report.get("left_out", ())]
    for plot in sorted(PLOTS.glob(f"{name}-*.svg")):
        text += [f"![{plot.stem.replace('-', ' ')}](plots/{plot.name})", ""]
    rows = [row for row in report["rows"] if not row["point"]]
    cells = len(report["rows"]) - len(rows)
    shown = rows if len(rows) <= N_OPEN else [row for row in rows if row["target"] is not None]
    text += _table(shown) if shown else []
    if len(shown) < len(rows):
        text += ["", f'??? note "All {len(rows)} rows"', "", *(f"    {line}" for line in _table(rows))]
    if cells:
        text += ["", f"{cells} more are cells of a plot or of its table."]
    return "\n".join([*text, ""])


def _table(rows: list[dict[str, Any]]) -> list[str]:
    head = ["| what | value | baseline | ratio | target | met | |", "|---|---:|---:|---:|---:|---|---|"]
    return head + [_row(row) for row in rows]


def _row(row: dict[str, Any]) -> str:
    target = ""
    if row["target"] is not None:
        sign = ">=" if row["better"] == "higher" else "<="
        target = f"{sign} {row['target']:g} {'x' if row['on'] == 'ratio' else row['unit']}"
    met = {True: "yes", False: "**no**", None: ""}[row["met"]]
    numbers = f"{_short(row['value'])} {row['unit']} | {_short(row['baseline'])} {row['unit']} | {row['ratio']:.3g}"
    return f"| {row['name']} | {numbers} | {target} | {met} | {row['detail']} |"


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def write() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    sys.exit(write())

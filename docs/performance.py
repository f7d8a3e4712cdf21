"""docs/performance.md, made from bench/results: committed numbers, each with its baseline, target, machine and commit.

    python docs/performance.py

Must not know any bench by name, so that a new result is on the page once it is committed: at most twenty rows, those
with a target first. Cells of plots are left to the pages that show the plots. `tests/docs/test_generated.py` fails
while the page is stale.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pdstage.bench.harness import command_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "bench" / "results"
PLOTS = ROOT / "docs" / "plots"
N_SHOWN = 20
HEAD = """# Performance

<!-- made by `make docs` from bench/results, do not edit -->

Every number stands beside a baseline that was measured in the same run, in turn with it. *ratio* is value by
baseline. *met* is against the target: a target with x is of the ratio. Numbers are medians, without a GPU unless the
heading names one. [kernels](kernels.md) explains the sections and how to take the numbers yourself;
[transports](transports.md) compares staged and direct over every transport.

Targets were missed on two shared cores for these reasons, by profiles (`perf record -e cpu-clock`, `cProfile`) and by
`pdstage plot TRACE --steps`. Times are of the newer of two machines, that of *plan*, *rooms* and *wire*; *kv-transfer*,
*transfer* and *host-kernels* were measured on an older, slower one:

* *Staged beside its bound, 8 requests at once* (8 x 32 MiB, `perf`, both sides' cores). A chunk of 4 MiB takes prefill
  0.23 ms of gather, 0.4 ms of UCX's copy and 0.1 ms of calls between them: 52 % of its samples are in the kernel, most
  of them in that copy, 31 % in gather and 15 % in the interpreter. At decode 56 % are in scatter, and 29 % in the
  interpreter. Longer requests travel in longer chunks, of which the calls are a smaller share. Over TCP 69 % of
  prefill's samples and half of decode's are in the kernel, and 11 and 20 % in the interpreter; while prefill gathers,
  nothing refills the socket.
* *Small requests alone*: DeepSeek with one layer sends 4.7 to 9 MB. The handshake of a room, its lease and its first
  gather take as long as all bytes.
* *Direct beside NIXL's own lists*, where both sides are alike. A direct room of 32 MiB over shared memory takes 1.3 ms
  more than the list's 4.8: Open 0.7 ms until prefill has it, 0.1 for descriptors and their checks, 0.5 from the
  write's end to Success. Over TCP most of that hides behind the bytes. `local`, which `auto` takes within a host,
  moves the same pages at 1.1 times the speed of NIXL's lists by its better path (median of 26 cells of 32 MiB and
  more; 0.66 in one). A pool of more than 1 GiB is not mapped ahead: there direct, which `auto` takes, waits for a page
  fault at each page that prefill has not written before, and staged takes 0.34 to 0.7 of its time (Llama-70B).
* *Rooms.* 71 % of both sides' samples are in the interpreter, 23 % in the kernel (sockets), 1 % in own C++. A room was
  1,084 calls on both sides, spread over 330 functions: the dearest has 2.5 % of the time, and wire, timers and coverage
  together 10 %. So there is no hot end to compile. Prefill's process takes 132 us a room, of which 103 are in turns of
  its node. With 10,000 rooms open Python's garbage collector walks them: without it their cost is 1.2 x.
* An idle room is two messages one after the other, each from a sleeping process to another: the echo alone takes 90 to
  150 us. `bind` takes 55 us, prefill's turn 160 and decode's 100, what follows their last message included.
* *A page between two processes on one H200* (at 1fb54d5, `local`, inline, 1.85 ms): receive to bind 0.16, Open 0.49,
  the gather 0.31, to the write 0.06, write 0.06, tag 0.16, scatter 0.34, to Success 0.12. Without a GPU the gather
  and the scatter of such a room take 0.12 and 0.14: the rest is two processes that take turns on one device. `local`
  refuses device memory of processes under MPS, so the room was not measured there.
* *The first room there* (18 to 24 ms over `local`, 42 to 48 over NIXL, beside 3): 2 ms of HTTP, the handshake and the
  peer's checks on both sides, 1 to 2 of CUDA IPC, plans and tables; NIXL's `add_remote_agent` takes 16, and the first
  message on the other side 12.
* Host copies of 64 and 128 B from pool to pool cost an address each on both sides, which the tuned loop has in a list
  already. A gather of single heads of 64 B reads a line of 512: neither it nor the loop is near a streaming copy.
* *Cells* are medians of three to nine on a machine that others share: two runs of one commit differ by up to 30 % in a
  cell, and `auto` may miss in one where both paths are alike.
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
    text = [f"## {name}", "", f"{where}; commit `{report['commit']}`; `{command_of(report)}`.", ""]
    text += [f"Not measured: {one}." for one in report.get("left_out", ())]
    for plot in sorted(PLOTS.glob(f"{name}-*.svg")):
        text += [f"![{plot.stem.replace('-', ' ')}](plots/{plot.name})", ""]
    rows = [row for row in report["rows"] if row["point"].get("table", "rooms") == "rooms"]
    shown = sorted(rows, key=lambda row: row["target"] is None)[:N_SHOWN]
    text += _table(shown) if shown else []
    if more := len(report["rows"]) - len(shown):
        text += ["", f"{more} more rows: [bench/results/{name}.json](../bench/results/{name}.json)."]
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

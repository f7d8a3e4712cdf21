"""The knobs of docs/tune.md, each with what the committed results in bench/results say of it.

Read by `generate`. A bench that no longer has a row fails here by the row's name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Report:
    """A committed report's rows by name."""

    def __init__(self, name: str) -> None:
        held = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
        self.rows = {row["name"]: row for row in held["rows"]}
        self.link = f"([{name}](performance.md#{name}))"

    def value(self, row: str) -> float:
        return float(self.rows[row]["value"])

    def ratios(self, *parts: str) -> list[float]:
        found = [row["ratio"] for name, row in self.rows.items() if all(part in name for part in parts)]
        if not found:
            raise KeyError(parts)
        return sorted(found)


class Knob(NamedTuple):
    name: str
    default: str
    turn: str
    results: str = "not measured"


def table() -> str:
    """One row a knob."""
    rows = ["| knob | default | turn it when | what the results say |", "|---|---|---|---|"]
    return "\n".join(rows + [f"| {' | '.join(knob)} |" for knob in knobs()])


def knobs() -> list[Knob]:
    transfer, rooms = Report("transfer"), Report("rooms")
    host = Report("host-kernels")
    near = transfer.rows["cells where auto is within 10 % of the better path, all"]
    plain, summed = (host.rows[f"{way}, slots, 256 B runs, 64 MiB"]["ratio"] for way in ("gather", "gather + checksum"))
    cluster = Report("cluster")
    scarce, enough = (cluster.ratios("p99, load 60%", f"staging {mib} MiB")[0] for mib in (16, 32))
    few, many = (
        cluster.rows[f"p99, 4 NICs, each write over one, {n} send buffers, load 80%"]["ratio"] for n in (4, 16)
    )
    sizing = "([simulated](#how-much-staging-memory))"
    wait = "Open to Success, busy main threads, p99, local, {}"
    return [
        Knob("`path`", '`"auto"`', "hardly ever: calibrate instead",
             f"auto is within 10 % of the better path in {near['value']:.0f} % of cells: "
             f"{near['detail'].partition(';')[0]} {transfer.link}"),
        Knob("`calibration`", "the transport's traits", "once for each kind of pair of hosts",
             f"the same cells were chosen by one {transfer.link}"),
        Knob("`Config.chunk_nbytes`", "64 MiB", "short writes to other peers must come between those of a long one",
             "the longest chunk; chunks are sized by the transport's costs, 4 MiB at least"),
        Knob("`staging_nbytes`", "256 MiB", "many rooms at once wait for leases, or memory is short",
             f"64 x 64 ranks at 60 % of their NICs: p99 beside no limits is {scarce:.2f} x with 16 MiB at decode, "
             f"{enough:.2f} x with 32 MiB {sizing}"),
        Knob("`n_lanes` (decode)", "2", "writers that get stuck hold up others; each lane must hold the largest chunk"),
        Knob("`n_buffers` (prefill)", "4",
             "more peers are to be written at once, or each write goes over one of several NICs: one peer gets all but "
             "one of them",
             f"4 NICs, a write over one of them: p99 beside no limits is {few:.1f} x with 4 and {many:.1f} x with 16 "
             f"{sizing}"),
        Knob("`max_sms`", "8",
             "a GPU's copies are slower than what carries them (raise it), or decode steps get longer beside them "
             "(lower it); None takes the whole GPU"),
        Knob("`progress`", '`"inline"`', "the engine may stop polling, or its steps are long",
             f"rooms a second: {rooms.value('rooms a second, local, inline'):,.0f} inline, "
             f"{rooms.value('rooms a second, local, thread'):,.0f} thread; one room beside busy main threads, p99: "
             f"{rooms.value(wait.format('inline')) / 1e3:.1f} ms inline, "
             f"{rooms.value(wait.format('thread')) / 1e3:.1f} ms thread {rooms.link}"),
        Knob("page size, memory order", "the engine's", "runs are short: direct is slow then, staged hardly is",
             "[by bytes of one run](transports.md#path-choice-and-calibration)"),
        Knob("`Config.checksums`", "off", "a fabric or a host is suspected",
             f"gather of 256 B runs: {summed:.0%} of a streaming copy with, {plain:.0%} without {host.link}"),
        Knob("`Config.convert`", "off", "prefill in bf16, decode in fp8, on GPUs: half of the bytes travel"),
    ]  # fmt: skip

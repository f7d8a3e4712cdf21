"""How much staging memory a decode rank needs: `python -m tests.sim.cluster [--small] [--json FILE]`.

64 prefill and 64 decode ranks, real cores on a virtual clock (`fleet`), NICs that share their speed (`links`). Requests
arrive at random, each from one prefill rank to one decode rank, all of its KV there at once: the worst case, as chunks
that leave while prefill computes come one by one. The baseline has no staging memory, no messages and no copies: each
request is one write, begun when it arrives, over the same NICs.

Times are those of a 400 Gb/s NIC (50 GB/s), copies of 100 GB/s, and 50 us for a control message. They are assumed, not
measured; what is real is what the protocol does with them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pdstage.bench.harness import Row, commit
from tests.sim.fleet import HEADS, LAYERS, Fleet, Job, Node, Times
from tests.sim.gauges import jain
from tests.sim.links import Links

TOKEN_NBYTES = 40 << 10
"""Of one rank: Llama-3-70B in bf16 at TP 8."""
WIDTH = TOKEN_NBYTES // (2 * LAYERS * HEADS)
TOKENS = (1024, 2048, 4096)
NIC = 50e9
TIMES = Times(gather_s=20e-6, scatter_s=20e-6, copy_s=1 / 100e9)
N_LANES, PREFILL_STAGING = 2, 256 << 20
LOADS, STAGING_MIB = (0.2, 0.4, 0.6, 0.8, 0.9), (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`load`: bytes that arrive for a decode rank, as a share of its NICs' speed."""

    load: float = 0.8
    staging_mib: int = 256
    """Of a decode rank."""
    n_buffers: int = 4
    """Of a prefill rank."""
    n_ranks: int = 64
    n_targets: int = 64
    """Decode ranks that requests go to."""
    n_rooms: int = 1500
    n_rails: int = 1
    striped: bool = False
    seed: int = 1


class Outcome(NamedTuple):
    """Milliseconds from a request's arrival to its last byte's, and bytes a second while requests arrived."""

    p50_ms: float
    p99_ms: float
    goodput: float
    fairness: float
    """Jain's index over the bytes a second that each request got."""


class _Requests:
    """The same ones for both schedules: when, from where, to where, and how long."""

    def __init__(self, case: Case) -> None:
        fleet = Fleet(seed=case.seed)
        mean_s = statistics.mean(TOKENS) * TOKEN_NBYTES / (case.load * NIC * case.n_targets)
        self.at: list[tuple[float, int, int, int]] = []
        at = 0.0
        for _ in range(case.n_rooms):
            at += fleet.random.expovariate(1 / mean_s)
            src, dst = fleet.random.randrange(case.n_ranks), fleet.random.randrange(case.n_targets)
            self.at.append((at, src, dst, fleet.random.choice(TOKENS)))
        self.last_at = at


def _outcome(requests: _Requests, ended: dict[int, float]) -> Outcome:
    took = [ended[n] - began for n, (began, *_) in enumerate(requests.at)]
    arrived = sum(tokens for n, (*_, tokens) in enumerate(requests.at) if ended[n] <= requests.last_at)
    speeds = [tokens / seconds for (*_, tokens), seconds in zip(requests.at, took, strict=True)]
    cuts = statistics.quantiles(took, n=100)
    return Outcome(1e3 * cuts[49], 1e3 * cuts[98], arrived * TOKEN_NBYTES / requests.last_at, jain(speeds))


def perfect(case: Case) -> Outcome:
    """Without staging memory, messages and copies, over one NIC of a rank's whole speed."""
    requests, fleet, ended = _Requests(case), Fleet(), dict[int, float]()
    links = Links(fleet, bytes_per_s=NIC)
    for n, (at, src, dst, tokens) in enumerate(requests.at):
        ends = Node(b"P%d" % src, (1, 0), None), Node(b"D%d" % dst, (1, 0), None)
        done = partial(_note, ended, n, fleet)
        fleet.at(at, links.write, *ends, tokens * TOKEN_NBYTES, done)
    fleet.run_while(lambda: len(ended) < len(requests.at), limit_s=600.0)
    return _outcome(requests, ended)


def _note(ended: dict[int, float], n: int, fleet: Fleet) -> None:
    ended[n] = fleet.now


def simulated(case: Case) -> Outcome:
    """By the protocol."""
    staging = case.staging_mib << 20
    fleet = Fleet(
        seed=case.seed, lane_nbytes=staging // N_LANES, n_lanes=N_LANES, n_buffers=case.n_buffers,
        buffer_nbytes=PREFILL_STAGING // case.n_buffers, width=WIDTH, times=TIMES, wait_s=600, open_wait_s=600,
    )  # fmt: skip
    links = Links(fleet, bytes_per_s=NIC / case.n_rails, n_rails=case.n_rails, striped=case.striped)
    fleet.write = links.write
    prefill = [fleet.add("prefill", b"P%d" % n) for n in range(case.n_ranks)]
    decode = [fleet.add("decode", b"D%d" % n) for n in range(case.n_targets)]
    _greet(fleet, prefill, decode)
    requests, ended, start = _Requests(case), dict[int, float](), fleet.now
    numbers: dict[bytes, int] = {}

    def end(job: Job) -> None:
        assert not job.n_failed, "a room failed"
        ended[numbers[job.key]] = job.ended_at - start

    fleet.on_end = end
    for n, (at, src, dst, tokens) in enumerate(requests.at):
        job = Job(b"room %d" % n, (prefill[src],), (decode[dst],), tokens, tokens, 0.0)
        numbers[job.key] = n
        fleet.at(start + at, fleet.route, job)
    fleet.run_while(lambda: len(ended) < len(requests.at), limit_s=600.0)
    return _outcome(requests, ended)


def _greet(fleet: Fleet, prefill: list[Node], decode: list[Node]) -> None:
    """Every pair has met before: a session begins once, and requests come for days."""
    left = Counter[bytes]()
    fleet.on_end = lambda job: left.subtract([job.key])
    for p, src in enumerate(prefill):
        for d, dst in enumerate(decode):
            job = Job(b"first %d %d" % (p, d), (src,), (dst,), 64, 64, 0.0)
            left[job.key] += 1
            fleet.at(fleet.now + p * 1e-3, fleet.route, job)
    fleet.run_while(lambda: any(left.values()), limit_s=60.0)


def sizing(given: Case, loads: tuple[float, ...], stagings: tuple[int, ...]) -> list[Row]:
    """Staging memory against arrival rate."""
    rows = []
    for load in loads:
        best = perfect(replace(given, load=load))
        for mib in stagings:
            found = simulated(replace(given, load=load, staging_mib=mib))
            rows += _rows(f"load {load:.0%}, staging {mib} MiB", found, best, {"load": load, "staging_mib": mib})
    return rows


def incast(given: Case) -> list[Row]:
    """All prefill ranks to an eighth of the decode ranks, near saturation."""
    case = replace(given, n_targets=max(1, given.n_targets // 8), load=0.9, n_rooms=given.n_rooms // 2)
    words = f"incast {case.n_ranks} to {case.n_targets}, load 90%"
    return _rows(words, simulated(case), perfect(case), {"table": "incast"})


def rails(given: Case) -> list[Row]:
    """One NIC, and four of a quarter of its speed: each write over one of them, or over all at once."""
    rows, best = [], perfect(given)
    for n, striped, n_buffers in ((1, False, 4), (4, True, 4), (4, False, 4), (4, False, 16)):
        case = replace(given, n_rails=n, striped=striped, n_buffers=n_buffers)
        words = "1 NIC" if n == 1 else f"{n} NICs, each write over {'all' if striped else 'one'}"
        words += f", {n_buffers} send buffers, load 80%"
        rows += _rows(words, simulated(case), best, {"table": "rails"})
    return rows


def _rows(words: str, found: Outcome, best: Outcome, point: dict[str, object]) -> list[Row]:
    detail = "simulated; baseline: without staging memory, messages and copies"
    point = {"table": "sizing", "words": words} | point

    def row(what: str, value: float, baseline: float, unit: str, better: str = "lower") -> Row:
        return Row(
            name=f"{what}, {words}", value=value, baseline=baseline, unit=unit, better=better,  # type: ignore[arg-type]
            detail=detail, point=point | {"what": what},
        )  # fmt: skip

    return [
        row("p50", found.p50_ms, best.p50_ms, "ms"),
        row("p99", found.p99_ms, best.p99_ms, "ms"),
        row("goodput", found.goodput / 1e9, best.goodput / 1e9, "GB/s", "higher"),
        row("fairness", found.fairness, best.fairness, "Jain", "higher"),
    ]


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.cluster", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="what the tests run: seconds, not minutes")
    parser.add_argument("--json", type=Path, help="write the rows there, for docs/tune.md")
    given = parser.parse_args(args)
    case = Case(n_ranks=8, n_targets=8, n_rooms=100) if given.small else Case()
    loads, stagings = (LOADS[3:4], STAGING_MIB[::3]) if given.small else (LOADS, STAGING_MIB)
    rows = [*sizing(case, loads, stagings), *incast(case), *rails(case)]
    for row in rows:
        print(f"{row.name:60} {row.value:9.3f} {row.baseline:9.3f} {row.unit:5} {row.ratio:6.3f}", flush=True)
    if given.json:
        report = {
            "name": "cluster", "quick": given.small, "command": "make cluster", "commit": commit(),
            "machine": {"cpu": "simulated on a virtual clock"}, "rows": [row.to_dict() for row in rows],
        }  # fmt: skip
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Many seeds over a few processes, and what is told of them: of the cores' runs and of whole nodes' alike.

Must not know any invariant: a `Violation` names its own.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pdstage.watch.terminal import progress

Event = tuple[object, ...]


class Violation(AssertionError):
    """Something that must hold does not: where it has one, the number of its invariant of DESIGN 8 ("I2"), or "error"
    for an unexpected raise; and what.
    """

    def __str__(self) -> str:
        return ": ".join(self.args)


@dataclass
class Report:
    """What a run did: its steps, for the cores' runs by kind too, and how rooms ended at their ranks."""

    seed: int
    n_steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    events: list[Event] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)


class Failed(Violation):
    """A violation with the run it came from: its `events` and `trace` go up to it."""

    def __init__(self, violation: Violation, report: Report) -> None:
        super().__init__(*violation.args)
        self.report = report
        self.add_note(f"seed {report.seed}")


def one_of_many(simulate: Callable[[int], Report], seed: int) -> Report | tuple[int, str]:
    """A report without its schedule, or (seed, what broke)."""
    try:
        report = simulate(seed)
    except Failed as failed:
        return seed, str(failed).partition("\n")[0]
    report.events, report.trace = [], []
    return report


def run_many(simulate: Callable[[int], Report], seeds: Sequence[int], workers: int = 2) -> int | None:
    """Every seed, over `workers` processes. Prints what they did; the first that failed."""
    reports: list[Report] = []
    failed: list[tuple[int, str]] = []
    one = partial(one_of_many, simulate)
    # The bar's thread begins after the fork: a child would have its locks as they happened to be.
    with multiprocessing.get_context("fork").Pool(workers) as pool, progress("seeds", len(seeds)) as advance:
        for told in pool.imap_unordered(one, seeds, chunksize=8):
            if isinstance(told, Report):
                reports.append(told)
            else:
                failed.append(told)
            advance(f"seeds, {len(failed)} failed" if failed else "")
    print(tell(reports, failed))
    return min(failed)[0] if failed else None


def tell(reports: Sequence[Report], failed: Sequence[tuple[int, str]] = ()) -> str:
    """Many runs together."""
    said = f"; FAILED: {', '.join(f'{seed} ({what})' for seed, what in failed)}" if failed else ""
    lines = [f"{len(reports) + len(failed)} seeds, {sum(one.n_steps for one in reports)} steps{said}"]
    for what, counted in (
        ("steps by kind", [report.counts for report in reports]),
        ("rooms at their ranks", [report.outcomes for report in reports]),
    ):
        many = sum(counted, Counter[str]()).most_common()
        lines += [f"{what}: {', '.join(f'{n} {kind}' for kind, n in many)}"] if many else []
    return "\n".join(lines)

"""Many cases on the cores there are, in processes that share nothing."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.any_layout import check

_MAX_TOLD = 3


@dataclass
class Report:
    """What `n_cases` cases were like, the processor seconds they took, and the first of those that went wrong."""

    n_cases: int = 0
    cpu_s: float = 0.0
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {what}" for what, n in sorted(self.seen.items()))
        rate = f"{self.n_cases} cases, {1e3 * self.cpu_s / max(1, self.n_cases):.1f} ms of a core each: {kinds}"
        return "\n\n".join([rate, *self.wrong])

    def add(self, other: Report) -> None:
        self.n_cases += other.n_cases
        self.cpu_s += other.cpu_s
        self.seen += other.seen
        self.wrong = (self.wrong + other.wrong)[:_MAX_TOLD]


def some(first: int, stop: int) -> Report:
    """The cases of seeds `[first, stop)`, one after the other."""
    report, began_at = Report(), time.process_time()
    for seed in range(first, stop):
        report.n_cases += 1
        try:
            case = check.run(seed)
        except check.Wrong as wrong:
            report.wrong.append(str(wrong))
            if len(report.wrong) == _MAX_TOLD:
                break
            continue
        report.seen.update(of.kind for of in case.logical)
        report.seen[case.path] += 1
        report.seen["destination ranks"] += case.dst.tp * case.dst.pp
    report.cpu_s = time.process_time() - began_at
    return report


def run(seeds: range, batch: int = 500) -> Report:
    """All of `seeds`, in as many processes as there are cores for."""
    report = Report()
    cores = len(os.sched_getaffinity(0))
    starts = range(seeds.start, seeds.stop, batch)
    with ProcessPoolExecutor(min(cores, len(starts)), multiprocessing.get_context("spawn")) as workers:
        for one in workers.map(some, starts, [min(start + batch, seeds.stop) for start in starts]):
            report.add(one)
    return report

"""Compiles all kernels of the other sections before anything is timed: on all cores, into the caches on disk.

Each process makes real, tiny plans of some of the cases, and runs each once; other processes find what it compiled. So
it is also the first test whether a kernel runs at all.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR

from . import shapes
from .bed import Bed
from .gpu_kernels import NARROW, Case, model_case, runs_case
from .harness import Row
from .variants import plan_of

if TYPE_CHECKING:
    from collections.abc import Iterator

_NBYTES = 1 << 16
_WIDTHS = (64, *NARROW, 12, 256, 4096, 65536)


class Job(NamedTuple):
    """One case, by its run length or its pair and direction, and how it is staged."""

    variant: str
    run_nbytes: int
    pair: int
    way: str
    order: str
    checksum: bool


def jobs(variants: list[str]) -> list[Job]:
    """The kinds of plan: every width and model, both staged orders, with and without a checksum."""
    kinds = [(width, 0, "") for width in _WIDTHS]
    kinds += [(0, pair, way) for pair in range(len(shapes.PAIRS)) for way in ("gather", "scatter")]
    return [
        Job(variant, *kind, order, checksum)
        for kind in kinds
        for order in (TOKEN_MAJOR, HEAD_MAJOR)
        for checksum in (False, True)
        for variant in variants
    ]


def rows(bed: Bed, quick: bool) -> Iterator[Row]:
    """One row: the seconds it took, beside the sum of all processes' seconds."""
    wanted = jobs(bed.variants)[:: 9 if bed.kind == "cpu" else 1]
    n_processes = min(len(os.sched_getaffinity(0)), 16, len(wanted)) if bed.kind != "cpu" else 1
    begun = time.perf_counter()
    # It says so if one of its processes is killed; multiprocessing's pool waits for that one for ever.
    with ProcessPoolExecutor(n_processes, multiprocessing.get_context("spawn")) as pool:
        parts = [wanted[n::n_processes] for n in range(n_processes)]
        done = list(pool.map(compile_all, [bed.device] * n_processes, parts))
    seconds = time.perf_counter() - begun
    failed = [said for part in done for said in part[1]]
    yield Row(
        name="kernels compiled and tried",
        value=seconds,
        baseline=sum(part[0] for part in done),
        unit="s",
        better="lower",
        detail=f"{len(wanted)} plans by {n_processes} processes; baseline: the seconds of all processes",
        point={"table": "compile", "n_plans": len(wanted), "n_processes": n_processes},
    )
    if failed:
        raise RuntimeError(f"{len(failed)} plans do not work: {'; '.join(failed[:5])}")


def compile_all(device: str, wanted: list[Job]) -> tuple[float, list[str]]:
    """The seconds of this process, and what went wrong."""
    begun, failed = time.perf_counter(), list[str]()
    beds = {variant: Bed(device, (variant,)) for variant in {job.variant for job in wanted}}
    for job in wanted:
        try:
            _try(beds[job.variant], job)
        except Exception as error:  # noqa: BLE001  (the others are still worth compiling; the section fails by name)
            failed.append(f"{job}: {type(error).__name__}: {error}"[:400])
    return time.perf_counter() - begun, failed


def _try(bed: Bed, job: Job) -> None:
    case = _case(bed, job)
    plan = plan_of(case.pool, case.select, job.order, job.variant, checksum=job.checksum)
    total = bed.memory(8, poison=0)
    at = (case.staging.data_ptr(), case.nbytes, case.index, case.tokens)
    for sum_ptr in (0, total.data_ptr()) if job.checksum else (0,):
        plan.gather(*at, sum_ptr=sum_ptr)
        plan.scatter(*at, sum_ptr=sum_ptr)
    plan.copy_to(plan, case.index, case.index, case.tokens)
    bed.wait()


def _case(bed: Bed, job: Job) -> Case:
    if job.run_nbytes:
        return runs_case(bed, job.run_nbytes, max(_NBYTES, 32 * job.run_nbytes))
    pair = shapes.PAIRS[job.pair]
    return model_case(bed, pair, 2 * pair.model.page, job.way)

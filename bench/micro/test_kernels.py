"""Gather and scatter of one call, one kernel and run length at a time, for `pytest bench/micro --benchmark-only`.

For use while changing a kernel; committed numbers come from `pdstage bench`. 16 MiB from a pool twice as large. On a
GPU a round is a call and the wait for it, so small times include the launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

from pdstage.bench import curves, variants
from pdstage.bench.bed import Bed
from pdstage.bench.gpu_kernels import Case, runs_case

if TYPE_CHECKING:
    from collections.abc import Callable

NBYTES = 16 << 20
RUNS = (64, 256, 1024, 65536)
VARIANTS = [
    pytest.param(v, id=v.replace(" ", "-"), marks=() if v == variants.HOST else (pytest.mark.gpu,))
    for v in (variants.HOST, *variants.ON_GPU)
]


def cases(function: Callable[..., None]) -> Callable[..., None]:
    """Every kernel at every run length."""
    lengths = pytest.mark.parametrize("run_nbytes", RUNS, ids=lambda n: curves.size_name(n).replace(" ", ""))
    kernels = pytest.mark.parametrize("variant", VARIANTS)
    decorated: Callable[..., None] = lengths(kernels(function))
    return decorated


def case_of(variant: str, run_nbytes: int) -> Case:
    problem = variants.missing(variant)
    if problem:
        pytest.skip(f"{variant}: {problem}")
    return runs_case(Bed("cpu" if variant == variants.HOST else "cuda:0", (variant,)), run_nbytes, NBYTES)


def measure(benchmark: Any, case: Case, variant: str, way: str) -> None:  # noqa: ANN401  (pytest-benchmark's fixture)
    work = case.works(variant)[way]

    def call() -> None:
        work()
        case.bed.wait()

    benchmark.group = f"{way} {NBYTES >> 20} MiB"
    benchmark.extra_info["nbytes"] = case.nbytes
    benchmark(call)


@cases
def test_gather(benchmark: Any, variant: str, run_nbytes: int) -> None:  # noqa: ANN401
    measure(benchmark, case_of(variant, run_nbytes), variant, "gather")


@cases
def test_scatter(benchmark: Any, variant: str, run_nbytes: int) -> None:  # noqa: ANN401
    measure(benchmark, case_of(variant, run_nbytes), variant, "scatter")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_copy(benchmark: Any, device: str) -> None:  # noqa: ANN401
    """The baseline: as many bytes, dense to dense."""
    bed = Bed(device)
    src, dst = bed.memory(NBYTES), bed.memory(NBYTES)

    def call() -> None:
        dst.copy_(src)
        bed.wait()

    benchmark.group = f"copy {NBYTES >> 20} MiB"
    benchmark(call)

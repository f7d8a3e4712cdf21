"""Gather and scatter of one call, one kernel and run length at a time, for `pytest bench/micro.py --benchmark-only`.

For use while changing a kernel; committed numbers come from `pdstage bench`. 16 MiB from a pool twice as large. On a
GPU a round is a call and the wait for it, so small times include the launch.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from pdstage.bench import curves, variants
from pdstage.bench.bed import Bed
from pdstage.bench.gpu_kernels import runs_case

NBYTES = 16 << 20


@pytest.mark.parametrize("way", ["gather", "scatter"])
@pytest.mark.parametrize("run_nbytes", [64, 256, 1024, 65536], ids=curves.size_name)
@pytest.mark.parametrize("variant", [variants.HOST, *variants.ON_GPU])
def test_kernel(benchmark: Any, variant: str, run_nbytes: int, way: str) -> None:  # noqa: ANN401  (its fixture)
    problem = variants.missing(variant)
    if problem:
        pytest.skip(f"{variant}: {problem}")
    case = runs_case(Bed("cpu" if variant == variants.HOST else "cuda:0", (variant,)), run_nbytes, NBYTES)
    work = case.works(variant)[way]
    benchmark.group = f"{way} {NBYTES >> 20} MiB"

    def call() -> None:
        work()
        case.bed.wait()

    benchmark(call)

"""The kernels' cost to a model that runs beside them: to the steps of a decode.

A staging kernel that is fast alone but slows the model down is slow.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from pdstage.stager import DEFAULT_MAX_SMS

from .bed import event, side_stream
from .gpu_kernels import CURVE_NBYTES, runs_case
from .harness import Row, Spread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .bed import Bed, Work

NIC_GBPS = 50.0
_RUN_NBYTES = 1024
_FEW_SMS = (2, 3)  # at about a NIC's pace
_PACED_NBYTES = 16 << 20
_STEP_LAYERS, _STEP_BATCH, _STEP_WIDTH = 61, 64, 4096


class Step(NamedTuple):
    """A captured step, and the tensors whose addresses it holds."""

    graph: torch.cuda.CUDAGraph
    keep: tuple[torch.Tensor, ...]


def decode(bed: Bed, quick: bool) -> Iterator[Row]:
    """The p99 of a decode-like step, one CUDA graph of many small kernels, alone and beside scatters: at a NIC's pace,
    and without end.
    """
    if bed.kind == "cpu":
        bed.left_out.append("decode: needs a GPU")
        return
    paced_s = _PACED_NBYTES / (NIC_GBPS * 1e9)
    paces = {
        f"scatters at {NIC_GBPS:.0f} GB/s": (runs_case(bed, _RUN_NBYTES, _PACED_NBYTES), paced_s),
        "scatters that never stop": (runs_case(bed, _RUN_NBYTES, CURVE_NBYTES), 0.0),
    }
    step = _step_graph(bed)
    side = side_stream()
    for (pace, (case, period_s)), variant, n_sms in itertools.product(
        paces.items(), bed.variants, (*_FEW_SMS, DEFAULT_MAX_SMS)
    ):
        with torch.cuda.stream(side):
            scatter = case.works(variant, max_sms=n_sms)["scatter"]
        n = 100 if quick else 400
        _steps(step, scatter, side, 10)
        alone = Spread.of(_steps(step, None, side, n))
        beside = Spread.of(_steps(step, scatter, side, n, period_s))
        yield Row(
            name=f"decode step beside {pace}, {variant}, {n_sms} SMs, p99",
            value=beside.p99 * 1e6,
            baseline=alone.p99 * 1e6,
            unit="us",
            better="lower",
            detail=f"{_STEP_LAYERS} layers of small kernels in a graph; medians {beside.median * 1e6:.0f} and "
            f"{alone.median * 1e6:.0f} us; baseline: alone",
            point={"table": "decode", "variant": variant, "max_sms": n_sms, "gbps": NIC_GBPS if period_s else 0.0},
        )


def _step_graph(bed: Bed) -> Step:
    weights = torch.randn(4, _STEP_WIDTH, _STEP_WIDTH, dtype=torch.bfloat16, device=bed.device) / _STEP_WIDTH**0.5
    state = torch.randn(_STEP_BATCH, _STEP_WIDTH, dtype=torch.bfloat16, device=bed.device)

    def step() -> None:
        hidden = state
        for layer in range(_STEP_LAYERS):
            hidden = torch.nn.functional.silu(hidden @ weights[layer % 4]) + hidden * 0.5

    step()  # workspaces are allocated outside the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return Step(graph, (weights, state))


def _steps(step: Step, scatter: Work | None, side: torch.cuda.Stream, n: int, period_s: float = 0.0) -> list[float]:
    """Seconds of each of `n` replays; scatters are started on `side`: whenever none is running, or one a `period_s`,
    those that are due together before a replay.
    """
    running, times = event(), []
    torch.cuda.synchronize()
    due_at = time.perf_counter()
    for _ in range(n):
        start, stop = event(), event()
        while scatter is not None and period_s and due_at <= time.perf_counter():
            scatter()
            due_at += period_s
        if scatter is not None and not period_s and running.query():
            # Two at once: the second one runs until the host checks again.
            scatter()
            scatter()
            running.record(side)
        start.record()
        step.graph.replay()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)) / 1e3)
    torch.cuda.synchronize()
    return times

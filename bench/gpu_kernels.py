"""Gather and scatter on a device: by run length, by model, by multiprocessors; and the cost of the fused extras.

Every number stands beside a copy of as many bytes made in the same run, in turn. GB/s counts the payload once, so a
copy at 2 TB/s loads the memory with 4. Item lists are on the device, unless a row says otherwise.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pdstage.kernels import Pool
from pdstage.plan import TOKEN_MAJOR, Select, Staging

from . import curves, shapes
from .harness import Row, Spread, rate
from .variants import CUDA_BULK, CUDA_PLAIN, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from pdstage.kernels import Plan
    from pdstage.layout import Layout
    from pdstage.plan.tables import Index

    from .bed import Bed, Work

RUNS = tuple(64 << n for n in range(11))
CHUNKS = (256, 1024, 4096, 8192)
RUN_VIEWS = 16
RUNS_NBYTES = 256 << 20
CURVE_NBYTES = 64 << 20
NARROW = (1, 4, 8, 16)
NARROW_NBYTES = 16 << 20
OF_COPY = 0.9  # from runs of 256 B on
SM_TARGETS = {50: 2, 400: 16}
LAUNCH_TARGET_US = 15
REPEATS, QUICK_REPEATS = 15, 5
TRIED_TOKENS = 128
"""The size of a chunk on the CPU, where only the code is tested, and multiples of it."""


class Case:
    """One pool, a selection of it, a chunk's list and staging: both directions of every variant."""

    def __init__(
        self,
        bed: Bed,
        layout_at: Callable[[int], Layout],
        select: tuple[Select, ...],
        tokens: dict[str, tuple[int, int]],
        *,
        seed: int = 0,
    ) -> None:
        """`layout_at(base)` is the layout over memory from `base` on, `tokens` the largest chunk."""
        self.bed, self.select = bed, select
        self.memory = bed.memory(layout_at(0).regions[0].nbytes)
        self.layout = layout_at(self.memory.data_ptr())
        self.pool = Pool.of(self.layout, bed.device, keep=self.memory)
        self._all_staging = bed.memory(Staging(self.layout, select).nbytes(tokens), poison=0xA5)
        self._plans: dict[str, Plan] = {}
        self._seed = seed
        self.take(tokens)

    def take(self, tokens: dict[str, tuple[int, int]]) -> None:
        """Switches to a chunk of these tokens: pages in random order from the whole pool, as in a full cache."""
        rng = np.random.default_rng(self._seed)
        self.tokens = tokens
        self.nbytes = Staging(self.layout, self.select).nbytes(tokens)
        self.staging = self._all_staging[: self.nbytes]
        self.items = {
            one.name: rng.permutation(one.n_items)[: -(-tokens[one.name][1] // one.tokens_per_item)].astype(np.int32)
            for one in self.layout.components
        }
        self.index = self.indexes(on_device=True)

    def indexes(self, *, on_device: bool) -> dict[str, Index]:
        return {name: self.bed.index(items, on_device=on_device) for name, items in self.items.items()}

    def plan(self, variant: str) -> Plan:
        plan = self._plans.get(variant)
        if plan is None:
            plan = self._plans[variant] = plan_of(self.pool, self.select, TOKEN_MAJOR, variant)
        return plan

    def works(self, variant: str, *, max_sms: int | None = None) -> dict[str, Work]:
        """Gather and scatter by `variant`, ready to be called."""
        plan = self.plan(variant)
        at = (self.staging.data_ptr(), self.staging.numel(), self.index, self.tokens)
        stream = self.bed.stream()
        return {
            "gather": partial(plan.gather, *at, stream=stream, max_sms=max_sms),
            "scatter": partial(plan.scatter, *at, stream=stream, max_sms=max_sms),
        }

    def copy(self) -> Work:
        """The baseline: as many bytes, dense to dense, by the device's own copy."""
        other = self.bed.memory(self.nbytes)
        return partial(other.copy_, self.staging)

    def gathered(self, variant: str) -> torch.Tensor:
        """The bytes that `variant` gathers into poisoned staging."""
        self.staging.fill_(0xA5)
        self.works(variant)["gather"]()
        self.bed.wait()
        return self.staging.clone()

    def check_agreement(self) -> None:
        """Raises unless all variants gather the same bytes: a wrong kernel's speed means nothing."""
        first, *others = self.bed.variants
        expected = self.gathered(first)
        for variant in others:
            if not bool((self.gathered(variant) == expected).all()):
                raise RuntimeError(f"{variant} and {first} gather different bytes")


def runs_case(bed: Bed, run_nbytes: int, nbytes: int) -> Case:
    n = nbytes // run_nbytes // RUN_VIEWS

    def layout_at(base: int) -> Layout:
        return shapes.runs_layout(run_nbytes, 2 * n, RUN_VIEWS, base=base, kind=bed.kind)

    select = tuple(Select(view.key, 0, 1) for view in layout_at(0).views())
    return Case(bed, layout_at, select, {"kv": (0, n)}, seed=run_nbytes)


def model_case(bed: Bed, pair: shapes.Pair, tokens: int, side: str, *, part: shapes.Sends | None = None) -> Case:
    """One side of a pair: the writer that sends most, or decode rank 0 receiving from it (or from `part`'s writer)."""
    part = part or shapes.sends(pair, tokens)[0]
    tp, rank, select = (
        (pair.src_tp, part.src_rank, part.src_select) if side == "gather" else (pair.dst_tp, 0, part.dst_select)
    )
    n_pages = 2 * -(-tokens // pair.model.page)
    n_items = {name: 4 if name == shapes.SLOTS else n_pages for name in pair.model.components()}

    def layout_at(base: int) -> Layout:
        return shapes.place(pair.model, tp, rank, n_items, base=base, kind=bed.kind)

    return Case(bed, layout_at, select, shapes.chunk(pair.model, tokens), seed=tokens)


def runs(bed: Bed, quick: bool, nbytes: int = RUNS_NBYTES) -> Iterator[Row]:
    """Both directions by run length, and the length from which bulk copies are the faster of the two CUDA kernels.

    The first row is how much two copies differ, which limits how far a ratio can be trusted.
    """
    nbytes = bed.sized(nbytes)
    yield _noise(runs_case(bed, 4096, nbytes), QUICK_REPEATS if quick else 2 * REPEATS)
    rates: dict[tuple[str, str], dict[int, float]] = {}
    for run_nbytes in (64, 256, 4096) if quick else RUNS:
        case = runs_case(bed, run_nbytes, nbytes)
        case.check_agreement()
        works = {(way, v): work for v in bed.variants for way, work in case.works(v).items()}
        measured = _beside_copy(
            case,
            {f"{way}, {v}, {curves.size_name(run_nbytes)} runs": work for (way, v), work in works.items()},
            [{"table": "runs", "way": way, "variant": v, "run_nbytes": run_nbytes} for way, v in works],
            repeats=QUICK_REPEATS if quick else REPEATS,
            target=OF_COPY if run_nbytes >= 256 else None,
        )
        yield from measured
        for key, row in zip(works, measured, strict=True):
            rates.setdefault(key, {})[run_nbytes] = row.value
    for way in ("gather", "scatter"):
        bulk, plain = rates.get((way, CUDA_BULK)), rates.get((way, CUDA_PLAIN))
        if bulk and plain:
            yield bulk_ahead(way, bulk, plain)


def bulk_ahead(way: str, bulk: dict[int, float], plain: dict[int, float]) -> Row:
    """The value for `cuda_copy.BULK_FROM_NBYTES` on this device; twice the longest run means never."""
    least = curves.ahead_from(bulk, plain)
    return Row(
        name=f"bulk copies are ahead from, {way}",
        value=2 * max(bulk) if least is None else least,
        baseline=max(bulk),
        unit="B",
        detail="nowhere" if least is None else "baseline: the longest run measured",
        point={"table": "bulk from", "way": way, "reached": least is not None},
    )


def _noise(case: Case, repeats: int) -> Row:
    times = case.bed.spreads({"one": case.copy(), "other": case.copy()}, repeats)
    detail = f"{case.nbytes / 2**20:.1f} MiB, both dense to dense, in turn"
    return rate("a copy beside a copy", case.nbytes, times["one"], times["other"], detail, point={"table": "noise"})


def models(
    bed: Bed, quick: bool, pairs: tuple[shapes.Pair, ...] = shapes.PAIRS, chunks: tuple[int, ...] = CHUNKS
) -> Iterator[Row]:
    """Both directions of real models' chunks."""
    chunks = chunks if bed.kind != "cpu" else tuple(min(n, TRIED_TOKENS * (i + 1)) for i, n in enumerate(chunks))
    for pair in pairs[:1] + pairs[5:6] if quick else pairs:
        for way in ("gather", "scatter"):
            case = model_case(bed, pair, chunks[-1], way)
            case.check_agreement()
            run = shapes.row_run(case.layout, case.select)
            for tokens in chunks[-2:-1] if quick else chunks:
                case.take(shapes.chunk(pair.model, tokens))
                yield from _beside_copy(
                    case,
                    {f"{way}, {v}, {pair.name}, {tokens} tokens": case.works(v)[way] for v in bed.variants},
                    [
                        {"table": "models", "way": way, "variant": v, "pair": pair.name, "tokens": tokens}
                        for v in bed.variants
                    ],
                    repeats=QUICK_REPEATS if quick else REPEATS,
                    target=OF_COPY if run >= 256 and tokens >= 4096 else None,
                    detail=f", rows of {curves.size_name(run)} and up",
                )


def _beside_copy(
    case: Case,
    works: dict[str, Work],
    points: list[dict[str, Any]],
    *,
    repeats: int,
    target: float | None = None,
    detail: str = "",
) -> list[Row]:
    times = case.bed.spreads({"copy": case.copy(), **works}, repeats)
    told = f"{case.nbytes / 2**20:.1f} MiB; baseline: a copy of as many bytes{detail}"
    return [
        rate(name, case.nbytes, times[name], times["copy"], told, target=target, point=point)
        for name, point in zip(works, points, strict=True)
    ]


def sms(bed: Bed, quick: bool, nbytes: int = CURVE_NBYTES) -> Iterator[Row]:
    """Bandwidth by `max_sms`, and how many multiprocessors a 400 Gb NIC and NVLink need."""
    nbytes = bed.sized(nbytes)
    for run_nbytes in (256,) if quick else (256, 1024, 16384):
        case = runs_case(bed, run_nbytes, nbytes)
        of_run = {"table": "sms", "run_nbytes": run_nbytes}
        named = f"{curves.size_name(run_nbytes)} runs"
        yield from _by_sms(case, named, of_run, curves.sm_steps(bed.n_sms, quick=quick))


def narrow(bed: Bed, quick: bool, nbytes: int = NARROW_NBYTES) -> Iterator[Row]:
    """The same for runs of at most 16 bytes, which a device moves by their number, and for a model that has some."""
    steps = (*SM_TARGETS.values(), bed.n_sms)
    for run_nbytes in NARROW[-1:] if quick else NARROW:
        case = runs_case(bed, run_nbytes, bed.sized(nbytes))
        of_run = {"table": "narrow", "run_nbytes": run_nbytes}
        yield from _by_sms(case, f"{curves.size_name(run_nbytes)} runs", of_run, steps)
    model = shapes.DEEPSEEK_V32_FP8
    tokens = TRIED_TOKENS if bed.kind == "cpu" else CHUNKS[-1]
    case = model_case(bed, shapes.Pair(model, 4, 8), tokens, "gather")
    yield from _by_sms(case, model.name, {"table": "narrow", "pair": model.name}, steps)


def _by_sms(case: Case, named: str, point: dict[str, object], steps: Sequence[int]) -> Iterator[Row]:
    bed = case.bed
    case.check_agreement()
    reached: dict[tuple[str, str], dict[int, float]] = {}
    for n in steps:
        works = {(way, v): w for v in bed.variants for way, w in case.works(v, max_sms=n).items()}
        timed = {f"{way}, {v}, {named}, {n} SMs": work for (way, v), work in works.items()}
        points = [{**point, "way": way, "variant": v, "max_sms": n} for way, v in works]
        measured = _beside_copy(case, timed, points, repeats=QUICK_REPEATS)
        yield from measured
        for key, row in zip(works, measured, strict=True):
            reached.setdefault(key, {})[n] = row.value
    for (way, v), curve in reached.items():
        of_curve = {**point, "table": f"{point['table']} needed", "way": way, "variant": v}
        yield from (needed(bed.n_sms, f"{way}, {v}, {named}", of_curve, curve, wanted) for wanted in SM_TARGETS)


def needed(n_sms: int, named: str, point: dict[str, object], curve: dict[int, float], wanted: int) -> Row:
    """The multiprocessors that `wanted` GB/s needs; if all of them do not reach it, one more than there are, a miss."""
    least = curves.least_reaching(curve, wanted)
    return Row(
        name=f"SMs for {wanted} GB/s, {named}",
        value=max(n_sms, SM_TARGETS[wanted]) + 1 if least is None else least,
        baseline=n_sms,
        unit="SMs",
        target=SM_TARGETS[wanted],
        on="value",
        better="lower",
        detail=f"not reached: at most {max(curve.values()):.0f} GB/s" if least is None else "baseline: all there are",
        point={**point, "wanted": wanted, "reached": least is not None},
    )


def launch(bed: Bed, quick: bool, tokens: int = 256) -> list[Row]:
    """Host time of one gather of all 61 layers of DeepSeek-V3 into an idle stream, without waiting."""
    case = model_case(bed, shapes.Pair(shapes.DEEPSEEK_V3, 4, 8), tokens, "gather")
    works: dict[tuple[str, str], Work] = {("copy", ""): case.copy()}
    for on_device, place in ((False, "on the host"), (True, "on the device")):
        case.index = case.indexes(on_device=on_device)
        works |= {(v, place): case.works(v)["gather"] for v in bed.variants}
    times = {key: Spread.of(_launch_times(bed, work, 50 if quick else 300)) for key, work in works.items()}
    return [
        Row(
            name=f"host time of a launch, {v}, 61 layers, items {place}",
            value=times[v, place].median * 1e6,
            baseline=times["copy", ""].median * 1e6,
            unit="us",
            target=LAUNCH_TARGET_US,
            on="value",
            better="lower",
            detail=f"p99 {times[v, place].p99 * 1e6:.1f} us; baseline: launching one torch copy",
            point={"table": "launch", "variant": v, "items": place},
            quartiles=_microseconds(times[v, place]),
            baseline_quartiles=_microseconds(times["copy", ""]),
        )
        for v, place in works
        if place
    ]


def _microseconds(spread: Spread) -> tuple[float, float]:
    first, third = spread.quartiles
    return first * 1e6, third * 1e6


def _launch_times(bed: Bed, work: Work, n: int) -> list[float]:
    for _ in range(20):
        work()
    times = []
    for _ in range(n):
        bed.wait()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    bed.wait()
    return times


def fused(bed: Bed, quick: bool, nbytes: int = RUNS_NBYTES) -> Iterator[Row]:
    """The cost of a checksum, and one pass from pool to pool beside a gather and a scatter."""
    nbytes = bed.sized(nbytes)
    for run_nbytes in (256,) if quick else (256, 1024, 16384):
        case = runs_case(bed, run_nbytes, nbytes)
        other = runs_case(bed, run_nbytes, nbytes)
        total = bed.memory(8, poison=0)
        run, stream = curves.size_name(run_nbytes), bed.stream()
        works: dict[str, Work] = {"copy": case.copy()}
        beside: dict[str, tuple[str, dict[str, Any]]] = {}
        for v in bed.variants:
            summing = plan_of(case.pool, case.select, TOKEN_MAJOR, v, checksum=True)
            at = (case.staging.data_ptr(), case.nbytes, case.index, case.tokens)
            for way, call in (("gather", summing.gather), ("scatter", summing.scatter)):
                works[f"{way}, {v}"] = case.works(v)[way]
                name = f"{way} with checksum, {v}, {run} runs"
                works[name] = partial(call, *at, stream=stream, sum_ptr=total.data_ptr())
                beside[name] = f"{way}, {v}", {"table": "checksum", "way": way}
            here, there = (plan_of(c.pool, c.select, TOKEN_MAJOR, v) for c in (case, other))
            name = f"copy_to, {v}, {run} runs"
            works[name] = partial(here.copy_to, there, case.index, other.index, case.tokens, stream=stream)
            beside[name] = "copy", {"table": "copy_to"}
            for one in (name for name in beside if f", {v}, " in name):
                beside[one][1].update(variant=v, run_nbytes=run_nbytes)
        times = bed.spreads(works, QUICK_REPEATS if quick else REPEATS)
        for name, (base, point) in beside.items():
            detail = (
                "baseline: without" if base != "copy" else "pool to pool of one GPU; baseline: a copy of as many bytes"
            )
            yield rate(name, nbytes, times[name], times[base], detail, point=point)

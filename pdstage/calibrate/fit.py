"""Least squares: from what was timed to a `CostModel`.

Layer 6, pure. Must not know how anything was timed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdstage.cost import CostModel
from pdstage.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LEAST = 1e-13  # seconds a byte: what is too cheap to be measured


class Timed(NamedTuple):
    """Something that moved `nbytes` in `n_runs` contiguous runs, and in `n_chunks` chunks."""

    nbytes: int
    n_runs: int
    n_chunks: int
    seconds: float

    @property
    def run_nbytes(self) -> int:
        return self.nbytes // self.n_runs


class Timings(NamedTuple):
    """All that is timed of one transport. `direct` and `staged` are whole rooms, `bulk` writes of one descriptor; none
    where gathers go straight into the peer's memory.
    """

    gather: list[Timed]
    scatter: list[Timed]
    bulk: list[Timed]
    direct: list[Timed]
    staged: list[Timed]


def non_negative(columns: Sequence[Sequence[float]], target: Sequence[float], unit: Sequence[float]) -> list[float]:
    """Coefficients of at least 0 with which `columns` add up to `target`, each row's error counted in its `unit`.

    Where the best one would be below 0, the one that is so by most is 0 and the others are fitted again: no price makes
    up for another.
    """
    if len(target) < len(columns):
        raise UsageError(f"{len(target)} timings for {len(columns)} numbers", remedy="time more sizes")
    units = np.array(unit, np.float64)
    rows, wanted = np.array(columns, np.float64).T / units[:, None], np.array(target, np.float64) / units
    scale = np.abs(rows).max(axis=0)  # bytes and descriptors differ by many orders of magnitude
    kept = [number for number in range(len(columns)) if scale[number] > 0]
    found = np.zeros(len(columns))
    while kept:
        part = np.linalg.lstsq(rows[:, kept] / scale[kept], wanted, rcond=None)[0]
        if (part >= 0).all():
            found[kept] = part / scale[kept]
            break
        del kept[int(np.argmin(part))]
    return [float(one) for one in found]


def model(timed: Timings) -> CostModel:
    """Copies and bulk writes by themselves, then direct rooms, then what staged rooms take beyond their stages."""
    _, gather_run_s, gather_byte_s = _priced(timed.gather, lambda one: (1.0, one.n_runs, one.nbytes))
    _, scatter_run_s, scatter_byte_s = _priced(timed.scatter, lambda one: (1.0, one.n_runs, one.nbytes))
    _, bulk_byte_s = _priced(timed.bulk, lambda one: (1.0, one.nbytes)) if timed.bulk else (0.0, 0.0)
    lengths = sorted({one.run_nbytes for one in timed.direct})
    room_s, post_s, *descriptor_s = _priced(
        timed.direct,
        lambda one: (1.0, one.n_chunks - 1, *(one.n_runs * (one.run_nbytes == length) for length in lengths)),
    )
    stages = CostModel(
        tuple(zip(lengths, descriptor_s, strict=True)), post_s, bulk_bytes_per_s=_rate(bulk_byte_s),
        gather_bytes_per_s=_rate(gather_byte_s), gather_run_s=gather_run_s,
        scatter_bytes_per_s=_rate(scatter_byte_s), scatter_run_s=scatter_run_s, lease_s=0.0, chunk_s=0.0, overlap=0.0,
    )  # fmt: skip
    return _pipelined(stages, timed.staged, room_s)


def _pipelined(stages: CostModel, staged: list[Timed], room_s: float) -> CostModel:
    """Of staged rooms: what a lease and a chunk add, and how far the stages overlap; `room_s` every room takes."""
    seconds = np.array([one.seconds for one in staged])
    columns = [[1.0] * len(staged), [float(one.n_chunks) for one in staged]]
    best, least = stages, np.inf
    for overlap in np.linspace(0.0, 1.0, 41):
        tried = replace(stages, overlap=float(overlap))
        known = np.array([tried.staged_s(one.nbytes, one.n_runs, one.n_chunks) for one in staged]) + room_s
        lease_s, chunk_s = non_negative(columns, (seconds - known).tolist(), seconds.tolist())
        left = (known + lease_s + chunk_s * np.array(columns[1])) / seconds - 1
        error = float(np.square(left).sum())
        if error < least:
            best, least = replace(tried, lease_s=lease_s, chunk_s=chunk_s), error
    return best


def _priced(timed: list[Timed], counts: Callable[[Timed], tuple[float, ...]]) -> list[float]:
    seconds = [one.seconds for one in timed]
    return non_negative(list(zip(*map(counts, timed), strict=True)), seconds, seconds)


def _rate(byte_s: float) -> float:
    return 1 / max(byte_s, _LEAST)

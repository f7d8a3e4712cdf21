"""Least squares: fits a `CostModel` to timings."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

from pdstage.errors import UsageError
from pdstage.plan.cost import CostModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike

_LEAST = 1e-13  # seconds a byte: for costs too small to measure
_TURNS = 5


class Timed(NamedTuple):
    """A timed operation that moved `nbytes` in `n_runs` contiguous runs and `n_chunks` chunks."""

    nbytes: int
    n_runs: int
    n_chunks: int
    seconds: float

    @property
    def run_nbytes(self) -> int:
        return self.nbytes // self.n_runs


class Timings(NamedTuple):
    """All timings of one transport: copies alone, and whole rooms by either path."""

    gather: list[Timed]
    scatter: list[Timed]
    direct: list[Timed]
    staged: list[Timed]


def non_negative(columns: Sequence[ArrayLike], target: ArrayLike, unit: ArrayLike) -> list[float]:
    """Coefficients >= 0 with which `columns` sum to `target`; each row's error is weighted by its `unit`.

    If a coefficient would be negative, the most negative one is set to 0 and the others are fitted again: no cost may
    compensate for another.
    """
    units = np.array(unit, np.float64)
    rows, wanted = np.array(columns, np.float64).T / units[:, None], np.array(target, np.float64) / units
    if rows.shape[0] < rows.shape[1]:
        raise UsageError(f"{rows.shape[0]} timings for {rows.shape[1]} numbers", remedy="time more sizes")
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
    """Fits copies alone, then direct rooms, then what staged rooms take beyond their copies."""
    _, gather_run_s, gather_byte_s = _priced(timed.gather, lambda one: (1.0, one.n_runs, one.nbytes))
    _, scatter_run_s, scatter_byte_s = _priced(timed.scatter, lambda one: (1.0, one.n_runs, one.nbytes))
    lengths = sorted({one.run_nbytes for one in timed.direct})
    first_s, post_s, *descriptor_s = _priced(
        timed.direct,
        lambda one: (1.0, one.n_chunks - 1, *(one.n_runs * (one.run_nbytes == length) for length in lengths)),
    )
    stages = CostModel(
        tuple(zip(lengths, descriptor_s, strict=True)), post_s,
        gather_bytes_per_s=_rate(gather_byte_s), gather_run_s=gather_run_s,
        scatter_bytes_per_s=_rate(scatter_byte_s), scatter_run_s=scatter_run_s, lease_s=0.0, chunk_s=0.0, overlap=0.0,
    )  # fmt: skip
    return _pipelined(stages, timed.staged, first_s - post_s)


def _pipelined(stages: CostModel, staged: list[Timed], room_s: float) -> CostModel:
    """From staged rooms: the cost of a lease, of a chunk and of writing a byte, and how far the stages overlap.

    A room by either path takes `room_s` in addition. The write's cost depends on whether it is the longest stage, which
    depends on its cost: a few iterations settle that.
    """
    nbytes, n_runs, n_chunks, seconds = (np.array(column, np.float64) for column in zip(*staged, strict=True))
    gather_s = n_runs * stages.gather_run_s + nbytes / stages.gather_bytes_per_s
    scatter_s = n_runs * stages.scatter_run_s + nbytes / stages.scatter_bytes_per_s
    longer_s, shorter_s = np.maximum(gather_s, scatter_s), np.minimum(gather_s, scatter_s)
    best, least = stages, np.inf
    for overlap in np.linspace(0.0, 1.0, 41):
        shown = 1 - overlap
        lease_s, chunk_s, byte_s = 0.0, 0.0, np.inf
        for _ in range(_TURNS):
            longest = byte_s * nbytes >= longer_s
            known = room_s + np.where(longest, longer_s * shown, longer_s) + shorter_s * shown
            columns = [np.ones_like(nbytes), n_chunks, np.where(longest, nbytes, nbytes * shown)]
            lease_s, chunk_s, byte_s = non_negative(columns, seconds - known, seconds)
        bulk_bytes_per_s, share = _rate(byte_s), float(overlap)
        tried = replace(stages, bulk_bytes_per_s=bulk_bytes_per_s, lease_s=lease_s, chunk_s=chunk_s, overlap=share)
        found = [room_s + tried.staged_s(one.nbytes, one.n_runs, one.n_chunks) for one in staged]
        error = float(np.square(np.array(found) / seconds - 1).sum())
        if error < least:
            best, least = tried, error
    return best


def _priced(timed: list[Timed], counts: Callable[[Timed], tuple[float, ...]]) -> list[float]:
    seconds = [one.seconds for one in timed]
    return non_negative(list(zip(*map(counts, timed), strict=True)), seconds, seconds)


def _rate(byte_s: float) -> float:
    return 1 / max(byte_s, _LEAST)

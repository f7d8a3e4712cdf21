"""Rooms between two ranks with a feature, compared with two ranks without it: in turn, in one run."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import numpy as np

from .harness import Row

if TYPE_CHECKING:
    from .rooms import Pair


def rows(having: Pair, plain: Pair, n: int, repeats: int, *, of: str, detail: str) -> list[Row]:
    """Rooms a second with `n` in flight, and the latency of `n // 10` single rooms; `of` ends the rows' names."""
    rates: list[list[float]] = [[], []]
    times: list[list[float]] = [[], []]
    for pair in (having, plain):
        pair.both("run", pair.rooms(n))
    for _ in range(repeats):
        for pair, rate, took in zip((having, plain), rates, times, strict=True):
            rate.append(n / pair.both("run", pair.rooms(n)))
            lone = pair.rooms(n // 10)
            pair.prefill.begin("serve", lone, False)
            took.append(float(np.median(pair.decode.call("latencies", lone, False))) * 1e6)
            pair.prefill.result()
    with_it, without = map(statistics.median, rates)
    ours, theirs = map(statistics.median, times)
    return [
        Row(name=f"rooms a second, {of}", value=with_it, baseline=without, unit="1/s", detail=detail),
        Row(
            name=f"Open to Success, idle, p50, {of}", value=ours, baseline=theirs, unit="us", better="lower",
            detail=detail,
        ),
    ]  # fmt: skip

"""Keys: what encrypting the control plane costs.

The same rooms between two ranks with keys and two without, in turn; what a room is says `rooms`.
"""

from __future__ import annotations

import statistics
import tempfile

import numpy as np

from pdstage.control.keys import Keys

from .harness import Row
from .rooms import PROGRESS, Pair


def run(quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        Keys.make(f"{folder}/key")
        return [row for progress in PROGRESS for row in _rows(progress, f"{folder}/key", quick)]


def _rows(progress: str, key_file: str, quick: bool) -> list[Row]:
    n, repeats = (256, 3) if quick else (2000, 7)
    with Pair("local", progress, key_file) as keyed, Pair("local", progress) as plain:
        return _beside(keyed, plain, n, repeats, progress)


def _beside(keyed: Pair, plain: Pair, n: int, repeats: int, progress: str) -> list[Row]:
    """Rooms a second with `n` in flight, and the latency of `n // 10` single rooms."""
    detail = "baseline: the same without keys"
    rates: list[list[float]] = [[], []]
    times: list[list[float]] = [[], []]
    for pair in (keyed, plain):
        pair.both("run", pair.rooms(n))
    for _ in range(repeats):
        for pair, rate, took in zip((keyed, plain), rates, times, strict=True):
            rate.append(n / pair.both("run", pair.rooms(n)))
            lone = pair.rooms(n // 10)
            pair.prefill.begin("serve", lone, False)
            took.append(float(np.median(pair.decode.call("latencies", lone, False))) * 1e6)
            pair.prefill.result()
    with_it, without = map(statistics.median, rates)
    ours, theirs = map(statistics.median, times)
    return [
        Row(name=f"rooms a second, {progress}", value=with_it, baseline=without, unit="1/s", detail=detail),
        Row(
            name=f"Open to Success, idle, p50, {progress}", value=ours, baseline=theirs, unit="us", better="lower",
            detail=detail,
        ),
    ]  # fmt: skip

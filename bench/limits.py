"""What a machine can do at best for an access: the loops of limits.c, compiled for its processor, tuned for each case.

A loop knows nothing but offsets of runs. What ours has beyond it is a plan, checks, and one build for all processors.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pdstage.errors import UsageError

from .harness import seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

SOURCE = Path(__file__).with_name("limits.c")
AHEAD = (2048, 4096, 8192, 16384, 32768)
SIDES = (1, 2, 4)
_TRIES = 3


@cache
def loops() -> ctypes.CDLL:
    """Raises `UsageError` where they cannot be compiled: without a C compiler, or on another processor than x86-64."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "limits.so")
        command = [os.environ.get("CC", "cc"), "-O3", "-march=native", "-shared", "-fPIC", str(SOURCE), "-o", str(made)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            what = f"{SOURCE.name} cannot be compiled: {said.splitlines()[0]}"
            raise UsageError(what, remedy="install a C compiler, on an x86-64 processor") from error
        return ctypes.CDLL(str(made))


class Call:
    """A call of one loop, with its arguments: arrays, addresses and numbers."""

    def __init__(self, loop: str, *arguments: NDArray[np.generic] | int) -> None:
        self._held = arguments  # arrays must live as long as the call
        self._loop = getattr(loops(), loop)
        self._told = [ctypes.c_int64(one if isinstance(one, int) else one.ctypes.data) for one in arguments]

    def __call__(self) -> None:
        self._loop(*self._told)


def fastest(works: Iterable[Callable[[], object]]) -> Callable[[], object]:
    """Each is tried a few times; the one whose median is least."""

    def median(work: Callable[[], object]) -> float:
        work()
        return statistics.median(seconds(work) for _ in range(_TRIES))

    return min(works, key=median)


def aligned(nbytes: int) -> NDArray[np.uint8]:
    """Memory that begins a page, touched."""
    whole = np.ones(nbytes + 4096, np.uint8)
    return whole[-whole.ctypes.data % 4096 :][:nbytes]


def streaming_copy(nbytes: int) -> Callable[[], object]:
    """The C library's copy of that many contiguous bytes, which it stores past the caches."""
    src, dst = aligned(nbytes), aligned(nbytes)
    return lambda: ctypes.memmove(dst.ctypes.data, src.ctypes.data, nbytes)


def gather_runs(dense: int, pool: int, offsets: NDArray[np.int64], nbytes: int) -> Callable[[], object]:
    """Runs of `nbytes` at `offsets` of `pool` to `dense`, as a loop tuned for just that does it."""
    return _tuned("gather_runs", dense, pool, offsets, n=len(offsets), nbytes=nbytes)


def scatter_runs(dense: int, pool: int, offsets: NDArray[np.int64], nbytes: int) -> Callable[[], object]:
    """The inverse."""
    return _tuned("scatter_runs", dense, pool, offsets, n=len(offsets), nbytes=nbytes)


def copy_runs(
    peer: int, peer_offsets: NDArray[np.int64], pool: int, offsets: NDArray[np.int64], nbytes: int
) -> Callable[[], object]:
    """From `offsets` of one pool to `peer_offsets` of another."""
    return _tuned("copy_runs", peer, peer_offsets, pool, offsets, n=len(offsets), nbytes=nbytes)


def _tuned(loop: str, *places: NDArray[np.int64] | int, n: int, nbytes: int) -> Callable[[], object]:
    """First how many runs at a time, and how much of each is prefetched; then how far ahead."""

    def call(ahead: int, fetched: int, side: int) -> Call:
        return Call(loop, *places, n, nbytes, max(side, ahead // nbytes), fetched, side)

    shares = sorted({0, min(nbytes, 256), min(nbytes, 4096)})
    ways = {call(8192, fetched, side): (fetched, side) for fetched in shares for side in SIDES}
    best = fastest(ways)
    return fastest([best, *(call(ahead, *ways[best]) for ahead in AHEAD)])  # type: ignore[index]

"""A post as batches of offsets, for libraries that take registered memories and offsets instead of addresses."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdstage.layout import Region
    from pdstage.plan.spans import Spans
    from pdstage.transport.base import Ranges


class Batch(NamedTuple):
    """Runs from one region into another, at offsets in them, as lists that C++ bindings take."""

    local: Region
    remote: Region
    local_offsets: list[int]
    remote_offsets: list[int]
    sizes: list[int]


def batches(spans: Spans, local: Ranges, remote: Ranges) -> Iterator[Batch]:
    """`spans` grouped by pair of regions, in order within each pair. Spans that are adjacent on both sides become one
    run.

    Every span must lie in one region of each side: see `Ranges.find`.
    """
    pairs = local.index(spans.src), remote.index(spans.dst)
    order = np.lexsort(pairs[::-1])  # stable: spans keep their order within a pair
    i, j, src, dst, nbytes = (column[order] for column in (*pairs, *spans))
    pair_starts = np.r_[True, (np.diff(i) != 0) | (np.diff(j) != 0)]
    gaps = (src[1:] != src[:-1] + nbytes[:-1]) | (dst[1:] != dst[:-1] + nbytes[:-1])
    runs = np.flatnonzero(pair_starts | np.r_[True, gaps])
    sizes = np.add.reduceat(nbytes, runs)
    bounds = [*np.flatnonzero(pair_starts[runs]).tolist(), runs.size]
    for first, last in pairwise(bounds):
        starts = runs[first:last]
        ours, theirs = local.regions[i[starts[0]]], remote.regions[j[starts[0]]]
        src_offsets, dst_offsets = src[starts] - ours.base, dst[starts] - theirs.base
        yield Batch(ours, theirs, src_offsets.tolist(), dst_offsets.tolist(), sizes[first:last].tolist())

"""Any layout to any layout, every byte: drawn cases, and all pairs of TP sizes for each kind."""

from __future__ import annotations

import itertools
import zlib
from collections import Counter

import pytest

from tests.any_layout import check
from tests.any_layout.draw import KINDS
from tests.rows import drawn

N_CASES = drawn(500, full=10_000)
SIZES = range(1, 9)


def test_drawn_cases() -> None:
    """Chunks cover what was asked exactly once, and each byte lies where the description says (I5, I7)."""
    cases = [check.run(seed) for seed in range(N_CASES)]
    seen = Counter(what for case in cases for what in (case.path, *(of.name for of in case.logical)))
    few = [what for what in (*KINDS, "staged", "direct", "mixed", "copy") if seen[what] <= N_CASES // 50]
    assert not few, f"few cases of {few}: {seen}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_of_tp_sizes(kind: str) -> None:
    for tp in itertools.product(SIZES, SIZES):
        check.run(zlib.crc32(f"{kind} {tp}".encode()), kinds=[kind], tp=tp, most_stages=1)

"""Numbers derived from measured numbers: a curve read between its points, a result file's name.

No torch.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def least_reaching(curve: Mapping[int, float], wanted: float) -> int | None:
    """The smallest integer x at which `curve`, {x: y} and linear between its points, reaches `wanted`; None if nowhere.

    The curve is not extended to the left: the first point is the smallest result.
    """
    last: tuple[int, float] | None = None
    for x, y in sorted(curve.items()):
        if y >= wanted:
            if last is None:
                return x
            x0, y0 = last
            return min(x, math.ceil(x0 + (wanted - y0) / (y - y0) * (x - x0)))
        last = (x, y)
    return None


def ahead_from(curve: Mapping[int, float], other: Mapping[int, float]) -> int | None:
    """The smallest x, of those that both have, from which on `curve` is never below `other`; None if there is none."""
    common = sorted(curve.keys() & other.keys())
    behind = [x for x in common if curve[x] < other[x]]
    return next((x for x in common if not behind or x > behind[-1]), None)


def slug(name: str) -> str:
    """A device's name as a file name: "NVIDIA H200" gives nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def sm_steps(n_sms: int, *, quick: bool) -> list[int]:
    """The multiprocessor counts to measure: each at the low end, where the targets are, then sparser up to all."""
    steps = (1, 2, 4, 16) if quick else (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 96)
    return [*(n for n in steps if n < n_sms), n_sms]


def size_name(nbytes: int) -> str:
    """256 B, 4 KiB, 64 MiB."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"

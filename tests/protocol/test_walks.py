"""Random walks of both cores under loss, duplication, reordering, stuck writers, aborts, crashes and rooms used again.

Three kinds. *harsh*: everything fails, and the room deadlines are short. *gentle*: control frames are lost, doubled and
late, all else is only slow; that costs time, never a session or a room (I4, I11). *stopped*: one prefill rank stops for
ever with whatever it holds, and no transport fences it; the rooms of the others do not care (I12).

At every step `tests/invariants.py` looks; a room that says Success has every byte at that moment (I5); and once the
faults end and time passes, I10, I13 and I14.
"""

from __future__ import annotations

import pytest

from tests.walk_ends import end
from tests.walks import Walk


@pytest.mark.parametrize("seed", range(300))
def test_random_walk(seed: int) -> None:
    walk = Walk(seed)
    walk.go(60)
    end(walk)


def show(seed: int) -> list[str]:  # pragma: no cover
    """For a failing seed: everything that was delivered."""
    walk = Walk(seed)
    try:
        walk.go(60)
        end(walk)
    finally:
        print(*walk.world.log, sep="\n")
    return walk.world.log

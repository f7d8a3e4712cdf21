"""What each of 200 seeds does, as a digest of its trace, frozen in digests.txt: a change of structure alone keeps all.

A change of behaviour writes them anew, in a commit that says why: `python -m tests.sim.digests`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.sim.run import run

N_SEEDS = 200
FROZEN = Path(__file__).with_name("digests.txt")


def digest(seed: int) -> str:
    """Of every event, message and change of a room's state, with all faults, in order."""
    return hashlib.sha256("\n".join(run(seed, tracing=True).trace).encode()).hexdigest()[:32]


def frozen() -> dict[int, str]:
    lines = FROZEN.read_text().splitlines()
    return {int(seed): told for seed, told in (line.split() for line in lines)}


if __name__ == "__main__":
    FROZEN.write_text("".join(f"{seed} {digest(seed)}\n" for seed in range(N_SEEDS)))

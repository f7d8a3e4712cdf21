"""One seed of whole nodes, or many: `--seeds N`, or `--seed K --trace` for what one did."""

from __future__ import annotations

import argparse
import sys

from tests.sim.manager.run import run
from tests.sim.seeds import Failed, run_many, tell

_SHOWN = 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.manager", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--trace", action="store_true", help="print every step of it")
    given = parser.parse_args()
    seed = given.seed
    if seed is None:
        seed = run_many(run, range(given.first, given.first + given.seeds))
        if seed is None:
            return 0
    try:
        report = run(seed)
    except Failed as failed:
        print(*failed.report.trace[None if given.trace else -_SHOWN :], sep="\n  ")
        raise failed.__cause__ from None
    print(*report.trace if given.trace else (), tell([report]), sep="\n")
    return 0


sys.exit(main())

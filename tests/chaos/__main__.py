"""Rounds of chaos until the time is up, and what came of them. Exit code 1 if something was wrong.

Sites of a few ranks, one after another.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter

from tests.chaos import network, plan
from tests.chaos.round import Round


def main() -> int:
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and stopped ranks go
    namespaces = network.permitted()
    network.sweep_dead()
    until = time.monotonic() + options.minutes * 60
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    number = options.only or 0
    while True:
        seconds = options.seconds
        site = plan.draw_site(options.seed, number, options.transport, seconds, namespaces=namespaces)
        print(f"round {number} of seed {options.seed}: {site}", flush=True)
        one = Round(options.seed, number, site, seconds).run()
        counts += one.counts
        print(f"  {one.counts['rooms succeeded']} rooms, {f'{len(one.wrong)} WRONG' if one.wrong else 'all well'}")
        for what in one.wrong:
            wrong.append(f"in round {number}: {what}")
            print(f"    {what}", flush=True)
        number += 1
        if options.only is not None or time.monotonic() + seconds > until:
            break
    for what, n in sorted(counts.items()):
        print(f"  {n:7,} {what}")
    for what in wrong:
        print(f"WRONG {what}")
    print(f"a round again: --only NUMBER, with --seed {options.seed} and the other arguments as they were")
    print("nothing was wrong" if not wrong else f"{len(wrong)} things were wrong")
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of sites and faults")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin no round that would end later")
    parser.add_argument("--seconds", type=float, default=25.0, help="of faults, a round")
    parser.add_argument("--transport", choices=("local", "nixl", "mooncake", "auto", "both"), default="both")
    parser.add_argument("--only", type=int, help="run this one round")
    return parser


if __name__ == "__main__":
    sys.exit(main())

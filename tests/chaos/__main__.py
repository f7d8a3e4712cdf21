"""Chaos until the time is up, several sites at once, and what came of it. Exit code 1 if something was wrong."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import wait

from tests.chaos import network
from tests.chaos.plan import draw_site
from tests.chaos.round import Round

_STEP_S = 0.02


class Tally:
    """What all rounds came to."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.wrong: list[tuple[int, str]] = []
        self.rounds: list[int] = []
        self.longest_end_s = 0.0

    def add(self, one: Round) -> None:
        self.rounds.append(one.number)
        self.counts.update(one.counts)
        self.reasons.update(one.reasons)
        self.longest_end_s = max(self.longest_end_s, one.longest_end_s)
        self.wrong += [(one.number, what) for what in one.wrong]

    @property
    def n_signals(self) -> int:
        """Kills and stops."""
        return sum(n for what, n in self.counts.items() if what.startswith(("kills", "stops")))


def drive(rounds: Iterator[Round], parallel: int, note=lambda _: None) -> Tally:
    """Runs what `rounds` gives, `parallel` at a time, in this one thread."""
    tally, running = Tally(), {}
    try:
        while True:
            while len(running) < parallel and (one := next(rounds, None)) is not None:
                running[one] = one.run()
            if not running:
                return tally
            wait([m.pipe for one in running for m in one.members.values() if m.pipe is not None], _STEP_S)
            for one, script in list(running.items()):
                one.pump()
                if next(script, "over") == "over":
                    del running[one]
                    one.end()
                    tally.add(one)
                    note(one)
    finally:
        for one in running:
            one.end()


def main(args: list[str] | None = None) -> int:
    options = _parser().parse_args(args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and stopped ranks go
    namespaces = not options.no_namespaces and network.permitted()
    if namespaces:
        network.sweep_dead()
    until = time.monotonic() + options.minutes * 60

    def rounds() -> Iterator[Round]:
        numbers = iter([options.only]) if options.only is not None else iter(range(1 << 30))
        for number in numbers:
            if number and options.only is None and time.monotonic() + options.seconds > until:
                return
            site = draw_site(options.seed, number, options.transport, options.seconds, namespaces=namespaces)
            print(f"round {number}: {site}", flush=True)
            yield Round(options.seed, number, site, options.seconds, sabotage=options.sabotage)

    tally = drive(rounds(), options.parallel, _note)
    _report(tally, options)
    return 1 if tally.wrong else 0


def _note(one: Round) -> None:
    signals = sum(n for what, n in one.counts.items() if what.startswith(("kills", "stops")))
    verdict = f"{len(one.wrong)} WRONG" if one.wrong else "all well"
    print(
        f"round {one.number}: {signals} kills and stops, {one.counts['rooms succeeded']} rooms, {verdict}", flush=True
    )
    for what in one.wrong:
        print(f"    {what}", flush=True)


def _report(tally: Tally, options: argparse.Namespace) -> None:
    print(f"\n{len(tally.rounds)} rounds of seed {options.seed}: {tally.n_signals} kills and stops")
    for what, n in sorted(tally.counts.items()):
        print(f"  {n:7} {what}")
    print(f"  {tally.longest_end_s:7.1f} seconds at most from the order to close to a process's end")
    print("rooms failed, by what their ranks said:")
    for reason, n in tally.reasons.most_common():
        print(f"  {n:7} {reason}")
    for number, what in tally.wrong:
        print(f"WRONG in round {number}: {what}")
    again = f"python -m tests.chaos --seed {options.seed} --transport {options.transport} --seconds {options.seconds}"
    again += " --no-namespaces" * options.no_namespaces + " --sabotage" * options.sabotage
    for number in dict.fromkeys(number for number, _ in tally.wrong) or ["NUMBER"]:
        print(f"once more: {again} --only {number}")
    print("nothing was wrong" if not tally.wrong else f"{len(tally.wrong)} things were wrong")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="of sites and faults")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin no round that would end later")
    parser.add_argument("--seconds", type=float, default=25.0, help="of faults, a round")
    parser.add_argument("--transport", choices=("local", "nixl", "mooncake", "auto", "both"), default="both")
    parser.add_argument("--parallel", type=int, default=2, help="sites at a time")
    parser.add_argument("--only", type=int, help="run this one round")
    parser.add_argument(
        "--no-namespaces", action="store_true", help="cut ranks off by proxies, though namespaces could be made"
    )
    parser.add_argument(
        "--sabotage", action="store_true", help="engines reuse pages at Failed, not at released: this must be seen"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())

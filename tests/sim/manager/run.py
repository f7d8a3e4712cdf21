"""One seed, or many: `python -m tests.sim.manager --seeds N`, `--seed K --trace` for what one did."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.sim.manager.checks import Checks
from tests.sim.manager.engines import Engines
from tests.sim.manager.scenario import draw
from tests.sim.manager.scheduler import Process
from tests.sim.manager.world import World

_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Report:
    """What one run did. `outcomes`: how rooms ended, by state or error."""

    outcomes: Counter[str]
    trace: list[str]


class Failed(Exception):
    """A run that broke something: which seed, and its last steps."""

    def __init__(self, seed: int, cause: BaseException, trace: list[str]) -> None:
        super().__init__(f"seed {seed}: {type(cause).__name__}: {cause}")
        self.cause, self.trace = cause, trace


def run(seed: int, liar: str = "", lie: Callable[[bytes], bytes] = bytes) -> Report:
    """Raises `Failed`. `lie` alters each frame of the process `liar`."""
    world = World(draw(seed), liar)
    world.network.said_by = lambda process, frame: lie(frame) if process == liar else frame
    with world.installed():
        checks = Checks(world)
        with checks.watching():
            try:
                world.scheduler.run(Engines(world, checks).main, Process("main"))
            except BaseException as error:
                raise Failed(seed, error, _lines(world)) from error
    outcomes = Counter(
        type(handle.error).__name__ if handle.error is not None else handle.state.name for handle in checks.seen
    )
    return Report(outcomes, _lines(world))


def _lines(world: World) -> list[str]:
    names = [f"{task.process.name} {task.name}" for task in world.scheduler.tasks]
    return [f"{names[number]}: {where}" for number, where in world.scheduler.trace]


def run_many(seeds: Iterable[int]) -> Counter[str]:
    """How rooms ended in all of them. Raises the first `Failed`."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        outcomes.update(run(seed).outcomes)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.manager", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--trace", action="store_true", help="print every step of it")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds) if given.seed is None else [given.seed]
    outcomes: Counter[str] = Counter()
    n_failed = 0
    for seed in seeds:
        try:
            report = run(seed)
        except Failed as failure:
            n_failed += 1
            print(failure, flush=True)
            if given.seed is not None:
                print(*failure.trace[None if given.trace else -_SHOWN :], sep="\n  ")
                raise failure.cause from None
            continue
        outcomes.update(report.outcomes)
        if given.trace:
            print(*report.trace, sep="\n")
    ends = ", ".join(f"{n} {name}" for name, n in outcomes.most_common())
    print(f"{len(seeds)} seeds, {n_failed} failed: {ends}")
    return 1 if n_failed else 0

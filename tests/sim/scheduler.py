"""Draws the next event of a world: what moves, what goes wrong, whose engine acts, and when time passes.

Must not change the world. What it draws depends on the seed and on the world's state alone.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tests.pair import Decode
from tests.sim.fabric import HOW_TO_FAIL

if TYPE_CHECKING:
    from tests.pair import Item
    from tests.sim.seeds import Event
    from tests.sim.world import SimWorld

WAITS_S = (0.01, 0.1, 0.3, 0.3, 1.0)
STALL_CHECK = 0.02
MAX_LIVE_JOBS = 6


class Scheduler:
    """One seed's whims."""

    def __init__(self, world: SimWorld) -> None:
        self.world = world
        self.rng = random.Random(f"schedule/{world.scenario.seed}")
        self.slow: set[tuple[str, str, str]] = set()
        self.n_jobs = 0

    def next(self) -> Event:
        rng, scenario = self.rng, self.world.scenario
        event = self._mishap()
        if event is not None:
            return event
        steps = [at for at in self.world.engines.pending() if self._computed(at)]
        n_live = sum(len(side.live) for side in self.world.sides.values())
        if not steps and n_live < MAX_LIVE_JOBS and rng.random() < 0.3:
            return self._start()
        if steps and rng.random() < 0.3:
            return ("engine", *rng.choice(steps))
        ready = self.world.ready()
        if ready and rng.random() < (1.0 if scenario.calm else 0.97 if len(ready) > scenario.patience else 0.85):
            return self._move(self._pick(ready))
        if steps:
            return ("engine", *rng.choice(steps))
        return ("wait", rng.choice(WAITS_S))

    def _computed(self, at: tuple[int, str]) -> bool:
        """Whether the engine has come so far; it takes its time with data alone."""
        part = self.world.engines.todo[at]
        return part.steps[part.at][0] != "ready" or self.rng.random() < self.world.scenario.eager

    def _start(self) -> Event:
        self.n_jobs += 1
        return ("start", self.n_jobs - 1)

    def _mishap(self) -> Event | None:
        """At most one of what befalls ranks and links, by the scenario's rates."""
        rng, faults = self.rng, self.world.scenario.faults
        roll = rng.random()
        for verb in ("crash", "close", "stall", "cut", "abort", "unreachable", "slow"):
            rate = getattr(faults, verb)
            if roll < rate:
                return self._befalls(verb)
            roll -= rate
        if self.world.cuts and rng.random() < 0.03:
            return ("heal", *rng.choice(sorted(self.world.cuts)))
        stalled = [side.label for node, side in self.world.sides.items() if node.alive and side.stalled_at is not None]
        if stalled and rng.random() < STALL_CHECK:
            return ("resume", rng.choice(stalled).partition("'")[0])
        return None

    def _befalls(self, verb: str) -> Event | None:
        rng, world = self.rng, self.world
        match verb:
            case "unreachable":
                return (verb, rng.choice([node.name.decode() for node in world.prefill]))
            case "cut":
                ends = [rng.choice(side).name.decode() for side in (world.prefill, world.decode)]
                rng.shuffle(ends)
                return (verb, *ends)
            case "abort":
                rooms = [room for side in world.sides.values() if side.node.alive for room in side.live]
                if not rooms:
                    return None
                part = world.engines.of[rng.choice(rooms)]
                return (verb, part.job.uid, part.rank)
            case "slow":
                self._slow()
                return None
        return (verb, rng.choice([node.name.decode() for node in world.nodes()]))

    def _slow(self) -> None:
        """Things of one kind between two ranks become slow; or all are quick again."""
        if self.slow and self.rng.random() < 0.5:
            self.slow.clear()
            return
        src, dst = self.rng.choice(self.world.nodes()), self.rng.choice(self.world.nodes())
        kind = self.rng.choice(["frame", "land", "tag", "done", "gather", "scatter", "fence"])
        if kind in ("gather", "scatter", "done", "fence"):
            dst = src
        self.slow.add((kind, src.name.decode(), dst.name.decode()))

    def _pick(self, ready: list[Item]) -> Item:
        quick = (
            [i for i in ready if (i.kind, i.src.name.decode(), i.dst.name.decode()) not in self.slow]
            if self.slow
            else ready
        )
        pool = quick or ready
        return pool[0] if self.rng.random() < self.world.scenario.in_order else self.rng.choice(pool)

    def _move(self, item: Item) -> Event:
        rng, faults = self.rng, self.world.scenario.faults
        roll = rng.random()
        if (item.kind == "frame" and roll < faults.loss) or (item.kind == "tag" and roll < faults.tag_loss):
            return ("drop", item.key)
        if item.kind in ("frame", "tag") and roll > 1.0 - faults.twice:
            return ("twice", item.key)
        if item.kind in ("land", "done", "gather", "scatter") and roll < faults.fail:
            return ("fail", item.key, rng.choice(HOW_TO_FAIL))
        if item.kind == "land" and roll > 1.0 - faults.alter and not isinstance(item.src, Decode):
            return ("alter", item.key)
        return ("deliver", item.key)

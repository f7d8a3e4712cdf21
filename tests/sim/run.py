"""Runs a seed, or a schedule again; shrinks what fails and says it in words.

Must not know any invariant: a `Violation` names its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from tests.sim.scenario import draw
from tests.sim.scheduler import Scheduler
from tests.sim.seeds import Event, Failed, Report, Violation, run_many, tell
from tests.sim.world import SimWorld

STEPS = 500
ENGINES_S, REST_S = 60.0, 160.0
MAX_AT_REST = 100_000


def run(
    seed: int,
    *,
    steps: int = STEPS,
    events: Sequence[Event] | None = None,
    tracing: bool = False,
) -> Report:
    """One seed: `steps` steps of its schedule (or just `events`), then no more faults, until everything is over.

    Raises `Failed`, a `Violation`, if an invariant does not hold or a core raises.
    """
    report = Report(seed)
    world = SimWorld(draw(seed), tracing=tracing)
    report.trace = world.trace
    try:
        if events is None:
            _draw_events(world, report, steps)
        else:
            for event in events:
                report.events.append(event)
                if not world.apply(tuple(event)):
                    report.events.pop()
        _end(world)
    except Violation as violation:
        raise Failed(violation, report) from violation
    except Exception as error:
        raise Failed(Violation("error", f"{type(error).__name__}: {error}"), report) from error
    finally:
        report.n_steps, report.counts = world.n_steps, world.counts
    for side in world.sides.values():
        report.outcomes.update(_outcome(room) for room in side.ended)
    return report


def _outcome(room: object) -> str:
    error = getattr(room, "error", None)
    return type(error).__name__ if error is not None else "Success"


def _draw_events(world: SimWorld, report: Report, steps: int) -> None:
    scheduler = Scheduler(world)
    while world.n_steps < steps:
        event = scheduler.next()
        report.events.append(event)
        if not world.apply(event):
            report.events.pop()


def _end(world: SimWorld) -> None:
    """The faults are over: everything ends, is released, and nothing is left."""
    world.tell("the faults are over")
    for side in world.sides.values():
        if side.node.alive and side.stalled_at is not None:
            world.apply(("resume", side.node.name.decode()))
    world.cuts.clear()
    world.unreachable.clear()
    _rest(world, until=world.now + ENGINES_S, engines=True)
    _rest(world, until=world.now + REST_S, engines=False)
    world.checks.everything()
    world.checks.all_over(released=world.scenario.fences)
    if not world.scenario.fences:  # only the end of a process proves that nothing of it lands any more
        world.checks.quarantine_is_bounded()
        for node in list(world.prefill):
            world.apply(("crash", node.name.decode()))
        _rest(world, until=world.now + REST_S, engines=False)
    world.checks.all_over()
    world.checks.everything()
    if world.scenario.calm:
        world.engines.check_calm()
    world.checks.flat()


def _rest(world: SimWorld, until: float, *, engines: bool) -> None:
    """Delivers all there is, in order; time passes from one deadline to the next, until nothing is left to happen."""
    for _ in range(MAX_AT_REST):
        if engines and (steps := world.engines.pending()):
            world.apply(("engine", *steps[0]))
        elif ready := world.ready():
            world.apply(("deliver", ready[0].key))
        elif world.now >= until or (not world.engines.todo and world.at_rest() and world.checks.is_flat()):
            return
        else:
            world.apply(("wait", max(1e-9, min(world.due(), default=until) - world.now)))
    raise Violation("I10", "the world does not come to rest")


def shrink(failed: Failed, *, within_s: float) -> list[Event]:
    """Fewer events that break the same invariant, found in `within_s`: runs of events are left out, long ones first."""
    until = time.monotonic() + within_s

    def breaks(events: Sequence[Event]) -> list[Event] | None:
        """The events that meant something, if the same invariant breaks."""
        if time.monotonic() > until:
            return None
        try:
            run(failed.report.seed, events=events)
        except Failed as again:
            return again.report.events if again.args[0] == failed.args[0] else None
        return None

    events = failed.report.events
    size = max(1, len(events) // 2)
    while True:
        at, found = 0, False
        while at < len(events):
            kept = breaks(events[:at] + events[at + size :])
            if kept is None:
                at += size
            else:
                events, found = kept, True
        if size == 1 and not found:
            return events
        size = max(1, size // 2)


def tell_failure(failed: Failed, *, within_s: float) -> str:
    """The failure in words: the smallest schedule found, what it does, and how to run it again."""
    seed, events = failed.report.seed, shrink(failed, within_s=within_s)
    trace: list[str] = []
    try:
        run(seed, events=events, tracing=True)
    except Failed as again:
        failed, trace = again, again.report.trace
    again = f"pdstage sim --seed {seed} --replay"
    return "\n".join([str(draw(seed)), *trace, f"{failed}", f"{len(events)} events. Again: {again}"])


def main(
    *,
    seed: int | None = None,
    seeds: int = 2000,
    first: int = 0,
    steps: int = STEPS,
    replay: bool = False,
    workers: int = 2,
    shrink_s: float = 30.0,
) -> int:
    """What `pdstage sim` does. 0 if every invariant held, else 1."""
    if seed is None:
        seed = run_many(partial(run, steps=steps), range(first, first + seeds), workers)
        if seed is None:
            return 0
    try:
        report = run(seed, steps=steps, tracing=replay)
    except Failed as broken:
        print(tell_failure(broken, within_s=shrink_s))
        return 1
    print("\n".join([str(draw(seed)), *report.trace, tell([report])]))
    return 0

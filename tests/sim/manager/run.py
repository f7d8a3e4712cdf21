"""Runs one seed of whole nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tests.sim.manager.checks import Checks
from tests.sim.manager.engines import Engines
from tests.sim.manager.scenario import draw
from tests.sim.manager.scheduler import Process
from tests.sim.manager.world import World
from tests.sim.seeds import Failed, Report, Violation


def run(seed: int, liar: str = "", lie: Callable[[bytes], bytes] = bytes) -> Report:
    """Raises `Failed`. `lie` alters each frame of the process `liar`."""
    world = World(draw(seed), liar)
    world.network.said_by = lambda process, frame: lie(frame) if process == liar else frame
    report, error = Report(seed), None
    with world.installed():
        checks = Checks(world)
        with checks.watching():
            try:
                world.scheduler.run(Engines(world, checks).main, Process("main"))
            except BaseException as raised:  # noqa: BLE001  (of any thread: the run has failed)
                error = raised
    report.n_steps = world.scheduler.n_steps
    names = [f"{task.process.name} {task.name}" for task in world.scheduler.tasks]
    report.trace = [f"{names[number]}: {where}" for number, where in world.scheduler.trace]
    if error is not None:
        raise Failed(Violation(type(error).__name__, str(error)), report) from error
    report.outcomes = Counter(
        type(handle.error).__name__ if handle.error is not None else handle.state.name for handle in checks.seen
    )
    return report

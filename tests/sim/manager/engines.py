"""The threads of engines: one of each room at each rank, perhaps some that watch and one that aborts; who closes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from pdstage.errors import PdstageError, UsageError
from pdstage.protocol.session import HOLD_EVERY_S
from pdstage.protocol.state import State
from tests.sim.manager.checks import ENDED, Checks, Seen
from tests.sim.manager.loop import run_in_loop
from tests.sim.manager.scheduler import STEP_S, Task
from tests.sim.manager.world import CONFIG, DEADLINE_S

if TYPE_CHECKING:
    import numpy as np

    from pdstage.manager.handle import Handle
    from pdstage.metadata import AuxRow
    from tests.sim.manager.scenario import Disturbance, Room
    from tests.sim.manager.world import Host, World

_TRIES = 20
_LOOK_S = 5e-3
_LONG_S = 60.0
"""No wait may take so long: what it waits for has a deadline."""


class _Ready:
    """An engine's event, and what the engine does in memory until it is done."""

    def __init__(self, world: World, after_s: float, work: Callable[[], None] = lambda: None) -> None:
        self._done, self._work = False, work
        if after_s:
            world.scheduler.at(after_s, self._be)
        else:
            self._be()

    def _be(self) -> None:
        self._work()
        self._done = True

    def query(self) -> bool:
        return self._done


class Engines:
    def __init__(self, world: World, checks: Checks) -> None:
        self._world, self._checks = world, checks
        self._scheduler = world.scheduler
        self._tasks: list[Task] = []

    def main(self) -> None:
        """A whole run, in a thread of no node's process."""
        world = self._world
        for host in world.hosts:
            self._start(host, "engine", partial(self._boot, host))
        self._join()
        for disturbance in world.scenario.disturbances:
            self._scheduler.at(disturbance.at_s, partial(self._disturb, disturbance))
        for host in world.hosts:
            if host.node is not None:
                self._serve(host)
        self._join()
        for host in world.hosts:
            if host.node is not None and not host.closed:
                self._start(host, "closer", partial(self._close, host, 2.0))
        self._join()
        self._scheduler.block("what is under way", 3.0)
        self._checks.at_end()

    def _start(self, host: Host, name: str, target: Callable[[], None]) -> None:
        self._tasks.append(self._scheduler.start(target, f"{name} of {host.name}", host.process))

    def _join(self) -> None:
        began_at = self._scheduler.now
        while any(not task.done and not task.process.dead for task in self._tasks):
            self._scheduler.block("engines", 0.5)
            if self._scheduler.now - began_at > 2 * _LONG_S + self._slack_s():
                self._scheduler.violate(f"engines go on for ever\n{self._scheduler.stacks()}")

    def _slack_s(self) -> float:
        """What deadlines may be late by, for reasons that are not the library's."""
        return self._world.lost_s + self._scheduler.n_steps * STEP_S

    def _boot(self, host: Host) -> None:
        for _ in range(_TRIES):
            try:
                host.node = self._world.make(host)
            except (PdstageError, ValueError):  # what the directory's client was scripted to raise
                self._scheduler.block("an engine's time", 0.05)
            else:
                self._checks.hold_to_the_lock(host.node)
                return

    def _serve(self, host: Host) -> None:
        job = self._send if host.writes else self._receive
        for number, room in enumerate(self._world.scenario.rooms):
            self._start(host, f"{room.name}", partial(job, host, number, room))
        if self._world.scenario.turner and host.node.driver.inline:
            self._start(host, "turner", partial(self._turn, host))

    # Rooms.

    @contextmanager
    def _until_closed(self, host: Host) -> Iterator[None]:
        """A closed node refuses what is asked of it; an open one refuses nothing here."""
        try:
            yield
        except UsageError:
            if not host.closed:
                raise

    def _pass(self, host: Host, seconds: float) -> None:
        """An inline node goes on meanwhile, as engines keep it."""
        if not host.node.driver.inline:
            if seconds:
                self._scheduler.block("an engine's time", seconds)
            return
        until = self._scheduler.now + seconds
        while (left_s := until - self._scheduler.now) > 0:
            if not host.node.turn(min(left_s, 0.02)):
                self._scheduler.block("an engine's time", min(left_s, 2e-3))

    def _turn(self, host: Host) -> None:
        until = self._scheduler.now + 2.0
        with self._until_closed(host):
            while self._scheduler.now < until:
                host.node.turn(0.02)
                self._scheduler.block("an engine's time", 2e-3)

    def _send(self, host: Host, number: int, room: Room) -> None:
        node, rank = host.node, host.rank
        with self._until_closed(host):
            self._pass(host, room.send_s)
            if host.gave_back is not None:
                return
            pages = rank.allocate(room.tokens)
            sender = node.send(room.name)
            row = self._row(host, room.aux)
            seen = self._met(host, number, room, sender, pages, row)
            computed = _Ready(self._world, room.ready_s, partial(self._checks.compute, seen))
            bounds = [room.tokens * n // room.n_chunks for n in range(room.n_chunks + 1)]
            for start, stop in itertools.pairwise(bounds):
                if start < stop:
                    sender.chunk(pages, (start, stop), ready=computed)
                    self._pass(host, room.chunk_s)
            sender.finish(row or room.aux, ready=_Ready(self._world, room.ready_s) if room.ready_s else None)
            self._see_it_through(host, room, sender, room.waits[0])

    def _receive(self, host: Host, number: int, room: Room) -> None:
        with self._until_closed(host):
            self._pass(host, room.receive_s)
            pages = host.rank.allocate(room.tokens)
            receiver = host.node.receive(room.name, room.address, deadline_s=DEADLINE_S)
            row = self._row(host, b"")
            seen = self._met(host, number, room, receiver, pages, row)
            self._pass(host, room.bind_s)
            self._checks.use(seen)
            free = _Ready(self._world, room.after_s, partial(self._checks.stop_using, seen))
            receiver.bind(pages, room.tokens, after=free, aux=row)
            self._see_it_through(host, room, receiver, room.waits[1])

    def _row(self, host: Host, said: bytes | None) -> AuxRow | None:
        if host.metadata is None or said is None:
            return None
        row = host.metadata.allocate()
        row["said"] = list(said.ljust(16, b"\0"))
        return row

    def _met(self, host: Host, number: int, room: Room, handle: Handle, pages: np.ndarray, row: AuxRow | None) -> Seen:
        seen = self._checks.seen[handle] = Seen(host, room, number, pages, row)
        side, at_s = room.abort
        if side == host.name[0]:
            self._start(host, f"aborter of {room.name}", partial(self._abort, host, handle, seen, at_s))
        for _ in range(2 if room.watched else 0):
            self._start(host, f"watcher of {room.name}", partial(self._watch, host, handle))
        return seen

    def _abort(self, host: Host, handle: Handle, seen: Seen, at_s: float | None) -> None:
        with self._until_closed(host):
            if at_s is not None:
                self._scheduler.block("an engine's time", at_s)
            elif not handle.released:
                self._until_a_change(seen, 1.0)
            handle.abort("scripted")

    def _watch(self, host: Host, handle: Handle) -> None:
        """What one thread is told follows from what it was told before; `poll_many` may be a moment behind."""
        was = many = int(State.BOOTSTRAPPING)
        rng, others = self._world.rng, list(self._checks.seen)
        until = self._scheduler.now + 2.0
        with self._until_closed(host):
            while self._scheduler.now < until and not handle.released:
                asked = [handle, *(other for other in others if self._checks.seen[other].host is host)]
                asked = asked[: rng.randint(1, len(asked))]
                states, released = host.node.poll_many(asked)
                self._checks.must(
                    len(states) == len(released) == len(asked), f"poll_many of {len(asked)} gives {len(states)}"
                )
                told = int(states[0]) | int(released[0]) << 7
                self._checks.follows(handle, many, told)
                state, status = handle.poll(), handle.status
                self._checks.follows(handle, was, int(state))
                self._checks.follows(handle, int(state), status)
                many, was = told, status
                self._scheduler.block("an engine's time", _LOOK_S - self._scheduler.now % _LOOK_S)  # all at one time

    def _see_it_through(self, host: Host, room: Room, handle: Handle, how: str) -> None:
        """Until its memory may be used again, and uses it."""
        began_at, slack_s = self._scheduler.now, self._slack_s()
        self._wait(host, handle, how, lambda: handle.state in ENDED, handle.wait, handle.wait_async)
        # With a room that decode waits with, prefill goes on for three holds after the last it heard.
        most_s = max(CONFIG.max_deadline_s, 3 * HOLD_EVERY_S) + 2.0 if host.writes else DEADLINE_S + 1.0
        took_s = self._scheduler.now - began_at - (self._slack_s() - slack_s)
        self._checks.must(took_s <= most_s, f"room {room.name} at {host.name} took {took_s:.1f} s to end")
        self._same_everywhere(host, handle)
        self._until_released(host, handle, how)
        self._checks.reuse(self._checks.seen[handle])

    def _same_everywhere(self, host: Host, handle: Handle) -> None:
        state = handle.state
        told = {state, handle.poll(), handle.room.state}
        self._checks.must(told == {state}, f"room {handle.id!r} at {host.name} is told as {sorted(told)}")
        try:
            outcome = handle.wait(0)
        except PdstageError as error:
            self._checks.must(error is handle.error and state is State.FAILED, f"wait raised {error!r}")
        else:
            self._checks.must(outcome is state is State.SUCCESS, f"wait says {outcome}")

    def _until_released(self, host: Host, handle: Handle, how: str) -> None:
        """Once nothing can land any more, an operator says so of whom nobody can prove it."""
        for last in (False, True):
            try:
                self._wait(
                    host, handle, how, lambda: handle.released, handle.wait_released, handle.wait_released_async,
                    20.0 + self._world.lost_s,
                )  # fmt: skip
            except TimeoutError:
                if last:
                    self._scheduler.violate(f"room {handle.id!r} at {host.name} is not released")
            else:
                return
            while any(life.n_under_way for life in self._world.fabric.lives.values()):
                self._pass(host, 0.1)
            for endpoint in host.node.unfenced():
                host.node.fence(endpoint)

    def _wait(
        self,
        host: Host,
        handle: Handle,
        how: str,
        done: Callable[[], bool],
        wait: Callable[[float], object],
        wait_async: Callable[[float], object],
        timeout_s: float = _LONG_S,
    ) -> None:
        if how in ("wait", "async"):
            try:
                if how == "wait" or host.node.driver.inline:
                    wait(timeout_s)
                else:
                    run_in_loop(self._scheduler, lambda: wait_async(timeout_s))
            except UsageError:
                raise
            except PdstageError as error:
                self._checks.must(error is handle.error, f"room {handle.id!r} raised {error!r}, not {handle.error!r}")
            self._checks.must(done(), f"a wait for room {handle.id!r} ended before it did")
            return
        until, pause_s = self._scheduler.now + timeout_s, 1e-3
        while not done():
            if self._scheduler.now > until:
                raise TimeoutError
            pause_s = min(2 * pause_s, 0.05)
            if how == "short waits":
                self._until_a_change(self._checks.seen[handle], pause_s)
                try:
                    wait(pause_s)
                except TimeoutError:
                    pass
                except PdstageError as error:
                    if error is not handle.error:
                        raise
                continue
            if how == "poll":
                handle.poll()
            else:
                host.node.poll_many([handle])
            self._scheduler.block("an engine's time", pause_s)

    def _until_a_change(self, seen: Seen, timeout_s: float) -> None:
        before = seen.n_changes
        self._scheduler.block("an engine's time", timeout_s, lambda: seen.n_changes != before)

    # Disturbances.

    def _disturb(self, what: Disturbance) -> None:
        """Called between the steps of threads."""
        world, host = self._world, self._world.host(what.process)
        if host.node is None or host.ended:
            return
        match what.kind:
            case "stop":
                world.stop(host, what.for_s)
            case "jump":
                world.jump(host, what.for_s)
            case "cut":
                world.cut(host, what.for_s)
            case "end":
                world.end(host)
            case "close":
                for _ in range(1 + what.twice):
                    self._start(host, "closer", partial(self._close, host, what.for_s))
                if what.twice:
                    self._start(host, "intruder", partial(self._intrude, host))

    def _intrude(self, host: Host) -> None:
        """Begins rooms and gives them up until the node refuses."""
        with self._until_closed(host):
            for n in range(_TRIES):
                node, name = host.node, f"x{n}"
                handle = node.send(name) if host.writes else node.receive(name, "one:1", deadline_s=DEADLINE_S)
                self._checks.intruders.append((host, handle))
                if n % 2:
                    handle.abort("scripted")
                self._scheduler.block("an engine's time", 2e-3)

    def _close(self, host: Host, timeout_s: float) -> None:
        host.closed = True
        gave_back = host.node.close(timeout_s)
        if host.gave_back is None and gave_back:
            self._checks.reuse_all(host)
        host.gave_back = gave_back

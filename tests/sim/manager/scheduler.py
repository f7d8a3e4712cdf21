"""Who runs: many threads of which one runs at a time, and a clock that moves when all of them wait.

A thread gives way at *pauses* alone: at each lock, event, queue and clock of `primitives`, each call of a socket or
transport, and at lines of the manager's own modules, which a trace function counts. Who goes on is drawn from a seed,
so a run is a sequence of choices. When all wait and nothing is to come, that is a deadlock, and told with every stack.

The threads are the system's, so that whatever they call finds what it is used to; each waits for its own lock.
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import math
import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tests.sim.seeds import Violation

PDSTAGE = Path(__file__).resolve().parents[3] / "pdstage"
_MANAGER = frozenset(str(path) for path in [*(PDSTAGE / "manager").glob("*.py"), PDSTAGE / "protocol" / "room.py"])
_CORES = _MANAGER | frozenset(str(path) for path in (PDSTAGE / "protocol").glob("*.py"))
STEP_S = 5e-6
Work = Callable[[], None]
_GLANCE = 0.3
_STUCK_S = 120.0
"""Real seconds after which a run that neither ends nor fails has met something that the scheduler does not know."""


class Over(BaseException):
    """The run is over: ends each of its threads where it waits."""


@dataclass(eq=False, slots=True)
class Process:
    """A process of the simulated host, with a clock of its own."""

    name: str
    ahead_s: float = 0.0
    """How far its clock is before the simulator's."""
    stopped: int = 0
    """By how many causes it is stopped now."""
    dead: bool = False

    @property
    def runs(self) -> bool:
        return not self.stopped and not self.dead


@dataclass(eq=False, slots=True)
class Task:
    """One thread. `waits_for` is empty while it may run."""

    name: str
    process: Process
    number: int
    baton: _thread.LockType = field(default_factory=_thread.allocate_lock)
    waits_for: str = ""
    until: float = math.inf
    ready: Callable[[], bool] = bool
    done: bool = False
    ident: int = 0

    def may_run(self, now: float) -> bool:
        """Its process permitting."""
        return not self.waits_for or now >= self.until or self.ready()


class Scheduler:
    """One run. `switches` is the chance that another thread goes on at a pause, `lines` that at a line: of the
    manager's modules, or if `deep` of the protocol's too.
    """

    def __init__(self, seed: int, *, switches: float, lines: float, deep: bool, max_steps: int) -> None:
        self._rng = random.Random(f"scheduler {seed}")
        self._watched = _CORES if deep else _MANAGER
        self._switches, self._lines, self._max_steps = switches, lines, max_steps
        self.now = 0.0
        self.n_steps = 0
        self.trace: list[tuple[int, str]] = []
        """Each step: the thread's number, and where it paused."""
        self.tasks: list[Task] = []
        self.failure: BaseException | None = None
        self.over = False
        self.at_rest: list[Work] = []
        """Asked whenever nobody can run: each may raise a `Violation`."""
        self._current: Task | None = None
        self._events: list[tuple[float, int, Work]] = []
        self._n = itertools.count()
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        self._lines_left, self._gives_way = self._until_line(), True
        self._threads: list[threading.Thread] = []

    # Running.

    def run(self, main: Work, process: Process) -> None:
        """Runs `main` as the first thread until it ends, and raises what anything of the run raised."""
        self._current = first = self.start(main, "main", process)
        first.baton.release()
        if not self._ended.acquire(timeout=_STUCK_S):
            self.fail(Violation(f"a thread does not come back\n{self.stacks()}"))
        self.over = True
        for task in self.tasks:
            if not task.done and task.baton.locked():
                task.baton.release()
        for thread in self._threads:
            thread.join(_STUCK_S)
        if self.failure is not None:
            raise self.failure

    def start(self, target: Work, name: str, process: Process) -> Task:
        task = Task(name, process, len(self.tasks))
        task.baton.acquire()
        self.tasks.append(task)

        def body() -> None:
            task.baton.acquire()
            try:
                self._check_over()
                task.ident = threading.get_ident()
                if self._lines:
                    sys.settrace(self._traced)
                target()
            except Over:
                pass
            except BaseException as error:  # noqa: BLE001  (of any thread: the run has failed)
                if not self.over:
                    self.fail(error)
            finally:
                sys.settrace(None)
                self._leave(task)

        self._threads.append(threading.Thread(target=body, name=f"sim {name}", daemon=True))
        self._threads[-1].start()
        return task

    def _leave(self, task: Task) -> None:
        task.done = True
        if task.number == 0 or self.over:
            if not self.over:
                self.over = True
            if self._ended.locked():
                self._ended.release()
            return
        try:
            following = self._next()
        except Over:
            return
        self._current = following
        following.baton.release()

    def fail(self, error: BaseException) -> None:
        """Ends the run, from wherever."""
        if self.failure is None:
            self.failure = error
        self.over = True
        if self._ended.locked():
            self._ended.release()

    def violate(self, what: str) -> None:
        """Ends the run, from one of its threads."""
        self.fail(Violation(what))
        raise Over

    def _check_over(self) -> None:
        if self.over:
            raise Over

    @property
    def current(self) -> Task:
        assert self._current is not None
        return self._current

    # What threads do.

    def pause(self, where: str, chance: float | None = None) -> None:
        """Another thread may go on here, with `chance` or that of this run."""
        self._check_over()
        me = self._step(where)
        chance = self._switches if chance is None else chance
        if me.process.runs and not self._is_due() and self._rng.random() >= chance:
            return
        self._give_way(me)

    def glance(self, where: str) -> None:
        """As `pause`, likelier, where threads look at what others change. Checks look too, and do not give way."""
        if self._gives_way and self._current is not None and self._current.ident == threading.get_ident():
            self.pause(where, _GLANCE)

    def block(self, what: str, timeout_s: float | None = None, ready: Callable[[], bool] = bool) -> bool:
        """Waits until `ready`, which may not pause, or `timeout_s` is over; whether it is ready."""
        self._check_over()
        if ready():
            return True
        me = self._step(what)
        me.waits_for, me.ready, me.until = what, ready, math.inf
        if timeout_s is not None:
            me.until = self.now + max(timeout_s, 0.0)
            heapq.heappush(self._events, (me.until, next(self._n), lambda: None))
        self._give_way(me)
        me.waits_for = ""
        return ready()

    def _step(self, where: str) -> Task:
        me = self.current
        self.n_steps += 1
        self.now += STEP_S
        self.trace.append((me.number, where))
        if self.n_steps > self._max_steps:
            self.violate(f"{self.n_steps} steps, and no end\n{self.stacks()}")
        return me

    def _give_way(self, me: Task) -> None:
        following = self._next()
        if following is not me:
            self._current = following
            following.baton.release()
            me.baton.acquire()
            self._check_over()

    # Whose turn it is.

    def _is_due(self) -> bool:
        return bool(self._events) and self._events[0][0] <= self.now

    def _next(self) -> Task:
        """Nothing that is called from here gives way, at whichever line."""
        self._gives_way = False
        try:
            return self._drawn()
        finally:
            self._gives_way = True

    def _drawn(self) -> Task:
        while True:
            while self._is_due():
                heapq.heappop(self._events)[2]()
            able = [one for one in self.tasks if not one.done and one.process.runs and one.may_run(self.now)]
            if able:
                return able[self._rng.randrange(len(able))] if len(able) > 1 else able[0]
            try:
                for check in self.at_rest:
                    check()
            except Violation as violation:
                self.fail(violation)
                raise Over from None
            if not self._events:
                self.violate(f"nobody can go on, and nothing is to come\n{self.stacks()}")
            self.now = max(self.now, self._events[0][0])

    # Time.

    def at(self, delay_s: float, event: Work) -> None:
        """Calls `event`, which may not pause, after `delay_s`."""
        heapq.heappush(self._events, (self.now + delay_s, next(self._n), event))

    def clock(self) -> float:
        """The monotonic clock of the process whose thread asks."""
        self.pause("clock")
        return self.now + self.current.process.ahead_s

    # Lines.

    def _until_line(self) -> int:
        return 1 + int(self._rng.expovariate(self._lines)) if self._lines else 1 << 62

    def _traced(self, frame: FrameType, event: str, arg: object) -> object:
        return self._at_line if frame.f_code.co_filename in self._watched else None

    def _at_line(self, frame: FrameType, event: str, arg: object) -> object:
        if event == "line" and self._gives_way:
            self._lines_left -= 1
            if self._lines_left <= 0:
                self._lines_left = self._until_line()
                self._check_over()
                me = self._step(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
                self._give_way(me)
        return self._at_line

    # For people.

    def stacks(self) -> str:
        frames = sys._current_frames()
        said = []
        for task in self.tasks:
            if task.done:
                continue
            at = traceback.extract_stack(frames[task.ident]) if task.ident in frames else []
            here = [one for one in at if "/tests/sim/manager/scheduler.py" not in one.filename][-8:]
            doing = f"waits for {task.waits_for}" if task.waits_for else "may run"
            said.append(f"-- {task.name} of {task.process.name} {doing}")
            said += [f"   {Path(one.filename).name}:{one.lineno} {one.name}: {one.line}" for one in here]
        return "\n".join(said)

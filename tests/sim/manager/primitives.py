"""What the manager takes from threading, queue and time, made of a `Scheduler`.

Nothing here may be used outside a run's threads.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

from tests.sim.manager.scheduler import Scheduler, Task

_SWITCH_S = 5e-3
"""Python's switch interval."""


class Lock:
    """`threading.Lock`, or with `again` an `RLock`."""

    def __init__(self, scheduler: Scheduler, *, again: bool = False) -> None:
        self._scheduler, self._again = scheduler, again
        self.owner: Task | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1.0) -> bool:
        scheduler = self._scheduler
        scheduler.pause("acquire")
        me = scheduler.current
        if self._again and self.owner is me:
            self._depth += 1
            return True
        if self.owner is not None and not blocking:
            scheduler.block("a switch", _SWITCH_S)  # whoever tries in a loop is not alone
            return False
        if not scheduler.block("a lock", None if timeout < 0 else timeout, lambda: self.owner is None):
            return False
        self.owner, self._depth, self.since = me, 1, scheduler.now + me.process.ahead_s
        return True

    def release(self) -> None:
        if self._scheduler.over:
            return
        assert self.owner is self._scheduler.current or not self._again, "released by another thread"
        assert self.owner is not None, "released, and held by nobody"
        self._depth -= 1
        if self._depth:
            return
        self.owner = None
        self._scheduler.pause("release")

    def locked(self) -> bool:
        return self.owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._scheduler, self._lock = scheduler, lock or Lock(scheduler, again=True)
        self._waiting: list[Task] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert self._lock.locked()
        me, lock = self._scheduler.current, self._lock
        self._waiting.append(me)
        lock.owner, lock._depth = None, 0
        told = self._scheduler.block("a condition", timeout, lambda: me not in self._waiting)
        if not told:
            self._waiting.remove(me)
        lock.acquire()
        return told

    def notify(self, n: int = 1) -> None:
        assert self._lock.locked()
        del self._waiting[:n]

    def notify_all(self) -> None:
        self._waiting.clear()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._set = scheduler, False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._scheduler.pause("set")

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._scheduler.pause("wait")
        return self._scheduler.block("an event", timeout, self.is_set)


class SimpleQueue:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held: deque[object] = deque()

    def put(self, item: object) -> None:
        self._held.append(item)
        self._scheduler.pause("put")

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        self._scheduler.pause("get")
        if not self._scheduler.block("a queue", timeout if block else 0.0, lambda: bool(self._held)):
            raise queue.Empty
        return self._held.popleft()

    def empty(self) -> bool:
        return not self._held


class Thread:
    """In the process of the thread that makes it."""

    def __init__(
        self,
        scheduler: Scheduler,
        target: Callable[[], None],
        name: str = "thread",
        daemon: bool | None = None,
        refused: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._scheduler, self._target, self.name, self.daemon = scheduler, target, name, daemon
        self._refused = refused
        self.task: Task | None = None

    def start(self) -> None:
        if self._refused(self.name):
            raise RuntimeError("can't start new thread")
        self.task = self._scheduler.start(self._target, self.name, self._scheduler.current.process)
        self._scheduler.pause("start")

    def join(self, timeout: float | None = None) -> None:
        scheduler, task = self._scheduler, self.task
        if task is None:
            raise RuntimeError("cannot join thread before it is started")
        assert task is not scheduler.current, "joins itself"
        scheduler.pause("join")
        scheduler.block(f"the end of {self.name}", timeout, lambda: task.done)

    def is_alive(self) -> bool:
        return self.task is not None and not self.task.done


def threading_of(scheduler: Scheduler, refused: Callable[[str], bool]) -> SimpleNamespace:
    """The module `threading`; `refused` says of a thread's name whether the system has none left."""
    return SimpleNamespace(
        Lock=lambda: Lock(scheduler),
        RLock=lambda: Lock(scheduler, again=True),
        Condition=lambda lock=None: Condition(scheduler, lock),
        Event=lambda: Event(scheduler),
        get_ident=lambda: id(scheduler.current),
        Thread=lambda *, target, name="thread", daemon=None: Thread(scheduler, target, name, daemon, refused),
    )


def time_of(scheduler: Scheduler) -> SimpleNamespace:
    def sleep(seconds: float) -> None:
        scheduler.block("time", seconds)

    return SimpleNamespace(monotonic=scheduler.clock, thread_time=scheduler.clock, sleep=sleep)

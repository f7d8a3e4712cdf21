"""What the manager takes from threading, queue, time, random and secrets, made of a `Scheduler`.

Nothing here may be used outside a run's threads.
"""

from __future__ import annotations

import queue
import random
from collections import deque
from collections.abc import Callable, Sequence
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
        self.waiters = Waiters(scheduler)

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
        if not self.waiters.until(lambda: self.owner is None, "a lock", None if timeout < 0 else timeout):
            return False
        self.owner, self._depth = me, 1
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
        self.waiters.wake()
        self._scheduler.pause("release")

    def locked(self) -> bool:
        return self.owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Waiters:
    """Threads that wait for one thing."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._tasks: list[Task] = []

    def add(self, task: Task) -> None:
        self._tasks.append(task)

    def discard(self, task: Task) -> None:
        if task in self._tasks:
            self._tasks.remove(task)

    def wait(self, what: str, timeout_s: float | None) -> bool:
        me = self._scheduler.current
        self.add(me)
        woken = self._scheduler.block(what, timeout_s)
        self.discard(me)
        return woken

    def until(self, done: Callable[[], bool], what: str, timeout_s: float | None) -> bool:
        return wait_until(self._scheduler, done, [self], what, timeout_s)

    def wake(self, n: int | None = None) -> None:
        woken, self._tasks = self._tasks[:n], self._tasks[len(self._tasks[:n]) :]
        for task in woken:
            self._scheduler.wake(task)


def wait_until(
    scheduler: Scheduler, done: Callable[[], bool], watched: Sequence[Waiters], what: str, timeout_s: float | None
) -> bool:
    """Waits until `done`, which is asked whenever one of `watched` wakes; False if it is not after `timeout_s`."""
    me = scheduler.current
    ends_at = None if timeout_s is None else scheduler.now + timeout_s
    while not done():
        left_s = None if ends_at is None else ends_at - scheduler.now
        if left_s is not None and left_s <= 0:
            return False
        for waiters in watched:
            waiters.add(me)
        scheduler.block(what, left_s)
        for waiters in watched:
            waiters.discard(me)
    return True


class Condition:
    def __init__(self, scheduler: Scheduler, lock: Lock | None = None) -> None:
        self._lock = lock or Lock(scheduler, again=True)
        self._waiters = Waiters(scheduler)

    def wait(self, timeout: float | None = None) -> bool:
        assert self._lock.locked()
        lock = self._lock
        lock.owner, lock._depth = None, 0
        lock.waiters.wake()
        woken = self._waiters.wait("a condition", timeout)
        lock.acquire()
        return woken

    def notify(self, n: int = 1) -> None:
        assert self._lock.locked()
        self._waiters.wake(n)

    def notify_all(self) -> None:
        self._waiters.wake()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._waiters, self._set = scheduler, Waiters(scheduler), False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake()
        self._scheduler.pause("set")

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._scheduler.pause("wait")
        return self._waiters.until(self.is_set, "an event", timeout)


class SimpleQueue:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._waiters = scheduler, Waiters(scheduler)
        self._held: deque[object] = deque()

    def put(self, item: object) -> None:
        self._held.append(item)
        self._waiters.wake(1)
        self._scheduler.pause("put")

    def get(self, block: bool = True, timeout: float | None = None) -> object:
        self._scheduler.pause("get")
        if not self._waiters.until(lambda: bool(self._held), "a queue", timeout if block else 0.0):
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
        until = None if timeout is None else scheduler.now + timeout
        while not task.done:
            left_s = None if until is None else until - scheduler.now
            if left_s is not None and left_s <= 0:
                return
            task.joined.append(scheduler.current)
            scheduler.block(f"the end of {self.name}", left_s)

    def is_alive(self) -> bool:
        return self.task is not None and not self.task.done


def threading_of(scheduler: Scheduler, refused: Callable[[str], bool]) -> SimpleNamespace:
    """The module `threading`; `refused` says of a thread's name whether the system has none left."""
    return SimpleNamespace(
        Lock=lambda: Lock(scheduler),
        RLock=lambda: Lock(scheduler, again=True),
        Condition=lambda lock=None: Condition(scheduler, lock),
        Event=lambda: Event(scheduler),
        Thread=lambda *, target, name="thread", daemon=None: Thread(scheduler, target, name, daemon, refused),
    )


def queue_of(scheduler: Scheduler) -> SimpleNamespace:
    return SimpleNamespace(SimpleQueue=lambda: SimpleQueue(scheduler), Empty=queue.Empty)


def time_of(scheduler: Scheduler) -> SimpleNamespace:
    def sleep(seconds: float) -> None:
        scheduler.block("time", seconds)

    return SimpleNamespace(monotonic=scheduler.clock, thread_time=scheduler.clock, sleep=sleep)


def random_of(rng: random.Random) -> SimpleNamespace:
    return SimpleNamespace(uniform=rng.uniform)


def secrets_of(rng: random.Random) -> SimpleNamespace:
    return SimpleNamespace(randbits=rng.getrandbits, token_hex=lambda n: rng.randbytes(n).hex())

"""An event loop whose clock and waits are the scheduler's."""

from __future__ import annotations

import asyncio
from asyncio import base_events
from collections.abc import Callable

from tests.sim.manager.primitives import Thread
from tests.sim.manager.scheduler import Scheduler


class Loop(base_events.BaseEventLoop):
    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler, self._selector = scheduler, self
        self._woken = False

    def time(self) -> float:
        return self._scheduler.now

    def select(self, timeout: float | None) -> list[asyncio.Handle]:
        """As a selector's, which is what the loop's base takes this for."""
        self._scheduler.pause("select")
        self._scheduler.block("its event loop", timeout, lambda: self._woken)
        self._woken = False
        return []

    def _process_events(self, events: list[asyncio.Handle]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        self._woken = True
        self._scheduler.pause("a loop is called")

    def run_in_executor(self, executor: object, call: Callable, *args: object) -> asyncio.Future:
        """In a thread of its own."""
        future = self.create_future()

        def run() -> None:
            try:
                result, error = call(*args), None
            except Exception as raised:  # noqa: BLE001  (the future's)
                result, error = None, raised
            if error is not None:
                self.call_soon_threadsafe(future.set_exception, error)
            else:
                self.call_soon_threadsafe(future.set_result, result)

        Thread(self._scheduler, run, "an executor's").start()
        return future


def run_in_loop(scheduler: Scheduler, main: Callable) -> object:
    """`asyncio.run` of `main()`, in this thread."""
    loop = Loop(scheduler)
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()

"""An event loop whose clock and waits are the scheduler's."""

from __future__ import annotations

import asyncio
from asyncio import base_events
from collections.abc import Callable

from tests.sim.manager.network import Network
from tests.sim.manager.primitives import Thread, Waiters, wait_until


class Loop(base_events.BaseEventLoop):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network, self._scheduler = network, network.scheduler
        self._selector = self
        self._waiters = Waiters(self._scheduler)
        self._woken = False

    def time(self) -> float:
        return self._scheduler.now

    def select(self, timeout: float | None) -> list[asyncio.Handle]:
        """As a selector's, which is what the loop's base takes this for."""
        self._scheduler.pause("select")
        wait_until(self._scheduler, lambda: self._woken, [self._waiters], "its event loop", timeout)
        self._woken = False
        return []

    def _process_events(self, events: list[asyncio.Handle]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        self._woken = True
        self._waiters.wake()
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


def run_in_loop(network: Network, main: Callable) -> object:
    """`asyncio.run` of `main()`, in this thread."""
    loop = Loop(network)
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()

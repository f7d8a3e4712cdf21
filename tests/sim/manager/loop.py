"""An event loop whose clock and waits are the scheduler's, and the epoll that the manager's pump watches it with."""

from __future__ import annotations

import asyncio
from asyncio import base_events
from collections.abc import Callable
from types import SimpleNamespace

from tests.sim.manager.network import Network
from tests.sim.manager.primitives import Thread, Waiters, wait_until


class Epoll:
    """`select.epoll` of simulated descriptors; itself one that a loop can watch."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self.number = 200_000 + len(network.epolls)
        self.watched: set[int] = set()
        network.epolls[self.number] = self

    def fileno(self) -> int:
        return self.number

    def register(self, fd: int, flags: int) -> None:
        if fd in self.watched:
            raise FileExistsError
        self.watched.add(fd)

    def unregister(self, fd: int) -> None:
        if fd not in self.watched:
            raise FileNotFoundError
        self.watched.remove(fd)

    def close(self) -> None:
        self.watched.clear()


def select_of(network: Network) -> SimpleNamespace:
    """The module `select`."""
    return SimpleNamespace(epoll=lambda: Epoll(network), EPOLLIN=1)


class Loop(base_events.BaseEventLoop):
    def __init__(self, network: Network) -> None:
        super().__init__()
        self._network, self._scheduler = network, network.scheduler
        self._selector = self
        self._waiters = Waiters(self._scheduler)
        self._woken = False
        self._readers: dict[int, asyncio.Handle] = {}

    def time(self) -> float:
        return self._scheduler.now

    def select(self, timeout: float | None) -> list[asyncio.Handle]:
        """As a selector's, which is what the loop's base takes this for."""
        self._scheduler.pause("select")
        watched = [self._waiters, *(one.waiters for one in self._descriptors())]
        wait_until(
            self._scheduler, lambda: self._woken or bool(self._ready_readers()), watched, "its event loop", timeout
        )
        self._woken = False
        return self._ready_readers()

    def _descriptors(self) -> list:
        network = self._network
        return [network.descriptors[fd] for number in self._readers for fd in sorted(network.epolls[number].watched)]

    def _ready_readers(self) -> list[asyncio.Handle]:
        network = self._network
        return [
            handle
            for number, handle in self._readers.items()
            if any(network.descriptors[fd].readable for fd in network.epolls[number].watched)
        ]

    def _process_events(self, events: list[asyncio.Handle]) -> None:
        for handle in events:
            if not handle._cancelled:
                self._ready.append(handle)

    def _write_to_self(self) -> None:
        self._woken = True
        self._waiters.wake()
        self._scheduler.pause("a loop is called")

    def add_reader(self, fd: int, callback: Callable, *args: object) -> None:
        self._readers[fd] = asyncio.Handle(callback, args, self, None)

    def remove_reader(self, fd: int) -> bool:
        handle = self._readers.pop(fd, None)
        if handle is not None:
            handle.cancel()
        return handle is not None

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
        loop._readers.clear()
        loop.close()

"""One process has all ranks of one side: on few cores a process per rank would measure the scheduler.

Ranks of a side take turns on its core.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdstage.layout import Region
from pdstage.protocol.state import State
from pdstage.tools.calibrate.pool import allocate
from pdstage.transport import Done, PostFailed, Spans, available, open_from_config

from .ranks import Actor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdstage.manager.handle import Handle

WAIT_S, PAUSE_S = 120.0, 5e-5
_IDLE_S = 0.02
TCP = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
_WAYS_OVER: dict[str, tuple[tuple[str, dict[str, str]], ...]] = {
    "nixl": (("nixl, shared memory", {}), ("nixl, TCP", TCP))
}


class Fabric(NamedTuple):
    """A transport with the environment that says what it runs over."""

    name: str
    transport: str
    env: dict[str, str]


def fabrics() -> list[Fabric]:
    """Every transport that can be used here; those of which one name is several fabrics as each of them."""
    usable = [name for name, problem in available().items() if not problem]
    return [Fabric(what, name, env) for name in usable for what, env in _WAYS_OVER.get(name, ((name, {}),))]


class Side(Actor):
    """All ranks of one side, and one end of a bulk write of up to `nbytes` without a node: memory on `device`."""

    def __init__(self, nbytes: int, transport: str, device: str) -> None:
        self.nodes: list[Any] = []
        self.handles: list[Handle] = []
        kind, _, number = device.partition(":")
        self._raw = open_from_config(transport, device, "")
        self._memory, base = allocate(device, nbytes)
        self._region = Region(base, nbytes, kind, int(number or 0))
        self._raw.register([self._region])
        self._is_raw = False
        self._cost = ((0.0, 0.0), 0.0)

    def idle(self) -> None:
        if self._is_raw:
            self._raw.poll()
            time.sleep(PAUSE_S)
        else:
            self.turn()

    def turn(self) -> None:
        if not all(node.driver.inline for node in self.nodes):
            time.sleep(2e-4)  # asking would wake their threads again and again
            return
        for node in self.nodes:
            node.turn(5e-4 if len(self.nodes) == 1 else 0.0)

    def until(self, done: Callable[[], bool]) -> None:
        deadline_at = time.monotonic() + WAIT_S
        while not done():
            self.turn()
            failed = [handle for handle in self.handles if handle.state is State.FAILED]
            if failed or time.monotonic() > deadline_at:
                raise AssertionError(f"a room failed or did not end: {[handle.error for handle in failed]}")

    def describe(self) -> tuple[bytes, Region]:
        return self._raw.describe(), self._region

    def connect(self, description: bytes, region: Region) -> None:
        self._raw.connect("raw", description)
        self._raw.prepare("raw", [region])
        self._there = region

    def use_raw(self, is_raw: bool) -> None:
        """From now on `idle` serves the bulk write, or the nodes."""
        self._is_raw = is_raw

    def write(self, nbytes: int, pause_s: float = 0.0) -> float:
        """Seconds of one write of `nbytes` as one descriptor; `pause_s`: between its polls."""
        spans = Spans(*(np.array([one], np.int64) for one in (self._region.base, self._there.base, nbytes)))
        start, ended = time.perf_counter(), False
        self._raw.post("raw", spans, b"raw")
        while not ended:
            for event in self._raw.poll():
                if isinstance(event, PostFailed):
                    raise event.error
                ended = ended or isinstance(event, Done)
            if pause_s:
                time.sleep(pause_s)
        return time.perf_counter() - start

    def begin_cost(self) -> None:
        """From now on the bulk write's cost is counted, less that of polling while there is none."""
        until = time.perf_counter() + _IDLE_S
        began = time.perf_counter(), time.process_time()
        while time.perf_counter() < until:
            self._raw.poll()
            time.sleep(PAUSE_S)
        now = time.perf_counter(), time.process_time()
        self._cost = now, (now[1] - began[1]) / (now[0] - began[0])

    def cost(self) -> float:
        """Seconds of processor time since `begin_cost`."""
        (at, busy_s), idle = self._cost
        return max(0.0, time.process_time() - busy_s - idle * (time.perf_counter() - at))

    def close(self) -> None:
        for node in self.nodes:
            node.close(1.0)
        self._raw.close()


def rounds(ways: Sequence[str], repeats: int) -> Iterator[Sequence[str]]:
    """All ways, `repeats` times, each time in another order: a slow spell of the machine does not hit one alone."""
    for number in range(repeats):
        first = number % len(ways)
        yield (*ways[first:], *ways[:first])


def median_ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Of times taken in turn: the median of their ratios, which a slow spell that hits both does not move."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))

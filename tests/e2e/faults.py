"""What befalls a pair of engines: clients that leave, and processes that are killed. And what must hold afterwards."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from tests.e2e.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.e2e.load import Answer
    from tests.e2e.servers import Server

FREE_S = 15.0
"""All blocks of both sides are free by then, after whatever happened."""


def leaving(n: int, seed: int, longest: float) -> dict[int, float]:
    """A third of `n` clients, by index, and after how many seconds each leaves: at any moment up to `longest`."""
    drawn = random.Random(seed)
    return {index: drawn.uniform(0.0, longest) for index in drawn.sample(range(n), n // 3)}


def median_seconds(answers: Sequence[Answer]) -> float:
    """How long an answer took."""
    return sorted(one.seconds for one in answers)[len(answers) // 2]


def busy(servers: Iterable[Server], usage: str) -> dict[str, float]:
    """Of each server whose gauge `usage` is not 0: its value."""
    told = {server.name: server.metrics()[usage] for server in servers}
    return {name: value for name, value in told.items() if value}


def check_free(servers: Sequence[Server], usage: str) -> None:
    """Fails if a server's gauge `usage` is not 0 in time."""
    if not wait_until(lambda: not busy(servers, usage), FREE_S):
        tails = "\n".join(server.tail(20) for server in servers)
        raise AssertionError(f"{usage} is {busy(servers, usage)} after {FREE_S:.0f} s\n{tails}")


async def until(true: Callable[[], object], deadline_s: float = 60.0) -> None:
    """Waits beside running clients."""
    assert await asyncio.to_thread(wait_until, true, deadline_s, every_s=0.05), "it never came to that"

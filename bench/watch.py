"""Watch: the cost to rooms of exporting metrics, and the time of a scrape.

Rooms between two ranks that are timed, exported and scraped, in turn with rooms between two that are not; `rooms` says
what a room is. This process scrapes each endpoint every second, and reads its rooms, as `pdstage top` does.
"""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from typing import TYPE_CHECKING

from . import beside
from .harness import Row, interleaved
from .rooms import PROGRESS, Pair

if TYPE_CHECKING:
    from collections.abc import Iterator

EVERY_S = 1.0
ROOMS, QUICK = (2000, 9, 10_000, 21), (256, 3, 1000, 5)
"""Rooms per round and rounds; open rooms during a scrape, and scrapes."""


def run(quick: bool) -> list[Row]:
    rows = [row for progress in PROGRESS for row in _rows(progress, quick)]
    return [*rows, *_scrapes(quick)]


def _rows(progress: str, quick: bool) -> list[Row]:
    n, repeats, *_ = QUICK if quick else ROOMS
    detail = f"timed, exported, scraped every {EVERY_S:g} s; baseline: the same unwatched"
    with (
        Pair("local", progress, watched=True) as watched,
        Pair("local", progress, watched=False) as plain,
        _scraped(watched),
    ):
        return beside.rows(watched, plain, n, repeats, of=f"watched, {progress}", detail=detail)


def _scrapes(quick: bool) -> list[Row]:
    """A scrape beside thousands of open rooms."""
    *_, n, repeats = QUICK if quick else ROOMS
    with Pair("local", "inline", watched=True) as pair:
        addresses = _addresses(pair)
        (few,) = interleaved([lambda: _scrape(addresses[1])], repeats=repeats)
        rooms = pair.rooms(n)
        for start in range(0, n, 500):
            pair.both("hold", rooms[start : start + 500])
        many, listed = interleaved(
            [lambda: _scrape(addresses[1]), lambda: _scrape(addresses[1], "/rooms")], repeats=repeats
        )
        pair.prefill.begin("drop", 0)
        pair.decode.call("drop", 0)
        pair.prefill.result()
    said = "of the decode rank, over HTTP; baseline: /metrics with no room open"
    return [
        Row(name=f"{what}, {n} rooms open", value=s * 1e3, baseline=few * 1e3, unit="ms", better="lower", detail=said)
        for what, s in (("/metrics", many), ("/rooms", listed))
    ]


def _addresses(pair: Pair) -> list[str]:
    return [rank.call("metrics_address") for rank in (pair.prefill, pair.decode)]


@contextlib.contextmanager
def _scraped(pair: Pair) -> Iterator[None]:
    addresses, over = _addresses(pair), threading.Event()

    def scrape() -> None:
        while not over.wait(EVERY_S):
            for address in addresses:
                _scrape(address)
                _scrape(address, "/rooms")

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _scrape(address: str, path: str = "/metrics") -> float:
    start = time.perf_counter()
    with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
        answer.read()
    return time.perf_counter() - start

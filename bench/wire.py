"""The wire: a room's page numbers as one control frame, beside a list in msgpack, and `bind`'s checks of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pdstage.manager.items import check
from pdstage.plan import Share
from pdstage.protocol import messages as m
from pdstage.protocol import wire

from .harness import Row, interleaved
from .shapes import runs_layout

if TYPE_CHECKING:
    from collections.abc import Callable

N_PAGES = 100_000
_SESSION = m.SessionId(1 << 62, (1 << 61) + 1)
_SHARES = tuple(Share("kv", role, (0, 61, 1), 0, 8) for role in "kv")
_TOKENS = N_PAGES * 16


def run(quick: bool) -> list[Row]:
    repeats = 7 if quick else 51
    pages = np.random.default_rng(0).permutation(2 * N_PAGES)[:N_PAGES].astype(np.int32)
    return [*_pages(pages, repeats), _checks(pages, repeats)]


def _open(pages: np.ndarray) -> m.Open:
    items = (m.Items("kv", 0, pages.data.cast("B")),)
    return m.Open(7, b"i12345", _SHARES, (m.Asked("kv", 0, _TOKENS),), items, 0, 2, True, 0, 600.0)


def _travel(pages: np.ndarray) -> np.ndarray:
    """What both ends do: the engine's array into a frame, the frame into an array."""
    opened = wire.decode(wire.encode(_SESSION, 1, _open(pages))).message
    assert isinstance(opened, m.Open)
    return np.frombuffer(opened.items[0].data, np.int32)


def _by_msgpack(pages: np.ndarray) -> np.ndarray:
    return np.array(msgspec.msgpack.decode(msgspec.msgpack.encode(pages.tolist())), np.int32)


def _pages(pages: np.ndarray, repeats: int) -> list[Row]:
    ways: tuple[Callable[[np.ndarray], np.ndarray], ...] = _travel, _by_msgpack
    for way in ways:
        if not np.array_equal(way(pages), pages):
            raise AssertionError(f"{way.__name__} changed the pages")
    works = [partial(way, pages) for way in ways]
    rows = []
    # The target is for repeated calls, as everywhere; one call after 30 ms of other work finds cold code and caches.
    for inner, when, target in ((5, "repeated", 100), (1, "one cold call", None)):
        ours, theirs = interleaved(works, repeats=repeats, inner=inner)
        rows.append(
            Row(
                name=f"encode + decode {N_PAGES} pages, {when}",
                value=ours * 1e6,
                baseline=theirs * 1e6,
                unit="us",
                target=target,
                on="value",
                better="lower",
                detail="baseline: msgpack of a list",
            )
        )
    return rows


def _checks(pages: np.ndarray, repeats: int) -> Row:
    """What `bind` verifies before anything is sent: every page exists, none is named twice."""
    layout = runs_layout(1, 2 * N_PAGES, 1, base=1 << 20, page=16)

    def by_set() -> bool:
        given = pages.tolist()
        return len(set(given)) == len(given) and min(given) >= 0 and max(given) < 2 * N_PAGES

    ours, theirs = interleaved([lambda: check(layout, pages, _TOKENS, unique=True), by_set], repeats=repeats)
    return Row(
        name=f"bind's checks of {N_PAGES} pages",
        value=ours * 1e6,
        baseline=theirs * 1e6,
        unit="us",
        better="lower",
        detail="range and repetition; baseline: a Python set",
    )

"""The wire: a room's page numbers as one control frame, beside packing them as lists; the cost of smaller frames."""

from __future__ import annotations

import struct
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from pdstage.layout import Key, Layout, Region, RowLevel, View
from pdstage.layout.topology import Axis
from pdstage.manager.items import check
from pdstage.plan import Rect, Share
from pdstage.protocol import messages as m
from pdstage.protocol import wire

from .harness import Row, interleaved

if TYPE_CHECKING:
    from collections.abc import Callable

N_PAGES = 100_000
_SESSION = m.SessionId(1 << 62, (1 << 61) + 1)
_SHARES = tuple(Share("kv", role, (0, 61, 1), 0, 8) for role in "kv")
_TOKENS = N_PAGES * 16


def run(quick: bool) -> list[Row]:
    repeats = 7 if quick else 51
    pages = np.random.default_rng(0).permutation(2 * N_PAGES)[:N_PAGES].astype(np.int32)
    return [*_pages(pages, repeats), _checks(pages, repeats), _small(repeats)]


def _open(pages: np.ndarray) -> m.Open:
    items = (m.Items("kv", 0, pages.data.cast("B")),)
    return m.Open(7, b"i12345", _SHARES, (m.Asked("kv", 0, _TOKENS),), items, 0, 2, True, 0, 600.0)


def _travel(pages: np.ndarray) -> np.ndarray:
    """What both ends do: the engine's array into a frame, the frame into an array."""
    opened = wire.decode(wire.encode(_SESSION, 1, _open(pages))).message
    assert isinstance(opened, m.Open)
    return np.frombuffer(opened.items[0].data, np.int32)


def _by_struct(pages: np.ndarray) -> np.ndarray:
    packed = struct.pack(f"<{len(pages)}i", *pages.tolist())
    return np.array(struct.unpack(f"<{len(packed) // 4}i", packed), np.int32)


def _by_msgpack(pages: np.ndarray) -> np.ndarray:
    return np.array(msgspec.msgpack.decode(msgspec.msgpack.encode(pages.tolist())), np.int32)


def _by_digits(pages: np.ndarray) -> np.ndarray:
    return np.array(b",".join([b"%d" % page for page in pages.tolist()]).split(b","), np.int32)


def _pages(pages: np.ndarray, repeats: int) -> list[Row]:
    ways: list[tuple[str, Callable[[np.ndarray], np.ndarray]]] = [
        ("struct.pack of a list", _by_struct),
        ("msgpack of a list", _by_msgpack),
        ("text", _by_digits),
    ]
    for way in (_travel, *(way for _, way in ways)):
        if not np.array_equal(way(pages), pages):
            raise AssertionError(f"{way.__name__} changed the pages")
    works = [partial(way, pages) for way in (_travel, *(way for _, way in ways))]
    rows = []
    # The target is for repeated calls, as everywhere; one call after 30 ms of other work finds cold code and caches.
    for inner, when, target in ((5, "repeated", 100), (1, "one cold call", None)):
        ours, *theirs = interleaved(works, repeats=repeats, inner=inner)
        rows += [
            Row(
                name=f"encode + decode {N_PAGES} pages, {when}",
                value=ours * 1e6,
                baseline=their * 1e6,
                unit="us",
                target=target,
                on="value",
                better="lower",
                detail=f"baseline: {what}",
            )
            for (what, _), their in zip(ways, theirs, strict=True)
        ]
    return rows


def _checks(pages: np.ndarray, repeats: int) -> Row:
    """What `bind` verifies before anything is sent: every page exists, none is named twice."""
    view = View(
        key=Key("kv", "k", 0), region=0, offset=0, n_items=2 * N_PAGES, item_stride=16, tokens_per_item=16,
        rows=(RowLevel(1, 1),), shards=1, shard_stride=1, width=1, axis=Axis("kv_head", 1, 0, 1), format="u8",
    )  # fmt: skip
    layout = Layout.of([Region(1 << 20, 2 * N_PAGES * 16)], [view])

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


def _small(repeats: int) -> Row:
    """A Reserve, the most frequent question; beside bare msgspec of the same message."""
    ask = m.Reserve(7, 3, 0, 1 << 20, (Rect("kv", 0, 4096, 0, 61),))
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(m.Reserve)
    ours, theirs = interleaved(
        [lambda: wire.decode(wire.encode(_SESSION, 1, ask)), lambda: decoder.decode(encoder.encode(ask))],
        repeats=repeats,
        inner=1000,
    )
    return Row(
        name="encode + decode one Reserve",
        value=ours * 1e6,
        baseline=theirs * 1e6,
        unit="us",
        better="lower",
        detail="with header and checks; baseline: bare msgspec",
    )

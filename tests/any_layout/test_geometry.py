"""Geometries that differ between the two sides, by name: staged and direct, at any TP, from any token on."""

from __future__ import annotations

import pytest

from tests.any_layout.check import check
from tests.any_layout.describe import Case, Logical, Role, Side, Span, Stored
from tests.any_layout.draw import BLOCK_FIRST, BLOCK_FIRST_HND, FUSED, HALVES, HND, KERNEL_PAGES, NHD

LAYERS, HEADS, TOKENS = 2, 4, 100
KV = Logical("kv", "kv", tuple(range(LAYERS)), (Role("k", "kv_head", HEADS, 1, 16), Role("v", "kv_head", HEADS, 1, 16)))
PER_LAYER = ("layer", *(dim for dim in NHD if dim != "layer"))

NAMED = {
    "page 64": Stored(64, NHD),
    "page 16": Stored(16, NHD),
    "page 1": Stored(1, NHD),
    "page 48": Stored(48, NHD),
    "NHD": Stored(16, NHD),
    "HND": Stored(16, HND),
    "HND page 64": Stored(64, HND),
    "split": Stored(16, NHD),
    "fused per head": Stored(16, FUSED),
    "fused per page": Stored(16, HALVES),
    "layer-first": Stored(16, PER_LAYER),
    "block-first": Stored(16, BLOCK_FIRST),
    "block-first HND": Stored(16, BLOCK_FIRST_HND),
    "padded pages": Stored(16, NHD, {"row": 64}),
    "padded tokens": Stored(16, NHD, {"shard": 32}),
    "padded heads": Stored(16, NHD, {"seg": 16}),
    "padded HND heads": Stored(16, HND, {"row": 16}),
    "kernel pages of 16 in 64": Stored(64, KERNEL_PAGES, {}, 16),
}
PAIRS = [
    ("page 64", "page 16"),
    ("page 16", "page 64"),
    ("page 1", "page 64"),
    ("page 64", "page 1"),
    ("page 48", "page 64"),
    ("NHD", "HND"),
    ("HND", "NHD"),
    ("HND", "HND"),
    ("HND page 64", "HND"),
    ("HND", "HND page 64"),
    ("page 16", "HND page 64"),
    ("fused per head", "split"),
    ("split", "fused per head"),
    ("fused per page", "split"),
    ("fused per head", "fused per page"),
    ("layer-first", "block-first"),
    ("block-first", "layer-first"),
    ("block-first HND", "layer-first"),
    ("padded pages", "NHD"),
    ("NHD", "padded tokens"),
    ("padded tokens", "padded heads"),
    ("padded heads", "NHD"),
    ("padded HND heads", "HND"),
    ("HND", "padded HND heads"),
    ("kernel pages of 16 in 64", "page 16"),
    ("page 64", "kernel pages of 16 in 64"),
]
# None, amid a page, a page, all but one; the items in front of it are there or left out.
PREFIXES = [0, 17, 64, 99]


def transfer(src: Stored, dst: Stored, tp: tuple[int, int], path: str, prefix: int) -> Case:
    cut = prefix // dst.page * dst.page if prefix % 2 else 0
    sides = [
        Side(size, (0, LAYERS), {"kv": Stored(how.page, how.nest, how.pads, how.block, 0, 2, first)})
        for size, how, first in ((tp[0], src, 0), (tp[1], dst, cut))
    ]
    chunks = tuple((Span("kv", start, min(start + 70, TOKENS), 0, LAYERS),) for start in range(0, TOKENS, 70))
    return Case((KV,), *sides, {"kv": (prefix, TOKENS)}, chunks, path, order=prefix)


@pytest.mark.parametrize("path", ["staged", "direct"])
@pytest.mark.parametrize("tp", [(1, 1), (4, 2), (2, 4)], ids=lambda tp: f"TP {tp[0]} to {tp[1]}")
@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=[f"{src} to {dst}" for src, dst in PAIRS])
def test_geometries_meet(src: str, dst: str, tp: tuple[int, int], path: str) -> None:
    for prefix in PREFIXES:
        check(transfer(NAMED[src], NAMED[dst], tp, path, prefix))

"""Planning on the host: a chunk of a hybrid model, and a staged call without its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from pdstage.kernels import Pool
from pdstage.layout import Region
from pdstage.manager.items import check, rects_of
from pdstage.plan import TOKEN_MAJOR, Select, Stagings, selects, shares, tokens_of
from pdstage.plan.cost import CostModel
from pdstage.plan.ownership import EVERYTHING, Common
from pdstage.plan.spans import DirectPlan
from pdstage.plan.tables import Index, Table
from pdstage.protocol.destinations import clip, split
from pdstage.stager import Move, Stager

from .harness import Row, interleaved
from .shapes import SLOTS, Array, Block, Model, place, runs_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdstage.layout import Layout
    from pdstage.plan import Rect, Share
    from pdstage.protocol.destinations import Destination

LAYERS = 61
HYBRID_TOKENS = 8192
_NOWHERE = Region(4096, 0)
_COST = CostModel.linear(bytes_per_s=12e9, descriptor_s=400e-9, post_s=10e-6)


def run(quick: bool) -> list[Row]:
    return [*_hybrid_chunks(quick), _call_overhead(quick)]


@dataclass(frozen=True, slots=True)
class _Claim:
    """What `clip` and `split` read of a destination."""

    asked: dict[str, tuple[int, int]]
    shares: tuple[Share, ...]
    session: _Session


@dataclass(frozen=True, slots=True)
class _Session:
    """What `clip` and `split` read of a destination's session."""

    stagings: Stagings
    common: Common = EVERYTHING


class HybridChunk:
    """A chunk of `n_tokens` of all 61 layers of a hybrid model, from prefill rank 1 of 4 to decode rank 0 of 2.

    A third of the layers are attention with sparse attention's index keys and scales, a third a sliding window, a third
    a convolution of three sections and a state. `page` is the tokens of a page; the pages are in any order.
    """

    def __init__(self, page: int, n_tokens: int = HYBRID_TOKENS) -> None:
        model = hybrid(page)
        n_pages = n_tokens // page
        names = model.components()
        n_items = {name: 8 if name == SLOTS else 4 * n_pages for name in names}
        rng = np.random.default_rng(0)
        self.items = {n: np.array([3]) if n == SLOTS else rng.permutation(n_items[n])[:n_pages] for n in names}
        self.tokens = {name: (0, 1 if name == SLOTS else n_tokens) for name in names}
        self.src, self.dst = (
            place(model, tp, rank, n_items, base=1 << at) for tp, rank, at in ((4, 1, 40), (2, 0, 41))
        )
        writers = {rank: place(model, 4, rank, n_items, base=1 << 40) for rank in range(4)}
        self.stagings = [Stagings(self.src), Stagings(self.dst)]
        claim = _Claim(self.tokens, shares(writers, self.dst, (2, 0))[1], _Session(self.stagings[0]))
        self.destination = cast("Destination", claim)
        checked = check(self.src, self.items, self.tokens, unique=True)
        self.rects = rects_of(self.src, checked, None)
        self.indexes = {name: one.index for name, one in checked.items()}
        chosen = [selects(layout, self.destination.shares, self.rects) for layout in (self.src, self.dst)]
        self.direct = DirectPlan(self.src, chosen[0], self.dst, chosen[1])
        self.stagers = [Stager(Pool.of(layout)) for layout in (self.src, self.dst)]
        self.n_views = len(chosen[0])

    def at_prefill(self) -> None:
        """From the engine's call to the gather's first byte, in a session that has sent such a chunk before."""
        checked = check(self.src, self.items, self.tokens, unique=False)
        given = rects_of(self.src, checked, None)
        indexes = {name: one.index for name, one in checked.items()}
        for rects, nbytes in split(clip(given, self.destination), self.destination, 1 << 40):
            _COST.prefers_direct(nbytes, self.direct.n_descriptors(tokens_of(rects)))
            _but_the_bytes(self.stagers[0].gather, self.destination.shares, rects, indexes)

    def at_decode(self) -> None:
        """From the tag to the scatter's first byte."""
        self.stagings[1].of(self.destination.shares, self.rects).nbytes(tokens_of(self.rects))
        _but_the_bytes(self.stagers[1].scatter, self.destination.shares, self.rects, self.indexes)

    def anew(self, layout: Layout) -> None:
        """One side's tables from its layout: what the first such chunk of a session costs besides."""
        Table.of(layout, selects(layout, self.destination.shares, self.rects))


def _but_the_bytes(
    call: Callable[..., None], owned: tuple[Share, ...], rects: tuple[Rect, ...], items: Mapping[str, Index]
) -> None:
    """A call into the pool that checks and places everything, and then finds the staging too small."""
    call(0, Move(owned, rects, tokens_of(rects), TOKEN_MAJOR, items), _NOWHERE)
    stager: Stager = call.__self__  # type: ignore[attr-defined]
    (copied,) = stager.poll()
    assert copied.error is not None
    assert "too small" in str(copied.error), copied.error


def _hybrid_chunks(quick: bool) -> list[Row]:
    rows = []
    for page in (64, 1):
        chunk = HybridChunk(page)
        for name, ours, layout in (("prefill", chunk.at_prefill, chunk.src), ("decode", chunk.at_decode, chunk.dst)):
            works: list[Callable[[], object]] = [ours, partial(chunk.anew, layout)]
            planned, anew = interleaved(works, repeats=11 if quick else 61, inner=5)
            rows.append(
                Row(
                    name=f"{name} plans {HYBRID_TOKENS} tokens x {LAYERS} layers, pages of {page}",
                    value=planned * 1e6,
                    baseline=anew * 1e6,
                    unit="us",
                    target=200,
                    on="value",
                    better="lower",
                    detail=f"{chunk.n_views} views of kv, swa, mamba and dsa; baseline: their tables made anew",
                )
            )
    return rows


def hybrid(page: int) -> Model:
    """61 layers: attention with index keys, sliding window and linear attention in turn."""
    full, window, linear = (range(first, LAYERS, 3) for first in range(3))
    kv_heads = tuple(Array(role, "kv_head", 8, 256) for role in "kv")
    conv = (("conv_q", "k_head", 16), ("conv_k", "k_head", 16), ("conv_v", "v_head", 32))
    of_layers = (
        ("kv", full, kv_heads),
        ("dsa", full, (Array("key", "none", 1, 128, "fp8_e4m3"), Array("scale", "none", 1, 4, "fp32"))),
        ("swa", window, kv_heads),
        (SLOTS, linear, tuple(Array(role, axis, total, 768) for role, axis, total in conv)),
        (SLOTS, linear, (Array("ssm", "v_head", 32, 128 * 128 * 4, "fp32"),)),
    )
    blocks = (
        Block(name, range(layer, layer + 1), arrays) for name, layers, arrays in of_layers for layer in layers
    )  # fmt: skip
    return Model("hybrid", tuple(blocks), page)


def _call_overhead(quick: bool) -> Row:
    """A gather of one 16-byte token row from 122 views: all but the bytes; beside an empty call of numpy's take."""
    memory = np.zeros(1 << 20, np.uint8)
    layout = runs_layout(16, 64, 2 * LAYERS, base=memory.ctypes.data)
    plan = Pool.of(layout, keep=memory).plan([Select(view.key, 0, 1) for view in layout.views()])
    out = np.zeros(plan.nbytes({"kv": (0, 1)}), np.uint8)
    index, ptr = {"kv": Index.of(np.zeros(1, np.int32))}, out.ctypes.data
    cells, one = memory.reshape(-1, 16), np.zeros(1, np.int64)
    small = np.zeros((1, 16), np.uint8)

    def each_view() -> None:
        for _ in range(2 * LAYERS):
            np.take(cells, one, axis=0, out=small, mode="clip")

    ours, theirs = interleaved(
        [lambda: plan.gather(ptr, out.nbytes, index, {"kv": (0, 1)}), each_view], repeats=5 if quick else 31, inner=100
    )
    return Row(
        name="one gather call of 122 views",
        value=ours * 1e6,
        baseline=theirs * 1e6,
        unit="us",
        target=10,
        on="value",
        better="lower",
        detail="16 bytes a view; baseline: np.take a view",
    )

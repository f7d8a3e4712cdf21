"""What real models keep for a request, and what one prefill rank sends of it to one decode rank.

No torch, no device. A pool is placed in one region by counting bytes, so the same shapes run on a GPU and, smaller, on
the CPU. Sizes are those of the models' published configurations (config.json).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pdstage.layout import Key, Layout, Region, RowLevel, View
from pdstage.layout.topology import shard_axis
from pdstage.plan import Rect, Select, Staging, selects, shares, tokens_of

if TYPE_CHECKING:
    from collections.abc import Mapping

ALIGNMENT = 256
SLOTS = "mamba"


class Array(NamedTuple):
    """One array of each of `layers`: `total` shards of `width` bytes on axis `axis`, of which a rank holds its part."""

    role: str
    axis: str
    total: int
    width: int
    format: str = "bf16"


class Block(NamedTuple):
    """Arrays that lie side by side in one allocation a layer: `[item][row][array][shard][width]`."""

    component: str
    layers: range
    arrays: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model's per-token and per-request state. `page` is the tokens of a page."""

    name: str
    blocks: tuple[Block, ...]
    page: int

    @property
    def n_layers(self) -> int:
        return max(block.layers[-1] for block in self.blocks) + 1

    def components(self) -> list[str]:
        return sorted({block.component for block in self.blocks})


def kv(layers: range, heads: int, width: int) -> tuple[Block, ...]:
    return tuple(Block("kv", layers, (Array(role, "kv_head", heads, width),)) for role in ("k", "v"))


LLAMA_70B = Model("Llama-70B", kv(range(80), 8, 128 * 2), page=16)
QWEN3_235B = Model("Qwen3-235B", kv(range(94), 4, 128 * 2), page=16)
# 512 latent and 64 rope elements a token, the same on every rank.
DEEPSEEK_V3 = Model("DeepSeek-V3", (Block("kv", range(61), (Array("latent", "none", 1, 576 * 2),)),), page=64)
# A token's fp8 latent and rope as FlashMLA stores them, and its indexer key with a scale; one page table for both.
DEEPSEEK_V32 = Model(
    "DeepSeek-V3.2",
    (
        Block("kv", range(61), (Array("latent", "none", 1, 576, "fp8"),)),
        Block("kv", range(61), (Array("index", "none", 1, 132, "fp8"),)),
    ),
    page=64,
)
# The same as the kernels keep it: 512 latent bytes, their scales and 64 rope elements; of an index page keys before
# scales.
DEEPSEEK_V32_FP8 = Model(
    "DeepSeek-V3.2 in fp8",
    tuple(
        Block("kv", range(61), (Array(role, "none", 1, width, "bytes"),))
        for role, width in (("latent", 656), ("index_k", 128), ("index_scale", 4))
    ),
    page=64,
)
# Every fourth of 48 layers is attention; the others keep a convolution's last 3 columns of [q | k | v] and a float32
# state [v_head, 128, 128].
_LINEAR = tuple(layer for layer in range(48) if layer % 4 != 3)
QWEN3_NEXT = Model(
    "Qwen3-Next",
    (
        *kv(range(3, 48, 4), 2, 256 * 2),
        *(
            Block(SLOTS, range(layer, layer + 1), arrays)
            for layer in _LINEAR
            for arrays in (
                tuple(
                    Array(role, axis, total, 128 * 3 * 2)
                    for role, axis, total in (
                        ("conv_q", "k_head", 16),
                        ("conv_k", "k_head", 16),
                        ("conv_v", "v_head", 32),
                    )
                ),
                (Array("ssm", "v_head", 32, 128 * 128 * 4, "fp32"),),
            )
        ),
    ),
    page=64,
)


class Pair(NamedTuple):
    """A prefill TP size and a decode TP size of one model."""

    model: Model
    src_tp: int
    dst_tp: int

    @property
    def name(self) -> str:
        return f"{self.model.name} TP{self.src_tp}->TP{self.dst_tp}"


PAIRS = (
    Pair(LLAMA_70B, 4, 8),
    Pair(LLAMA_70B, 8, 4),
    Pair(LLAMA_70B, 2, 4),
    Pair(QWEN3_235B, 2, 4),
    Pair(QWEN3_235B, 4, 2),
    Pair(DEEPSEEK_V3, 4, 8),
    Pair(DEEPSEEK_V3, 8, 4),
    Pair(QWEN3_NEXT, 2, 4),
    Pair(QWEN3_NEXT, 4, 2),
)


def of_layers(model: Model, n: int) -> Model:
    """The first `n` of its layers."""
    cut = [block._replace(layers=block.layers[: sum(one < n for one in block.layers)]) for block in model.blocks]
    return replace(model, blocks=tuple(block for block in cut if block.layers))


def place(
    model: Model,
    tp: int,
    rank: int,
    n_items: Mapping[str, int],
    *,
    base: int = 0,
    kind: str = "cpu",
    device: int = 0,
    heads_first: bool = False,
) -> Layout:
    """The pool of one rank in one region that begins at `base`: `n_items` pages or slots of each component. With
    `heads_first` a page is `[shard][row][width]` (HND) where it holds one array, else `[row][shard][width]` (NHD).
    """
    views, at = [], 0
    for block in model.blocks:
        paged = block.component != SLOTS
        rows = model.page if paged else 1
        axes = [shard_axis(array.axis, array.total, tp, rank) for array in block.arrays]
        row = sum(array.width * axis.count for array, axis in zip(block.arrays, axes, strict=True))
        by_head = heads_first and paged and len(block.arrays) == 1
        for layer in block.layers:
            within = 0
            for array, axis in zip(block.arrays, axes, strict=True):
                views.append(
                    View(
                        key=Key(block.component, array.role, layer),
                        region=0,
                        offset=at + within,
                        n_items=n_items[block.component],
                        item_stride=rows * row,
                        tokens_per_item=rows,
                        rows=(RowLevel(1, array.width if by_head else row),),
                        shards=axis.count,
                        shard_stride=array.width * (rows if by_head else 1),
                        width=array.width,
                        axis=axis,
                        format=array.format,
                    )
                )
                within += array.width * axis.count
            at += -(-n_items[block.component] * rows * row // ALIGNMENT) * ALIGNMENT
    return Layout.of([Region(base, at, kind, device)], views, slots={SLOTS} & set(model.components()))


class Sends(NamedTuple):
    """What one writer carries to decode rank 0: the same bytes, as each side selects them."""

    src_rank: int
    src_select: tuple[Select, ...]
    dst_select: tuple[Select, ...]


def chunk(model: Model, tokens: int) -> dict[str, tuple[int, int]]:
    """The token ranges of a request's chunk that also carries its states, as its last one does."""
    return tokens_of(rects(model, tokens))


def rects(model: Model, tokens: int) -> list[Rect]:
    return [Rect(name, 0, 1 if name == SLOTS else tokens, 0, model.n_layers) for name in model.components()]


def sends(pair: Pair, tokens: int) -> list[Sends]:
    """Each writer's part of a chunk for decode rank 0, the one that sends most first."""
    least = dict.fromkeys(pair.model.components(), 1)
    src = {rank: place(pair.model, pair.src_tp, rank, least) for rank in range(pair.src_tp)}
    dst = place(pair.model, pair.dst_tp, 0, least)
    parts = rects(pair.model, tokens)
    found = [
        Sends(rank, selects(src[rank], owned, parts), selects(dst, owned, parts))
        for rank, owned in shares(src, dst, (pair.dst_tp, 0)).items()
        if owned
    ]
    return sorted(found, key=lambda s: -Staging(src[s.src_rank], s.src_select).nbytes(tokens_of(parts)))


def row_run(layout: Layout, select: tuple[Select, ...]) -> int:
    """Bytes that lie together in one row of the selected views, in the view where that is least."""
    views = layout.by_key()
    return min(count * views[key].shard_nbytes for key, _, count in select)


def runs_layout(
    run_nbytes: int, n_items: int, n_views: int, *, base: int = 0, kind: str = "cpu", page: int = 1
) -> Layout:
    """`n_views` views whose items are `page` rows of one run of `run_nbytes` each."""
    item = page * run_nbytes
    views = [
        View(
            key=Key("kv", "k", layer), region=0, offset=layer * n_items * item, n_items=n_items, item_stride=item,
            tokens_per_item=page, rows=(RowLevel(1, run_nbytes),), shards=1, shard_stride=run_nbytes, width=run_nbytes,
            axis=shard_axis("kv_head", 1, 1, 0), format="bytes",
        )
        for layer in range(n_views)
    ]  # fmt: skip
    return Layout.of([Region(base, n_views * n_items * item, kind)], views)

"""Constructors for KV caches: per-head pools, latents, their scales, and pages of several blocks.

`tensors` has the table of all constructors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Unpack

from pdstage.errors import UsageError
from pdstage.layout.arrays import Array, Naming, Part, Piece, Tensors, arrays_of, check_heads, pages, part, refused
from pdstage.layout.topology import REPLICATED, Tp, shard_axis
from pdstage.layout.views import RowLevel


def sglang_mha(k: Tensors, v: Tensors, *, page_size: int, total_heads: int, tp: Tp, **naming: Unpack[Naming]) -> Part:
    """SGLang's pools `[slots, heads, dim]`; every `page_size` slots form a page."""
    roles = {
        name: [_paginated(array, page_size) for array in arrays_of(name, given, "slots, heads, dim")]
        for name, given in (("k", k), ("v", v))
    }
    return _heads(roles, total_heads, tp, naming)


def paged_nhd(k: Tensors, v: Tensors, *, total_heads: int, tp: Tp, **naming: Unpack[Naming]) -> Part:
    """Pools `[pages, page_size, heads, dim]`; k and v may be halves of one fused tensor."""
    roles = {name: arrays_of(name, given, "pages, page_size, heads, dim") for name, given in (("k", k), ("v", v))}
    return _heads(roles, total_heads, tp, naming)


def paged_hnd(k: Tensors, v: Tensors, *, total_heads: int, tp: Tp, **naming: Unpack[Naming]) -> Part:
    """Pools `[pages, heads, page_size, dim]`; k and v may be halves of one fused tensor."""
    roles = {
        name: [_rows_first(array) for array in arrays_of(name, given, "pages, heads, page_size, dim")]
        for name, given in (("k", k), ("v", v))
    }
    return _heads(roles, total_heads, tp, naming)


def vllm_blocks(
    caches: Tensors,
    *,
    total_heads: int,
    tp: Tp,
    key_nbytes: int | None = None,
    **naming: Unpack[Naming],
) -> Part:
    """vLLM 0.33's logical `[blocks, heads, block_size, content]` views, in any of its six physical layouts.

    The layouts are LBHNC, LBNHC, LHBNC, BLHNC, BLNHC and BHLNC (vllm/v1/kv_cache_layout.py, RFC vllm#42082): one shape
    with different strides. Content is a head's K, of `key_nbytes` (half by default), then its V. vLLM registers raw
    bytes, so `format` is required. Blocks may be padded. Groups may alias the same bytes, each as a separate component.
    """
    halves: dict[str, list[Array]] = {"k": [], "v": []}
    for cache in arrays_of("caches", caches, "blocks, heads, block_size, content"):
        array = _rows_first(cache)
        content = array.shape[-1] * array.itemsize
        split = content // 2 if key_nbytes is None else key_nbytes
        if not 0 < split < content or (key_nbytes is None and content % 2):
            raise refused(
                array.name,
                f"has {content} bytes of K and V a head, which cannot be split at {split}",
                "give key_nbytes, the bytes of one head's K; for a cache without a V use mla(cache[:, 0])",
            )
        if array.itemsize == 1 and "format" not in naming:
            raise refused(array.name, "is raw bytes", 'name their encoding: format="bf16", say')
        halves["k"].append(array.bytes_from(0, split))
        halves["v"].append(array.bytes_from(split, content))
    return _heads(halves, total_heads, tp, naming)


def vllm_cpu_blocks(
    caches: Tensors, *, total_heads: int, tp: Tp, packed: bool = False, **naming: Unpack[Naming]
) -> Part:
    """vLLM's CPU_ATTN caches: tensors of the shape `[blocks, heads, block_size, 2 * dim]` with another memory order.

    A block holds all K of a head, then all its V: K as `[dim, block_size]`, V as `[block_size, dim]` (instruction sets
    vec and vec16). With AMX they are `packed` for its tiles: K as `[block_size / 16, dim / 2, 16, 2]`, V as `[dim / 16,
    block_size / 2, 16, 2]`, whose last axis is two tokens. V is then one view per 16 elements, in roles "v.0", "v.1",
    ... Sources: vllm/v1/attention/backends/cpu_attn.py, csrc/cpu/cpu_attn_{vec,amx}.hpp; the writer
    `cpu_attn_reshape_and_cache` shows both orders on any machine with AVX-512.
    """
    axis = shard_axis("kv_head", total_heads, *tp)
    roles: dict[str, list[Piece]] = {}
    for array in arrays_of("caches", caches, "blocks, heads, block_size, 2 * dim"):
        (blocks, heads, tokens, content), (block, head, row, _) = array.shape, array.strides
        check_heads(array, heads, axis)
        dim, size = content // 2, array.itemsize
        if content % 2 or row != content * size or (packed and (dim % 16 or tokens % 16)):
            raise refused(
                array.name, f"has shape {list(array.shape)}: a head's block is not {tokens} dense rows of K and V"
                + " in whole tiles" * packed,
                "pass the cache as vLLM allocated it",
            )  # fmt: skip
        base = Piece(
            array=array,
            n_items=blocks,
            item_stride=block,
            tokens_per_item=tokens,
            shard_stride=head,
            width=size,
            axis=axis,
        )
        for role, piece in (_packed if packed else _transposed)(base, tokens, dim).items():
            roles.setdefault(role, []).append(piece)
    return part(roles, naming)


def _transposed(base: Piece, tokens: int, dim: int) -> dict[str, Piece]:
    """Where K and V lie in a head's block of CPU_ATTN; `base` has the width of an element."""
    size = base.width
    return {
        "k": replace(base, rows=(RowLevel(1, size),), segs=dim, seg_stride=tokens * size),
        "v": replace(base, at=tokens * dim * size, rows=(RowLevel(1, dim * size),), width=dim * size),
    }


def _packed(base: Piece, tokens: int, dim: int) -> dict[str, Piece]:
    size = base.width
    rows = (RowLevel(16, 16 * dim * size), RowLevel(1, 2 * size))
    return {"k": replace(base, rows=rows, segs=dim // 2, seg_stride=32 * size, width=2 * size)} | {
        f"v.{at}": replace(
            base, at=(dim + at * 16) * tokens * size, rows=(RowLevel(2, 32 * size), RowLevel(1, size)), segs=16,
            seg_stride=2 * size,
        )
        for at in range(dim // 16)
    }  # fmt: skip


def mla(
    caches: Tensors,
    *,
    page_size: int | None = None,
    role: str = "latent",
    tokens_per_row: int = 1,
    **naming: Unpack[Naming],
) -> Part:
    """Replicated pools `[pages, rows, dim]`, or SGLang's `[slots, 1, dim]` if `page_size` is given.

    In a compressed cache a row covers `tokens_per_row` tokens, and `page_size` still counts tokens. Pages may be
    padded. Sources: MLA pools; vLLM's MLAAttentionSpec and SlidingWindowMLASpec (`cache[:, 0]`); SGLang's
    QSATokenToKVPool (`cache.flatten(1)[:, None]`).
    """
    if page_size is None:
        held = [_one_head(array) for array in arrays_of("caches", caches, "pages, rows, dim")]
    elif tokens_per_row < 1 or page_size % tokens_per_row:
        raise UsageError(
            f"a page of {page_size} tokens is not a whole number of rows of {tokens_per_row}",
            remedy="give the engine's page size in tokens, and how many a row covers",
        )
    else:
        rows = page_size // tokens_per_row
        held = [_paginated(array, rows) for array in arrays_of("caches", caches, "slots, 1, dim")]
    return part({role: [pages(array, REPLICATED, tokens_per_row) for array in held]}, naming)


class Field(NamedTuple):
    """`nbytes` of each row, stored together with the same field of a block's other rows; its role and its encoding."""

    role: str
    nbytes: int
    format: str


def block_pages(
    caches: Tensors,
    *,
    fields: Sequence[Field],
    page_size: int,
    block_size: int | None = None,
    tokens_per_row: int = 1,
    **naming: Unpack[Naming],
) -> Part:
    """Replicated pages `[pages, bytes]` of blocks; a block has one field of all its rows, then the next field.

    A block is what a kernel calls a page: `[rows of field 0][rows of field 1]...`, of `block_size` tokens (the whole
    page if None). A page has `page_size / block_size` blocks, one after the other, and optional padding. Both sizes
    count tokens; a row covers `tokens_per_row` of them.
    """
    block = page_size if block_size is None else block_size
    roles: dict[str, list[Piece]] = {field.role: [] for field in fields}
    row_nbytes = sum(field.nbytes for field in fields)
    for array in arrays_of("caches", caches, "pages, bytes"):
        held = array.shape[1] * array.itemsize
        whole = min(block, tokens_per_row) > 0 and page_size % block == 0 and block % tokens_per_row == 0
        if not whole or held < page_size // tokens_per_row * row_nbytes:
            raise refused(
                array.name,
                f"has {held} bytes a page, not {page_size} tokens in blocks of {block} at {row_nbytes} bytes for every "
                f"{tokens_per_row}",
                "give the page size and the block size in tokens, and the bytes of a row's fields",
            )
        at, rows = 0, block // tokens_per_row
        for field in fields:
            roles[field.role].append(
                Piece(
                    array=array, at=at, n_items=array.shape[0], item_stride=array.strides[0],
                    tokens_per_item=page_size, width=field.nbytes, axis=REPLICATED, format=field.format,
                    rows=(RowLevel(block, rows * row_nbytes), RowLevel(tokens_per_row, field.nbytes)),
                )
            )  # fmt: skip
            at += rows * field.nbytes
    return part(roles, naming)


def dsa_index(
    caches: Tensors,
    *,
    page_size: int,
    block_size: int = 64,
    tokens_per_row: int = 1,
    **naming: Unpack[Naming],
) -> Part:
    """Index keys of DeepSeek sparse attention with their scales, component "dsa": pages of `[keys][scales]` blocks.

    `block_size` tokens form a kernel's page. Pooled index keys have one row per `tokens_per_row` tokens. Sources:
    SGLang's DSATokenToKVPool (keys fp8, one fp32 scale per 128); vLLM's indexer cache, whose block is the page.
    """
    fields = Field("index_k", 128, "fp8_e4m3"), Field("index_scale", 4, "fp32")
    named: Naming = {"component": "dsa", **naming}
    return block_pages(
        caches, fields=fields, page_size=page_size, block_size=block_size, tokens_per_row=tokens_per_row, **named
    )


def _heads(roles: Mapping[str, Sequence[Array]], total_heads: int, tp: Tp, naming: Naming) -> Part:
    """Views of arrays `[pages, page_size, heads, dim]` that are sliced by KV heads."""
    axis = shard_axis("kv_head", total_heads, *tp)
    return part({role: [pages(array, axis) for array in held] for role, held in roles.items()}, naming)


def _paginated(array: Array, page_size: int) -> Array:
    """`[slots, heads, dim]` as pages of `page_size` slots."""
    slots, stride = array.shape[0], array.strides[0]
    if page_size < 1 or slots % page_size:
        raise refused(
            array.name,
            f"has {slots} slots, not a multiple of page_size={page_size}",
            "give the engine's page size, or pass the tensor without the odd slots at its end",
        )
    return array.seen(
        (slots // page_size, page_size, *array.shape[1:]), (page_size * stride, stride, *array.strides[1:])
    )


def _rows_first(array: Array) -> Array:
    """`[pages, heads, page_size, dim]` with its two middle axes swapped."""
    return array.seen(*((a, c, b, d) for a, b, c, d in (array.shape, array.strides)))


def _one_head(array: Array) -> Array:
    """`[pages, page_size, dim]` with an axis of one head."""
    (pages, rows, dim), (a, b, c) = array.shape, array.strides
    return array.seen((pages, rows, 1, dim), (a, b, 0, c))

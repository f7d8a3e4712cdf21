"""State kinds of SGLang 0.5.23 and vLLM 0.33, one for each way to lie in memory, emulated at both sides of unequal TP.

What a decode rank's memory must hold, every byte, is what its own engine would have written there.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from emulator import sglang, vllm

from pdstage.kernels import Pool
from pdstage.layout.addresses import Paging, StateComponents, append_state_component
from pdstage.layout.items import prefix_items, ring_items, slot_items, window_items
from pdstage.plan import Rect, selects, shares, wire_order
from pdstage.plan.tables import Index
from pdstage.tensors import (
    Ring,
    Section,
    build,
    deepseek_v4_latent,
    dsa_index,
    kv_scales,
    mamba_conv,
    mamba_ssm,
    mla,
    mxfp8_scales,
    paged_hnd,
    paged_nhd,
    rings,
    sglang_mha,
    slot_states,
    vllm_blocks,
)

WINDOW = 13


def sections(e):
    return [Section(*section) for section in e.sections]


def mamba(e, whole=False):
    tp = (e.tp, e.rank)
    return [
        mamba_conv(
            e.conv, sections=sections(e), tp=tp, channels_last=e.kimi, window=e.window, whole=whole, format="bf16"
        ),
        mamba_ssm(e.temporal, total_heads=e.heads, tp=tp, format="fp32"),
    ]


def mha(e, component="kv"):
    tp = {"total_heads": e.heads, "tp": (e.tp, e.rank), "component": component, "format": "bf16"}
    return [paged_hnd(e.k, e.v, **tp) if e.hnd else sglang_mha(e.k, e.v, page_size=e.page_size, **tp)]


def mxfp8(e, component="kv"):
    tp = {"total_heads": e.heads, "tp": (e.tp, e.rank), "component": component}
    k, v = e.scales["k"], e.scales["v"]
    return [
        sglang_mha(e.data["k"], e.data["v"], page_size=e.page_size, format="mxfp8", **tp),
        mxfp8_scales(k, v, format="ue8m0", **tp)
        if e.interleaved
        else kv_scales(k, v, page_size=e.page_size, format="ue8m0", **tp),
    ]


def nvfp4(e):
    tp = {"total_heads": e.heads, "tp": (e.tp, e.rank)}
    if isinstance(e, sglang.Nvfp4):
        data, scale = (e.data["k"], e.data["v"]), (e.scales["k"], e.scales["v"])
        return [
            sglang_mha(*data, page_size=e.page_size, format="nvfp4", **tp),
            kv_scales(*scale, page_size=e.page_size, format="fp8_e4m3", **tp),
        ]
    (data_k, data_v), (scale_k, scale_v) = ([[e.parts[name, what]] for name in "kv"] for what in ("data", "scale"))
    pages = paged_hnd if e.hnd else paged_nhd
    return [
        pages(data_k, data_v, format="nvfp4", **tp),
        kv_scales(scale_k, scale_v, heads_first=e.hnd, format="fp8_e4m3", **tp),
    ]


def dsa(e):
    return [
        dsa_index(
            e.index, page_size=e.page_size, block_size=e.kernel_page * e.pool, tokens_per_row=e.pool, component="nsa"
        )
    ]


def ring_parts(component):
    def parts(e):
        rows = e.rows if e.flat else None
        return [
            rings([b[: e.n_slots * e.rows] if e.flat else b for b in e.buffers[name]], rows=rows, role=name,
                  component=component, format="bf16")
            for name in e.names
        ]  # fmt: skip

    return parts


def ring_list(component, window):
    def items(e):
        first = next(iter(e.buffers.values()))[0]
        ring = Ring.of(first[: e.n_slots * e.rows] if e.flat else first, e.rows if e.flat else None)
        return {component: ring_items(e.slot, ring, stop=e.n_tokens, window=window)}

    return items


def qsa_pending(e):
    ring = [keys.reshape(e.n_slots, e.ratio, 2, 8) for keys in e.keys]
    return [
        slot_states(ring, role="key", component="qsa_pending", format="bf16"),
        slot_states([e.rope.reshape(e.n_slots, e.ratio, 3)], role="rope", component="qsa_pending"),
    ]


def window_mla(e):
    if e.packed:
        return [deepseek_v4_latent(e.raw, page_size=e.page_size, component="swa")]
    return [mla(e.blocks, component="swa", format="fp8")]


def qsa_compressed(e):
    keys = [k.reshape(len(k), 1, -1) for k in e.keys]
    named = {"role": "index_k", "component": "qsa_compressed", "format": "bf16"}
    return [mla(keys, page_size=e.page_size, tokens_per_row=e.ratio, **named)]


def deepseek_v4(e):
    return [deepseek_v4_latent(e.pools, page_size=e.page_size, tokens_per_row=e.ratio)]


def per_token_head(e):
    tp = {"total_heads": e.heads, "tp": (e.tp, e.rank)}
    return [vllm_blocks(e.caches, key_nbytes=e.dim + 4, format="fp8_e4m3_scaled", **tp)]


def told(tensors, item=1):
    """A pool as SGLang's transfer code sees it: addresses, lengths and item lengths of tensors of items."""
    return [t.ctypes.data for t in tensors], [t.nbytes for t in tensors], [t[:item].nbytes for t in tensors]


def appended(e, kind, infos, **how):
    states = StateComponents((e.tp, e.rank))
    for _ in range(2):  # what two paths lead to is there once
        append_state_component(states, kind, *infos, **how)
    return states.parts


def addressed_mamba(e):
    """Tensor-major, as MambaPool tells them."""
    n, groups = e.n_layers, [total * dim for _, total, dim in e.sections]
    return appended(
        e, "mamba", told([*e.conv, *e.temporal]), layer_ids=[*range(n)] * 2,
        dim_per_tensor=[len(e.channels)] * n + [e.temporal.shape[2]] * n,
        slice_outer_counts=[e.window if e.kimi else 1] * n + [1] * n, conv_shard_groups=[groups] * n + [None] * n,
    )  # fmt: skip


def addressed_swa(e):
    dims = [len(e.k[0][0])] * 2 * e.n_layers
    how = {"dim_per_tensor": dims, "layer_ids": [*range(e.n_layers)] * 2, "paging": Paging(e.page_size, by_token=True)}
    return appended(e, "swa", told([*e.k, *e.v], e.page_size), **how)


def addressed_dsa(e):
    """Without a word on what is in a page, pages move whole; layers without rows are passed over."""
    ptrs, lens, _ = told(e.index)
    items = [e.page_size * 132 if len(index) else 0 for index in e.index]
    return appended(e, "nsa", (ptrs, lens, items), paging=Paging(e.page_size))


def pages(component):
    return lambda e: {component: prefix_items(e.token_slots, page_size=e.page_size)}


def slots(component):
    return lambda e: {component: slot_items(e.slot)}


def window(e):
    return {"swa": window_items(e.token_slots, page_size=e.page_size, window=WINDOW)}


def translated(e):
    """As SGLang does: the request's row names slots of the full pool."""
    return {
        "swa": window_items(e.full_slots, page_size=e.page_size, window=WINDOW, mapping=e.full_to_swa)
    }  # fmt: skip


@dataclass
class Kind:
    """A pool, how its engine describes it to the library, and pairs of settings for the two sides."""

    pool: type
    parts: object
    items: object
    sides: list = field(default_factory=lambda: [({}, {})])
    decode: type | None = None  # another engine's pool


def sides(name, *pairs, **common):
    """Settings of the two sides that differ in one."""
    return [({name: a, **common}, {name: b, **common}) for a, b in pairs]


PAGE_SIZES = sides("page_size", (4, 8), (8, 4))
ORDERS = [
    ({"hnd": a, "page_size": p}, {"hnd": b, "page_size": q})
    for a, b, p, q in [(0, 1, 4, 4), (1, 0, 8, 4), (1, 1, 4, 4), (1, 1, 4, 8), (0, 0, 1, 4)]
]
GROUPS = {"sections": (("x", 8, 4), ("B", 1, 6), ("C", 1, 6))}
CONV = [
    *itertools.product([{}, {"kimi": True}], repeat=2),
    ({"extra": 0, "kimi": True}, {"extra": 3, "kimi": False}),
    ({"extra": 2, "kimi": False}, {"extra": 0, "kimi": True}),
    (GROUPS, {**GROUPS, "kimi": True}),
]
LATENT_ROPE = {"flat": True, "names": ("latent", "rope")}
SHORT = {"n_tokens": 150, "n_layers": 1}
KINDS = {
    "mamba": Kind(sglang.Mamba, mamba, slots("mamba"), CONV),
    "mamba whole": Kind(
        sglang.Mamba,
        lambda e: mamba(e, whole=True),
        slots("mamba"),
        [*sides("extra", (0, 3), (2, 0)), *sides("extra", (0, 3), kimi=True)],
    ),
    "mamba addressed": Kind(sglang.Mamba, addressed_mamba, slots("mamba"), sides("kimi", (0, 0), (1, 1))),
    "qsa_pending": Kind(sglang.QsaPending, qsa_pending, slots("qsa_pending")),
    "qsa_compressed": Kind(sglang.QsaCompressed, qsa_compressed, pages("qsa_compressed"), PAGE_SIZES),
    "swa": Kind(sglang.Swa, lambda e: mha(e, "swa"), translated, [*PAGE_SIZES, *ORDERS]),
    "swa addressed": Kind(sglang.Swa, addressed_swa, translated, PAGE_SIZES),
    "dsa": Kind(sglang.Dsa, dsa, pages("nsa"), [*sides("page_size", (128, 128), (64, 128)),
                                                *sides("page_size", (256, 512), pool=4)]),
    "dsa addressed": Kind(sglang.Dsa, addressed_dsa, pages("nsa"), sides("n_tokens", (256, 256))),
    "dsa_tail": Kind(sglang.Ring, ring_parts("dsa_tail"), ring_list("dsa_tail", 3),
                     sides("rows", (4, 4), (4, 7), (9, 4))),
    "minimax_dense_kv": Kind(sglang.Mha, lambda e: mha(e, "minimax_dense_kv"), pages("minimax_dense_kv"), ORDERS),
    "swa_ring": Kind(sglang.Ring, ring_parts("swa_ring"), ring_list("swa_ring", WINDOW),
                     [*sides("rows", (16, 16), (16, 14), **LATENT_ROPE),
                      ({"behind": 5, "rows": 13, **LATENT_ROPE}, {"behind": 2, "rows": 19, **LATENT_ROPE})]),
    "block_scale": Kind(sglang.Mxfp8, mxfp8, pages("kv"),
                        sides("page_size", (16, 16), (16, 128), (128, 64), (128, 128), **SHORT)),
    "block_scale_swa": Kind(sglang.Mxfp8, lambda e: mxfp8(e, "swa"), window, sides("page_size", (4, 16))),
    "nvfp4": Kind(sglang.Nvfp4, nvfp4, pages("kv"), PAGE_SIZES),
    "nvfp4 to vLLM": Kind(sglang.Nvfp4, nvfp4, pages("kv"), [({}, {"hnd": True}), ({}, {"hnd": False, "page_size": 8})],
                          vllm.Nvfp4Blocks),
    "deepseek_v4": Kind(sglang.DeepseekV4, deepseek_v4, pages("kv"),
                        [*sides("page_size", (32, 32), (64, 32)), *sides("page_size", (32, 64), ratio=16)]),
    "vLLM mamba": Kind(vllm.MambaBlocks, mamba, slots("mamba"), [*CONV, *sides("padding", (0, 128))]),
    "vLLM mamba to SGLang": Kind(vllm.MambaBlocks, mamba, slots("mamba"), [({"extra": 2}, {})], sglang.Mamba),
    "vLLM sliding window MLA": Kind(vllm.WindowMla, window_mla, window,
                                    [*PAGE_SIZES, *sides("alignment", (576, 512), packed=True)]),
    "vLLM per token and head": Kind(vllm.PerTokenHead, per_token_head, pages("kv"), ORDERS),
}  # fmt: skip


def ranges(layout, *sides):
    """The tokens that all sides' items cover: what they have in common, the last page's to the end of the sequence."""
    found = {}
    for component in layout.components:
        held = [items[component.name] for _, items in sides]
        if component.positional:
            found[component.name] = max(item.first_token for item in held), sides[0][0].n_tokens
        else:
            found[component.name] = 0, len(held[0].pages) * component.tokens_per_item
    return found


def move(writers, destination, dst_tp, tokens, backend="host"):
    """Each writer's part, gathered and scattered. `writers` and `destination` are (layout, items)."""
    layout, dst_items = destination
    dealt = shares(dict(enumerate(src for src, _ in writers)), layout, dst_tp)
    for number, owned in dealt.items():
        src, src_items = writers[number]
        wire = wire_order(src, layout)
        rects = [Rect(name, *span, 0, 1000) for name, span in tokens.items()]
        plans = [
            Pool.of(side).plan(selects(side, owned, rects), wire, backend) for side in (src, layout)
        ]  # fmt: skip
        staged = np.empty(plans[0].nbytes(tokens) + 128, np.uint8)
        assert plans[0].nbytes(tokens) == plans[1].nbytes(tokens)
        indexes = [
            {name: Index.of(np.array(items.pages, np.int64), items.first_token) for name, items in held.items()}
            for held in (src_items, dst_items)
        ]
        at = staged.ctypes.data
        plans[0].gather(at, staged.size, indexes[0], tokens)
        plans[1].scatter(at, staged.size, indexes[1], tokens)


def check(kind, src_tp, dst_tp, src_settings, dst_settings, backend="host"):
    """Moves a request from all prefill ranks to every decode rank and compares every byte of the decode pools."""
    sources = [kind.pool(tp=src_tp, rank=rank, seed=rank, **src_settings) for rank in range(src_tp)]
    writers = [described(kind, e) for e in sources]
    for rank in range(dst_tp):
        ours, twin = (
            (kind.decode or kind.pool)(tp=dst_tp, rank=rank, seed=100 + rank, **dst_settings) for _ in range(2)
        )
        layout, items = described(kind, ours)
        tokens = ranges(layout, (ours, items), *((e, held) for e, (_, held) in zip(sources, writers, strict=True)))
        span = next(iter(tokens.values())) if layout.components[0].positional else ()
        for e in (*sources, twin):
            e.store(*span)
        assert any((a != b).any() for a, b in zip(ours.memory, twin.memory, strict=True)), "nothing to move"
        move(writers, (layout, items), (dst_tp, rank), tokens, backend)
        for number, (a, b) in enumerate(zip(ours.memory, twin.memory, strict=True)):
            np.testing.assert_array_equal(a, b, err_msg=f"memory {number} of rank {rank}")


def described(kind, e):
    """The layout over an emulated pool and its request's items, by the components' canonical names."""
    layout = build(*kind.parts(e), slots=[])
    return layout, {layout.component(name).name: given for name, given in kind.items(e).items()}


TPS = list(itertools.product([1, 2, 4], repeat=2))


@pytest.mark.parametrize("tp", TPS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_request_arrives_as_its_engine_would_have_written_it(name, tp):
    kind = KINDS[name]
    for src_settings, dst_settings in kind.sides:
        check(kind, *tp, src_settings, dst_settings)

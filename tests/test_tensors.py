"""Every constructor against the tensors' own contents, and every misuse it refuses."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch

from pdstage import Key, UsageError
from pdstage.layout.topology import REPLICATED, shard_axis
from pdstage.tensors import build, mla, paged_nhd, sglang_mha, vllm_blocks, vllm_cpu_blocks

PAGES, PAGE, HEADS, DIM = SHAPE = 5, 4, 3, 8
WHOLE = {"total_heads": 12, "tp": (4, 1)}  # three heads a rank


def filled(*shape, dtype=torch.bfloat16):
    """Memory whose every byte tells its place as far as 8 bits can: random, fixed by the shape."""
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    generator = torch.Generator().manual_seed(n_bytes)
    return torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(*shape)


def contents(layout, key):
    """Bytes `[page, token, shard, seg and byte]` of a view, read at the addresses its formula gives."""
    view = layout.by_key()[key]
    region = layout.regions[view.region]
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * region.nbytes).from_address(region.base))
    page, token, shard, seg, byte = np.ix_(
        range(view.n_items), range(view.tokens_per_item), range(view.shards), range(view.segs), range(view.width)
    )
    rows = np.array([view.row_offset(t) for t in range(view.tokens_per_item)])[token]
    at = view.offset + page * view.item_stride + rows + shard * view.shard_stride + seg * view.seg_stride + byte
    return memory[at].reshape(*at.shape[:3], -1)


def holds(layout, key, want):
    """A view's bytes are `want`."""
    np.testing.assert_array_equal(contents(layout, key), want)


def as_bytes(tensor):
    """The same bytes by the tensor's own indexing; `[page, token, head, dim]`."""
    return tensor.contiguous().view(torch.uint8).numpy()


DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.int8: "int8",
    torch.uint8: "uint8",
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sglang_slots_become_pages(dtype):
    k, v = map(list, filled(2, 3, PAGES * PAGE, HEADS, DIM, dtype=dtype))
    layout = build(sglang_mha(k, v, page_size=PAGE, **WHOLE))
    for layer in range(3):
        for role, tensors in (("k", k), ("v", v)):
            expected = as_bytes(tensors[layer]).reshape(PAGES, PAGE, HEADS, -1)
            holds(layout, Key("kv", role, layer), expected)
    view = layout.by_key()["kv", "k", 0]
    assert (view.format, view.width) == (DTYPES[dtype], DIM * dtype.itemsize)
    assert view.axis == shard_axis("kv_head", 12, 4, 1)


FUSED = {
    "apart": ((2, *SHAPE), list),
    "halves of dim 1": ((PAGES, 2, PAGE, HEADS, DIM), lambda pool: (pool[:, 0], pool[:, 1])),
    "halves of the last": ((PAGES, PAGE, HEADS, 2 * DIM), lambda pool: (pool[..., :DIM], pool[..., DIM:])),
}


@pytest.mark.parametrize("fused", FUSED)
def test_paged_nhd(fused):
    shape, parts = FUSED[fused]
    pools = [filled(*shape) for _ in range(2)]
    k, v = zip(*map(parts, pools), strict=True)
    layout = build(paged_nhd(k, v, layers=range(30, 30 + len(k)), **WHOLE))
    assert len(layout.regions) == 2
    for i, (a, b) in enumerate(zip(k, v, strict=True)):
        holds(layout, Key("kv", "k", 30 + i), as_bytes(a))
        holds(layout, Key("kv", "v", 30 + i), as_bytes(b))


@pytest.mark.parametrize("per_row", [1, 4])
def test_mla_is_replicated_in_both_shapes(per_row):
    """And in a compressed cache a row covers several tokens."""
    pages = [filled(PAGES, PAGE, 18) for _ in range(2)]
    slots = [filled(PAGES * PAGE, 1, 18) for _ in range(2)]
    by_slots = mla(slots, page_size=PAGE * per_row, tokens_per_row=per_row, component="draft")
    layout = build(mla(pages, tokens_per_row=per_row), by_slots)
    for component, tensors in (("kv", pages), ("draft", slots)):
        for layer, tensor in enumerate(tensors):
            expected = as_bytes(tensor).reshape(PAGES, PAGE, 1, -1).repeat(per_row, 1)
            holds(layout, Key(component, "latent", layer), expected)
    assert {view.axis for view in layout.views()} == {REPLICATED}


# vLLM 0.33: logical [L, B, H, N, C]; each name is the order the axes lie in memory.
VLLM_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
N_LAYERS, CONTENT = 2, 2 * DIM * 2
SIZES = {"L": N_LAYERS, "B": PAGES, "H": HEADS, "N": PAGE, "C": CONTENT}


def vllm_caches(order, pad=0):
    """Per layer views `[B, H, N, C]` int8 of one buffer in physical `order`, outermost entries padded by `pad`."""
    outer, *inner = order
    sizes = [SIZES[axis] for axis in inner]
    dense = int(np.prod(sizes))
    raw = filled(SIZES[outer] * (dense + pad), dtype=torch.int8)
    strides = {axis: int(np.prod(sizes[i + 1 :])) for i, axis in enumerate(inner)}
    strides[outer] = dense + pad
    whole = raw.as_strided([SIZES[axis] for axis in "LBHNC"], [strides[axis] for axis in "LBHNC"])
    return raw, list(whole)


def spans_of(layout):
    return [(region.base, region.nbytes) for region in layout.regions]


@pytest.mark.parametrize("key_nbytes", [None, 20])
@pytest.mark.parametrize("pad", [0, 64, 3])
@pytest.mark.parametrize("order", VLLM_LAYOUTS)
def test_vllm_blocks_in_six_layouts(order, pad, key_nbytes):
    raw, caches = vllm_caches(order, pad)
    layout = build(vllm_blocks(caches, format="bf16", key_nbytes=key_nbytes, **WHOLE))
    assert spans_of(layout) == [(raw.data_ptr(), raw.numel())]
    for layer, cache in enumerate(caches):
        logical = as_bytes(cache).transpose(0, 2, 1, 3)
        k, v = np.split(logical, [key_nbytes or CONTENT // 2], axis=3)
        holds(layout, Key("kv", "k", layer), k)
        holds(layout, Key("kv", "v", layer), v)


def test_groups_that_alias_one_allocation_share_its_region():
    """Two groups over the same bytes, one of them a prefix: dedup by base address would cut the other."""
    raw = filled(PAGES * HEADS * PAGE * CONTENT, dtype=torch.int8)
    full = raw.view(PAGES, HEADS, PAGE, CONTENT)
    window = raw[: 2 * HEADS * PAGE * CONTENT].view(4, HEADS, PAGE // 2, CONTENT)
    for parts in itertools.permutations(
        [
            vllm_blocks([full], format="bf16", **WHOLE),
            vllm_blocks([window], format="bf16", component="swa", **WHOLE),
        ]
    ):
        layout = build(*parts)
        assert spans_of(layout) == [(raw.data_ptr(), raw.numel())]
        half = CONTENT // 2
        holds(layout, Key("kv", "k", 0), as_bytes(full).transpose(0, 2, 1, 3)[..., :half])
        holds(layout, Key("swa", "v", 0), as_bytes(window).transpose(0, 2, 1, 3)[..., half:])


@pytest.mark.parametrize("spans", [((0, 4096), (512, 1024)), ((0, 2560), (1536, 4096))], ids=["inside", "overlapping"])
def test_a_storage_inside_another_does_not_shorten_its_region(spans):
    """Distinct storages over one allocation, as from_blob and from_numpy make them."""
    raw = np.zeros(4096, np.uint8)
    one, other = (torch.from_numpy(raw[slice(*span)]).view(-1, 4, 128) for span in spans)
    assert one.untyped_storage().nbytes() == spans[0][1]
    layout = build(mla([one]), mla([other], component="draft"))
    assert spans_of(layout) == [(raw.ctypes.data, 4096)]
    assert layout.by_key()["draft", "latent", 0].offset == spans[1][0]


def cpu_attn(k, v, *, packed):
    """K and V `[page, token, head, dim]` as CPU_ATTN keeps them: `[page, head, token, 2 * dim]` by its shape only."""
    pages, tokens, heads, dim = k.shape
    if packed:
        k = k.reshape(pages, tokens // 16, 16, heads, dim // 2, 2).permute(0, 3, 1, 4, 2, 5)
        v = v.reshape(pages, tokens // 2, 2, heads, dim // 16, 16).permute(0, 3, 4, 1, 5, 2)
    else:
        k, v = k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
    halves = [one.reshape(pages, heads, tokens * dim) for one in (k, v)]
    return torch.cat(halves, 2).reshape(pages, heads, tokens, 2 * dim).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["vec", "amx"])
def test_vllm_cpu_blocks(packed, dtype):
    k = filled(PAGES, 32, HEADS, 64, dtype=dtype)
    v = k.view(torch.uint8).flip(0).view(dtype)
    caches = [cpu_attn(k, v, packed=packed)]
    layout = build(vllm_cpu_blocks(caches, packed=packed, **WHOLE))
    holds(layout, Key("kv", "k", 0), as_bytes(k))
    roles = [f"v.{at}" for at in range(4)] if packed else ["v"]
    got = np.concatenate([contents(layout, Key("kv", role, 0)) for role in roles], 3)
    np.testing.assert_array_equal(got, as_bytes(v))
    assert sum(view.shards * view.shard_nbytes for view in layout.views()) == HEADS * 2 * 64 * dtype.itemsize


class FakeTensor:
    """A tensor on a device this machine may lack."""

    def __init__(self, like, kind, index):
        self.like, self.device = like, torch.device(kind, index)

    def __getattr__(self, name):
        return getattr(self.like, name)


def test_parts_may_lie_in_host_memory_beside_one_gpus():
    def caches(component, kind, index=0):
        k, v = ([FakeTensor(filled(*SHAPE), kind, index)] for _ in "kv")
        return paged_nhd(k, v, component=component, **WHOLE)

    layout = build(caches("kv", "cuda"), caches("window", "cpu"))
    assert {(r.kind, r.device) for r in layout.regions} == {("cuda", 0), ("cpu", 0)}
    with pytest.raises(UsageError, match="the parts of a layout are on cpu:0 and cuda:0 and cuda:1"):
        build(caches("kv", "cuda"), caches("window", "cpu"), caches("third", "cuda", 1))


def nhd(**changes):
    given = {"k": [filled(*SHAPE)], "v": [filled(*SHAPE)], **WHOLE, **changes}
    return build(paged_nhd(given.pop("k"), given.pop("v"), **given))


def twice():
    pool = filled(*SHAPE)
    return build(paged_nhd([pool], [pool], **WHOLE))


def slots(n=20, heads=HEADS, page_size=PAGE):
    return build(sglang_mha([filled(n, heads, DIM)], [filled(n, heads, DIM)], page_size=page_size, **WHOLE))


MISUSES = {
    "ndim": (lambda: nhd(v=[filled(PAGES * PAGE, HEADS, DIM)]), r"v\[0\] has shape .*not \[pages, page_size, heads"),
    "empty axis": (lambda: nhd(k=[filled(*SHAPE)[:0]]), r"k\[0\] has shape \[0, "),
    "last axis strided": (lambda: nhd(k=[filled(PAGES, PAGE, HEADS, 16)[..., ::2]]), r"k\[0\] has elements 4 bytes"),
    "expanded": (
        lambda: nhd(k=[filled(PAGES, PAGE, 1, DIM).expand(-1, -1, HEADS, -1)]),
        r"k\[0\] has byte strides .* overlap",
    ),
    "backwards": (
        lambda: nhd(k=[np.zeros(SHAPE, np.float16)[::-1]]),
        r"k\[0\] has byte strides .* backwards",
    ),
    "dtype": (lambda: nhd(k=[filled(*SHAPE, dtype=torch.complex64)]), r"k\[0\] has dtype complex64"),
    "device kind": (
        lambda: nhd(k=[torch.empty(SHAPE, device="meta")]),
        r"k\[0\] is on device 'meta'",
    ),
    "two devices": (
        lambda: nhd(v=[FakeTensor(filled(*SHAPE), "cuda", 1)]),
        r"v\[0\] is on cuda:1, k\[0\] on cpu:0",
    ),
    "not a tensor": (lambda: nhd(k=[[1, 2]]), r"k\[0\] is a list, not a tensor"),
    "no layers": (lambda: nhd(k=[], v=[]), "k is empty"),
    "layer counts": (lambda: nhd(v=[filled(*SHAPE) for _ in "ab"]), "v has 2 entries, k has 1"),
    "layers": (lambda: nhd(layers=[1, 2]), "layers has 2 entries, k has 1"),
    "heads": (lambda: nhd(tp=(2, 1)), r"k\[0\] has 3 heads, but this rank holds 6 of 12 \(from head 6\)"),
    "pages": (lambda: nhd(v=[filled(PAGES + 1, PAGE, HEADS, DIM)]), r"v\[0\] has 6 pages of 4 tokens, k\[0\] has 5"),
    "page size": (lambda: nhd(v=[filled(PAGES, 2, HEADS, DIM)]), r"v\[0\] has 5 pages of 2 tokens, k\[0\] has 5 of 4"),
    "the same cache twice": (twice, r"v\[0\] is the same memory as k\[0\]"),
    "slots": (lambda: slots(n=21), r"k\[0\] has 21 slots, not a multiple of page_size=4"),
    "no page size": (lambda: slots(page_size=0), "page_size=0"),
    "mla heads": (lambda: mla([filled(8, 2, 18)], page_size=4), r"caches\[0\] has shape .* not \[slots, 1, dim\]"),
    "raw bytes unnamed": (lambda: vllm_blocks(vllm_caches("LBHNC")[1], **WHOLE), "name their encoding"),
    "odd content": (
        lambda: vllm_blocks([filled(PAGES, HEADS, PAGE, 33, dtype=torch.int8)], format="bf16", **WHOLE),
        "33 bytes of K and V a head",
    ),
    "key too wide": (
        lambda: vllm_blocks(vllm_caches("LBHNC")[1], format="bf16", key_nbytes=CONTENT, **WHOLE),
        "cannot be split at 32",
    ),
    "nothing": (build, "no device"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_refused_in_words(misuse):
    call, words = MISUSES[misuse]
    with pytest.raises(UsageError, match=words) as caught:
        call()
    assert caught.value.remedy

"""What the adapters to vLLM and SGLang hand to the kernels, on tensors of the GPU: their layouts, their functions.

No engine is needed: the layouts are those that the adapters make of an engine's tensors, by the same functions.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pdstage.bench import shapes, variants  # noqa: E402  (needs torch)
from pdstage.bench.bed import Bed  # noqa: E402
from pdstage.bench.gpu_kernels import model_case  # noqa: E402
from pdstage.bench.peers import sglang  # noqa: E402
from pdstage.kernels import Index, Pool  # noqa: E402
from pdstage.layout.state_shapes import Section  # noqa: E402
from pdstage.plan import TOKEN_MAJOR, Select  # noqa: E402
from pdstage.tensors import (  # noqa: E402
    build,
    dsa_index,
    mamba_conv,
    mamba_ssm,
    mla,
    paged_nhd,
    sglang_mha,
    vllm_blocks,
    vllm_cpu_blocks,
)

PAGES, PAGE, HEADS, DIM, LAYERS = 12, 16, 4, 64, 3
HEADS_OF = {"total_heads": 2 * HEADS, "tp": (2, 1)}
ITEMS = [7, 2, 11, 0, 5]
SLOTS = {"component": "mamba"}


def of(*shape, dtype=torch.bfloat16):
    """One tensor a layer, of any bytes."""
    drawn = torch.Generator().manual_seed(len(shape))
    n = int(np.prod(shape)) * dtype.itemsize
    return [
        torch.randint(0, 256, (n,), dtype=torch.uint8, generator=drawn).view(dtype).view(shape) for _ in range(LAYERS)
    ]


# By name: the tensors of an engine, and what its adapter makes of them.
LAYOUTS = {
    "vllm-blocks-nhd": (
        lambda: [one.transpose(1, 2) for one in of(PAGES, PAGE, HEADS, 2 * DIM)],
        lambda held: [vllm_blocks(held, **HEADS_OF, format="bf16")],
    ),
    "vllm-blocks-hnd": (
        lambda: of(PAGES, HEADS, PAGE, 2 * DIM),
        lambda held: [vllm_blocks(held, **HEADS_OF, format="bf16")],
    ),
    "vllm-blocks-fp8": (
        lambda: of(PAGES, HEADS, PAGE, 2 * DIM, dtype=torch.uint8),
        lambda held: [vllm_blocks(held, **HEADS_OF, format="fp8_e4m3")],
    ),
    "vllm-cpu-blocks": (
        lambda: of(PAGES, HEADS, PAGE, 2 * DIM),
        lambda held: [vllm_cpu_blocks(held, **HEADS_OF, format="bf16")],
    ),
    "vllm-slots": (
        lambda: of(PAGES, 2, PAGE, HEADS * DIM),
        lambda held: [
            paged_nhd(*([c[:, n].view(PAGES, PAGE, HEADS, DIM) for c in held] for n in (0, 1)), **HEADS_OF),
        ],
    ),
    "vllm-latent": (lambda: of(PAGES, 1, PAGE, 576), lambda held: [mla([cache[:, 0] for cache in held])]),
    "vllm-index": (
        lambda: of(PAGES, PAGE * 132, dtype=torch.uint8),
        lambda held: [dsa_index(held, page_size=PAGE, block_size=PAGE)],
    ),
    "sglang-heads": (
        lambda: of(PAGES * PAGE, HEADS, DIM) + of(PAGES * PAGE, HEADS, DIM),
        lambda held: [sglang_mha(held[:LAYERS], held[LAYERS:], page_size=PAGE, **HEADS_OF)],
    ),
    "sglang-latent": (lambda: of(PAGES * PAGE, 1, 576), lambda held: [mla(held, page_size=PAGE)]),
    "states": (
        lambda: of(PAGES, 96, 3) + of(PAGES, HEADS, DIM, 16, dtype=torch.float32),
        lambda held: [
            mamba_conv(held[:LAYERS], sections=(Section("k_head", 8, 16), Section("v_head", 8, 8)), tp=(2, 1), **SLOTS),
            mamba_ssm(held[LAYERS:], **HEADS_OF, **SLOTS),
        ],
    ),
}


def pool_of(name, held, device):
    layout = build(*LAYOUTS[name][1](held), slots=["mamba"] if name == "states" else [])
    return Pool.of(layout, device, keep=held)


@pytest.mark.also_on_host
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_adapters_layout_is_copied_as_on_the_cpu(variant, device, name):
    """Gathered to the same bytes, and scattered so that every tensor is what it is on the CPU: nothing else written."""
    here = LAYOUTS[name][0]()
    there = [one.clone() if device == "cpu" else one.to(device) for one in here]
    reference, pool = pool_of(name, here, "cpu"), pool_of(name, there, device)
    select = [Select(view.key, 0, view.shards) for view in reference.layout.views()]
    expected = reference.plan(select, TOKEN_MAJOR, "reference")
    plan = variants.plan_of(pool, select, TOKEN_MAJOR, variant)
    (component,) = reference.layout.components
    items, tokens = np.array(ITEMS, np.int32), {component.name: (0, len(ITEMS) * component.tokens_per_item)}
    index = {component.name: Index.of(items)}

    want = np.full(expected.nbytes(tokens), 0xA5, np.uint8)
    expected.gather(want.ctypes.data, want.size, index, tokens)
    got = torch.full((want.size,), 0xA5, dtype=torch.uint8, device=device)
    plan.gather(got.data_ptr(), got.numel(), index, tokens)
    np.testing.assert_array_equal(got.cpu().numpy(), want)

    other = np.random.default_rng(3).integers(0, 256, want.size, np.uint8)
    expected.scatter(other.ctypes.data, other.size, index, tokens)
    staged = torch.from_numpy(other).to(device)
    plan.scatter(staged.data_ptr(), staged.numel(), index, tokens)
    for mine, its in zip(there, here, strict=True):
        assert torch.equal(mine.cpu().contiguous().view(torch.uint8), its.contiguous().view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("pair", [shapes.PAIRS[0], shapes.PAIRS[1]], ids=["to-more-ranks", "to-fewer-ranks"])
def test_what_takes_the_place_of_sglangs_functions_gives_their_bytes(pair):
    """Both of them, on the GPU, from SGLang's own file."""
    if sglang.find() is None:
        pytest.skip("sglang: not installed, and PDSTAGE_SGLANG names no file")
    bed, peer, tokens = Bed("cuda:0", (variants.TRITON,)), sglang.Peer(sglang.find()), 4 * pair.model.page
    case = model_case(bed, pair, tokens, "gather")
    out = peer.module.StagingBuffer(case.nbytes, "cuda:0", 0)
    sglang.gather_call(peer, pair, case, out)()
    bed.wait()
    theirs = out.buffer[: case.nbytes].clone()
    out.buffer.fill_(0xA5)
    sglang.gather_call(peer, pair, case, out, drop_in=True)()
    bed.wait()
    assert torch.equal(out.buffer[: case.nbytes], theirs)

    cases = [model_case(bed, pair, tokens, "scatter", part=part) for part in shapes.sends(pair, tokens)]
    staged, target = bed.memory(sum(one.nbytes for one in cases)), cases[0]
    target.memory.fill_(0)
    sglang.scatter_call(peer, pair, target, staged)()
    bed.wait()
    theirs = target.memory.clone()
    target.memory.fill_(0)
    sglang.scatter_call(peer, pair, target, staged, drop_in=True)()
    bed.wait()
    assert torch.equal(target.memory, theirs)

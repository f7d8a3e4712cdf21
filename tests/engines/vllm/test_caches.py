"""What a worker registers becomes a layout that moves every byte of a request, and no other: between unlike engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.mamba.mamba_utils import (
    MambaStateShapeCalculator,
    get_conv_state_layout,
    is_conv_state_dim_first,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from pdstage import Topology
from pdstage.errors import UsageError
from pdstage.integrations.vllm.caches import Caches
from tests.engines.vllm.caches import HEAD_SIZE, N_HEADS, attention, full, transfer
from tests.engines.vllm.models import LLAMA
from tests.engines.vllm.workers import heads_of

LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
N_TOKENS = 100


def mla(tp, block_size):
    return full(tp, block_size, kind=MLAAttentionSpec, num_kv_heads=1, head_size=72)


def nvfp4(tp, block_size):
    """Data and scales of a head packed: 4 bits a value, a byte for each 16."""
    packed = HEAD_SIZE + 2 * HEAD_SIZE // 16
    return full(tp, block_size, dtype=torch.uint8, kv_quant_mode=KVQuantMode.NVFP4, state_content_bytes=packed)


def drafted(tp, block_size):
    """A drafter's layer, of the same number as one of the model's."""
    return full(tp, block_size) | {"draft.layers.0.self_attn.attn": attention(tp, block_size)}


def windowed(tp, block_size):
    swa = attention(tp, block_size, SlidingWindowSpec, sliding_window=40)
    return full(tp, block_size) | {f"model.layers.{i}.self_attn.attn": swa for i in (2, 3)}


def chunked(tp, block_size):
    local = attention(tp, block_size, ChunkedLocalAttentionSpec, attention_chunk_size=64)
    return full(tp, block_size) | {f"model.layers.{i}.self_attn.attn": local for i in (2, 3)}


@pytest.fixture
def pair(sides):
    """Two engines of the same model."""

    def make(src, dst, specs, more=None):
        return sides("kv_producer", specs, **src), sides("kv_consumer", more or specs, **dst)

    return make


def blocks_for(side, n_tokens, first):
    """A list for each group, of blocks that no other has; what a group holds no more is null."""
    made, rng = [], np.random.default_rng(first)
    free = list(rng.permutation(np.arange(1, side.plan.num_blocks)))
    for group in side.groups:
        size = group.spec.block_size
        n = 1 + group.spec.num_speculative_blocks if group.is_state else -(-n_tokens // size)
        null = 0 if group.is_state else group.needed_from(n_tokens) // size
        made.append([0] * null + [int(free.pop()) for _ in range(n - null)])
    return made


def check(src, dst, n_tokens=N_TOKENS, start=0):
    """Moves a request from its token `start` on, and compares every byte of the destination. Where vLLM zeroes new
    blocks, what lies behind the last token is zero: vLLM leaves that to a connector.
    """
    theirs, ours = blocks_for(src, n_tokens, 1), blocks_for(dst, n_tokens, 2)
    if all(group.spec.num_kv_heads == 1 for group in src.groups if not group.is_state):  # each rank has the same
        for cache in src.memory[1:]:
            cache.copy_(src.memory[0])
    expected = [memory.cpu().clone() for memory in dst.memory]
    assert not transfer(src, dst, "r", src.held(theirs, n_tokens), dst.held(ours, n_tokens, start))
    for group in dst.groups:
        blocks = ours[group.index]
        tokens = range(max(start, group.needed_from(n_tokens)), n_tokens)
        for name in dst.plan.kv_cache_groups[group.index].layer_names:
            views = [dst.view(rank, name, memory) for rank, memory in enumerate(expected)]
            if group.is_state:
                held = states(src, name, theirs[group.index][0]), states(dst, name, blocks[0])
                assert all(map(np.array_equal, *held)), name
                for rank, view in enumerate(views):  # its rows for speculation are as they came
                    view[blocks[0]] = dst.view(rank, name)[blocks[0]].cpu()
                continue
            sent = heads(src, name, theirs[group.index], tokens)
            page, row = dst.places(name, blocks, tokens)
            behind = dst.places(name, blocks, range(n_tokens, len(blocks) * dst.spec(name).block_size))
            for rank, view in enumerate(views):
                is_latent = isinstance(dst.spec(name), MLAAttentionSpec)
                view[page, :, row] = sent if is_latent else sent[:, heads_of(dst.n_heads, dst.tp, rank)]
                if dst.plan.needs_kv_cache_zeroing:
                    view[behind[0], :, behind[1]] = 0
    for memory, right in zip(dst.memory, expected, strict=True):
        assert torch.equal(memory.cpu(), right)


def heads(side, name, blocks, tokens):
    """`[token, head, byte]` of the whole model; of replicas the first."""
    page, row = side.places(name, blocks, tokens)
    parts = [side.view(rank, name).cpu()[page, :, row] for rank in range(side.tp)]
    spec = side.spec(name)
    if isinstance(spec, MLAAttentionSpec):
        return parts[0]
    return torch.cat(parts[:: side.tp * spec.num_kv_heads // side.n_heads or 1], 1)


@pytest.mark.parametrize("dst", LAYOUTS)
@pytest.mark.parametrize("src", LAYOUTS)
def test_every_layout_meets_every_other(pair, src, dst):
    check(*pair({"layout": src, "tp": 2}, {"layout": dst, "block_size": 32}, full))


@pytest.mark.parametrize(
    ("src", "dst"),
    [({"tp": 4}, {"tp": 2, "block_size": 64}), ({"tp": 2, "block_size": 64}, {"tp": 4}), ({"tp": 2}, {"tp": 1})],
    ids=["4-2", "2-4", "2-1"],
)
@pytest.mark.parametrize("family", [full, mla, nvfp4, drafted, windowed, chunked])
def test_every_family_at_unequal_tp_and_block_size(pair, family, src, dst):
    check(*pair(src, dst, family))


SHAPES = MambaStateShapeCalculator
WINDOW = 3
STATES = {  # the conv state's sections, in channels of the whole model; a rank's shapes at a TP size, as it speculates
    "MAMBA1": ([64], lambda tp, _: SHAPES.mamba1_state_shape(tp, 64, 8, WINDOW + 1)),
    "MAMBA2": ([64, 16, 16], lambda tp, n: SHAPES.mamba2_state_shape(tp, 64, 4, 8, 8, 4, WINDOW + 1, num_spec=n)),
    "GDN_ATTN": (
        [32, 32, 64],
        lambda tp, n: SHAPES.gated_delta_net_state_shape(tp, 4, 8, 8, 8, WINDOW + 1, num_spec=n),
    ),
    "LINEAR": ([64], lambda tp, _: ((WINDOW, 64 // tp), (8 // tp, 8, 4))),
}


def recurrent(kind, n_speculative=0):
    """Two layers of states beside two of attention."""

    def specs(tp, block_size):
        spec = MambaSpec(
            block_size=block_size,
            shapes=STATES[kind][1](tp, n_speculative),
            dtypes=(torch.float16, torch.float32),
            mamba_type=MambaAttentionBackendEnum[kind],
            page_size_padded=attention(tp, block_size).page_size_bytes,
            num_speculative_blocks=n_speculative,
        )
        return full(tp, block_size) | {f"model.layers.{i}.mixer": spec for i in (2, 3)}

    return specs


def states(side, name, block):
    """A block's conv state, the window alone and channels first, and its SSM state, of the whole model."""
    spec, convs, ssms = side.spec(name), [], []
    sections = STATES[spec.mamba_type.name][0]
    for raw, one in zip(side.memory, side.caches, strict=True):
        cache, memory = one[name], raw.cpu().numpy()
        at = cache.data_ptr() - raw.data_ptr() + block * cache.stride(0) * cache.element_size()
        (conv, ssm), (conv_dtype, ssm_dtype) = spec.shapes, spec.dtypes
        nbytes = int(np.prod(conv)) * conv_dtype.itemsize
        held = memory[at : at + nbytes].reshape(*conv, -1)
        convs.append((held if is_conv_state_dim_first() else held.swapaxes(0, 1))[:, :WINDOW])
        ssms.append(memory[at + nbytes : at + nbytes + int(np.prod(ssm)) * ssm_dtype.itemsize].reshape(ssm[0], -1))
    parts = [np.split(conv, np.cumsum(sections)[:-1] // side.tp) for conv in convs]
    return [np.concatenate([part[i] for i in range(len(sections)) for part in parts]), np.concatenate(ssms)]


@pytest.fixture(params=["SD", "DS"])
def conv_order(request, monkeypatch):
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    get_conv_state_layout.cache_clear()
    assert is_conv_state_dim_first() == (request.param == "DS")
    yield
    monkeypatch.undo()
    get_conv_state_layout.cache_clear()


@pytest.mark.parametrize(("src", "dst"), [(4, 2), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["MAMBA1", "MAMBA2", "GDN_ATTN"])
def test_recurrent_states_at_unequal_tp(pair, conv_order, kind, src, dst):
    """Each side may speculate as it likes: conv states have rows for that behind those of their window."""
    check(*pair({"tp": src}, {"tp": dst, "block_size": 32}, recurrent(kind, 2 * (src == 2)), recurrent(kind, src)))


def test_states_of_unknown_order_move_whole_at_equal_tp(pair):
    check(*pair({"tp": 2}, {"tp": 2}, recurrent("LINEAR")))
    src, dst = pair({"tp": 2, "extra": {"config": {"open_wait_s": 1.0}}}, {"tp": 1}, recurrent("LINEAR"))
    theirs, ours = blocks_for(src, N_TOKENS, 1), blocks_for(dst, N_TOKENS, 2)
    assert transfer(src, dst, "r", src.held(theirs, N_TOKENS), dst.held(ours, N_TOKENS)) == {"r"}


@pytest.mark.parametrize("n_heads", [1, 2])
def test_more_ranks_than_heads(pair, n_heads):
    """Replicated heads: each of prefill's is sent once, each of decode's gets its copy."""
    model = LLAMA | {"num_key_value_heads": n_heads}
    specs = lambda tp, size: full(tp, size, num_kv_heads=max(1, n_heads // tp))  # noqa: E731
    check(*pair({"tp": 4, "model": model}, {"tp": 2, "model": model}, specs))


def test_a_block_of_several_kernel_blocks(pair):
    check(*pair({"block_size": 64, "kernel_block_size": 16}, {"tp": 2, "block_size": 32}, full))


@pytest.mark.parametrize("start", [16, 80])
def test_a_prefix_that_is_there_is_not_sent(pair, start):
    check(*pair({"tp": 2}, {"block_size": 16}, windowed), start=start)


def caches_of(src, n_pages, rows, plan):
    """vLLM's tensors of that many pages, of `rows` tokens each, under `plan`."""
    tensors = {name: torch.zeros(n_pages, N_HEADS, rows, 2 * HEAD_SIZE, dtype=torch.float16) for name in src.caches[0]}
    return Caches(tensors, plan, src.configs[0], Topology())


@pytest.mark.parametrize("host_resident", [False, True])
def test_the_pages_of_a_block(src, host_resident):
    """HiSparse's group in host memory has blocks of its own number. kvcached's tensors span what they may grow to:
    memory that is only reserved makes no block larger.
    """
    n_blocks, groups, tensors = src.plan.num_blocks, src.plan.kv_cache_groups, src.plan.kv_cache_tensors
    plan = replace(
        src.plan, hisparse_host_num_blocks=3 * n_blocks,
        kv_cache_groups=[replace(group, host_resident=host_resident) for group in groups],
        kv_cache_tensors=[replace(tensor, host_resident=host_resident) for tensor in tensors],
    )  # fmt: skip
    n_blocks *= 3 if host_resident else 1
    assert caches_of(src, 2 * n_blocks, 16, plan).pages("kv", [3]).tolist() == [3]
    assert caches_of(src, 4 * n_blocks, 8, plan).pages("kv", [3]).tolist() == [6, 7]
    for n_pages, rows in ((n_blocks - 1, 16), (n_blocks, 12), (n_blocks, 32), (n_blocks, 8)):
        with pytest.raises(
            UsageError, match=f"model.layers.0.self_attn.attn.* whole pages for {n_blocks} blocks of 16"
        ):
            caches_of(src, n_pages, rows, plan)

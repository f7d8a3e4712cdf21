"""A rank does not start over memory that is not laid out as pdstage's views say: SGLang's own writers judge.

The pools are SGLang's. Each case changes what pdstage believes, or how the pool stores, as a release of SGLang might.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.utils import build_kv_layer_ids, setup_state_kv_args
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from pdstage.errors import UsageError
from pdstage.integrations.options import trusts_layout
from pdstage.integrations.sglang import memory
from pdstage.integrations.sglang.pools import Pools
from pdstage.integrations.sglang.writers import probes_of
from pdstage.layout import Layout
from pdstage.layout.topology import Topology
from pdstage.probe import prove_layout
from tests.engines import stubs
from tests.engines.sglang import setups
from tests.engines.sglang.fleet import Child
from tests.engines.sglang.pools import HEADS, Memory

PAGE = {"dsa": 64, "hisparse": 64}
PLAIN = SimpleNamespace(architectures=["LlamaForCausalLM"])
SPARSE = SimpleNamespace(architectures=["DeepseekV32ForCausalLM"], index_topk=64, index_topk_freq=2)
MODEL = SimpleNamespace(num_attention_layers=4, hf_config=PLAIN, get_total_num_kv_heads=lambda: HEADS)


@pytest.fixture(autouse=True)
def one_rank():
    """What latents' pools ask SGLang for."""
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0):
        yield


def arguments(pool, *, page_size, owner=None, draft=None):
    """As the schedulers' `_init_kv_manager` fills them in, for one rank; `owner` hands over pages in `pool`'s place."""
    args = KVArgs()
    args.gpu_id, args.page_size, args.kv_cache_dtype_str, args.num_draft_entries = setups.GPU, page_size, "auto", 0
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = (owner or pool).get_contiguous_buf_infos()
    args.kv_layer_ids = build_kv_layer_ids(
        token_to_kv_pool=pool, draft_token_to_kv_pool=None, num_draft_entries=0, num_hidden_layers=4
    )
    setup_state_kv_args(args, pool, draft, req_to_token_pool=None)
    args.pdstage_pools = (pool, draft, None, owner or pool)
    return args


def held(kind, tp=(1, 0), mode="decode"):
    return Memory(setups.Setup(mode, tp[0], tp[1], 0, kind, PAGE.get(kind, 16), 8))


def layout_of(
    pool, *, page_size=16, tp=(1, 0), is_mla=False, owner=None, draft=None, config=PLAIN
):  # fmt: skip
    args = arguments(pool, page_size=page_size, owner=owner, draft=draft)
    place = Topology(tp_size=tp[0], tp_rank=tp[1])
    made = memory.pool_of(
        args, place, SimpleNamespace(**vars(MODEL) | {"hf_config": config}), is_mla=is_mla, device=setups.KIND
    )
    return made.layout, Pools.of(args)


def proved(layout, pools):
    """What the manager does before it makes the node."""
    return prove_layout(layout, probes_of(layout, pools))


@pytest.mark.parametrize(
    ("kind", "tp", "n_layers"),
    [
        ("mha", (1, 0), 2), ("mha", (2, 1), 2), ("swa", (2, 1), 2), ("mla", (1, 0), 2), ("dsa", (1, 0), 3),
        ("hybrid", (1, 0), 4), ("hybrid", (2, 1), 4), ("hisparse", (1, 0), 3),
    ],
)  # fmt: skip
def test_sglangs_pools_are_proved_and_left_as_they_were(kind, tp, n_layers):
    """Every layer of every component, by its pool's own writer; nothing is trusted."""
    made = held(kind, tp)
    tensors = [one.tensor for some in made.held.values() for one in some]
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.randn(tensor.shape).mul(40 + number).to(tensor.dtype))
    before = [tensor.clone() for tensor in tensors]
    is_mla = kind in ("mla", "dsa", "hisparse")
    proof = proved(*layout_of(made.pool, page_size=made.page_size, tp=tp, is_mla=is_mla, owner=made.host))
    assert len(proof.proved) == n_layers
    assert not proof.trusted
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(tensors, before, strict=True)
    )


def pool_of(dtype=torch.bfloat16):
    return MHATokenToKVPool(
        7 * 16, 16, dtype=dtype, head_num=HEADS, head_dim=32, layer_num=2, device=stubs.DEVICE,
        enable_memory_saver=False, enable_alt_stream=False,
    )  # fmt: skip


class Later(MHATokenToKVPool):
    """A later release's: the class is another, and nothing is known of it."""


UNKNOWN = "nothing proves how attention backend "
OTHERWISE = {
    "layers in another order": ("mha", "k_buffer", lambda it: it[::-1], "kv of layer 0' is not laid out .* MHATokenTo"),
    "a class that nobody knows": ("mha", "__class__", lambda _: Later, f"{UNKNOWN}Later"),
    "scales of quantized K and V": ("mha", "quant_method", lambda _: object(), f"{UNKNOWN}MHATokenToKVPool"),
    "HiSparse's layers in another order": (
        "hisparse", "data_refs", lambda it: it[::-1], "kv of layer 0' is not laid out as .* MLATokenToKVPoolHost",
    ),
    "HiSparse's pages of all layers": ("hisparse", "layout", lambda _: "page_first", f"{UNKNOWN}MLATokenToKVPoolHost"),
}  # fmt: skip
"""A kind of pool, an attribute of what hands over its pages, what that becomes, and what is said of it."""


@pytest.mark.parametrize(("kind", "name", "make", "said"), OTHERWISE.values(), ids=OTHERWISE)
def test_memory_that_is_otherwise_than_believed_is_refused_by_name(kind, name, make, said):
    made = held(kind)
    layout, pools = layout_of(made.pool, page_size=made.page_size, is_mla=kind == "hisparse", owner=made.host)
    setattr(pools.owner, name, make(getattr(pools.owner, name, None)))
    with pytest.raises(UsageError, match=said):
        proved(layout, pools)


def test_what_an_operator_trusts(monkeypatch):
    for said, trusted in (('{"trust_layout": true, "transport": "nixl"}', True), ('{"transport": "nixl"}', False)):
        monkeypatch.setenv("PDSTAGE_NODE", said)
        assert trusts_layout({}, where="") is trusted
    monkeypatch.setenv("PDSTAGE_NODE", '{"trust_layout": "yes"}')
    with pytest.raises(UsageError, match="trust_layout of PDSTAGE_NODE is 'yes'"):
        trusts_layout({}, where="")


def test_states_that_lie_otherwise_than_they_read_are_refused():
    """As AMX's convolution wants them: SGLang says channels first, and memory has them last."""
    made = held("hybrid")
    conv = made.pool.mamba_pool.mamba_cache.conv
    conv[0] = conv[0].clone().transpose(-1, -2).contiguous().transpose(-1, -2)
    with pytest.raises(UsageError, match="mamba of layer 1.* is not laid out as pdstage believes"):
        proved(*layout_of(made.pool))


def test_a_windows_index_keys_are_not_handed_over():
    """They are in none of the views, whatever the writer stores."""
    window = held("swa")
    layout, _ = layout_of(window.pool)
    window.pool.full_kv_pool = window.pool.swa_kv_pool = held("mla").pool
    views = [replace(view, key=view.key._replace(role="latent")) for view in layout.views() if view.key.role == "k"]
    pools = Pools(window.pool, None, None, window.pool)
    assert {probe.write for probe in probes_of(Layout.of(layout.regions, views), pools)} == {None}


def test_states_of_several_parts_that_are_not_told_move_between_equal_ranks_only():
    """Mamba 2 keeps x, B and C side by side, and SGLang does not say where they end."""
    made = held("hybrid", (2, 1))
    made.pool.mamba_pool.conv_shard_groups = None
    layout, pools = layout_of(made.pool, tp=(2, 1))
    proved(layout, pools)
    axes = [view.axis for view in layout.views() if view.key.component == "mamba"]
    assert {(axis.name, axis.total) for axis in axes} == {("rank", 2)}


def test_a_rank_of_a_later_stage_names_its_layers_as_the_model_does():
    """On both sides: decode's KVArgs do not say which layers a stage has."""
    made = Memory(setups.Setup("decode", 1, 0, 0, "mha", 16, 8, pp_size=2, pp_rank=1))
    layout, pools = layout_of(made.pool)
    assert {view.key.layer for view in layout.views()} == {1}
    proved(layout, pools)


def sparse(start=0, shares=None):
    """Two layers, from `start` on, of which those that share another's top-k may have no index keys."""
    return DSATokenToKVPool(
        448, 64, dtype=torch.bfloat16, kv_lora_rank=64, qk_rope_head_dim=16, layer_num=2, device=stubs.DEVICE,
        index_head_dim=128, kv_cache_dim=80, enable_memory_saver=False, start_layer=start, skip_topk_layers=shares,
    )  # fmt: skip


def indexed(pool, **more):
    """The layers of index keys, once they are proved."""
    layout, pools = layout_of(pool, page_size=64, is_mla=True, **more)
    proved(layout, pools)
    return sorted(view.key.layer for view in layout.views() if view.key.component == "dsa")


def test_index_keys_are_of_the_models_layers_on_every_stage():
    assert (indexed(sparse()), indexed(sparse(start=2))) == ([0, 1], [2, 3])


def test_a_draft_models_index_keys_are_proved_and_are_no_layer_of_the_model():
    assert indexed(sparse(start=2), draft=sparse()) == [2, 3, 4, 5]


def test_layers_that_share_another_ones_top_k_have_no_keys_on_either_side():
    """With HiSparse, SGLang has memory for them at decode alone."""
    assert indexed(sparse(2), config=SPARSE) == indexed(sparse(2, [True, False]), config=SPARSE) == [3]


def test_without_the_hook_nothing_starts():
    """The plugin's hook shows the pools; a loader that applies none of it gives addresses only."""
    child = Child("rank", setups.Setup("decode", 1, 0, 1))
    child.answer()
    assert "which pools it hands over" in child.call("refusal", "{}", "", False)[1]
    child.close()


def states(*kinds):
    n = len(kinds)
    return {
        "state_types": list(kinds), "state_data_ptrs": [[5 << 20]] * n, "state_data_lens": [[4096]] * n,
        "state_item_lens": [[1024]] * n, "state_layer_ids": [[0]] * n, "state_dim_per_tensor": [[]] * n,
        "state_conv_shard_groups": [[]] * n, "state_slice_outer_counts": [[]] * n,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("other", "culprit"),
    [
        (states(StateType.DSA_TAIL), "state 'dsa_tail'"),
        (states(StateType.DSA, StateType.DSA), "a second state"),
        ({"kv_data_ptrs": [1 << 20], "kv_layer_ids": [0]}, "KV buffers, K and V of each layer, is 1"),
        (states(StateType.SWA) | {"swa_kv_cache_layout": "nhd"}, "buffers with a window, K and V of each layer, is 1"),
        ({"num_draft_entries": 1}, "KV buffers, K and V of each layer, is 3"),
    ],
)
def test_memory_that_is_not_understood(other, culprit):
    args = arguments(pool_of(), page_size=16)
    vars(args).update(other)
    with pytest.raises(UsageError, match=culprit) as refused:
        memory.pool_of(args, Topology(), MODEL, is_mla=False, device=setups.KIND)
    assert refused.value.remedy


def test_two_models_dtypes_are_told_apart():
    """SGLang says "auto" of both: float16 and bfloat16 have the same length."""
    layouts = [layout_of(pool_of(dtype=dtype))[0] for dtype in (torch.bfloat16, torch.float16)]
    assert [{view.format for view in layout.views()} for layout in layouts] == [{"bfloat16"}, {"float16"}]

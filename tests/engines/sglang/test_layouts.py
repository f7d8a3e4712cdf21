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
from pdstage.kernels import Pool
from pdstage.layout import Layout, RowLevel
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


def arguments(pool, *, page_size: int, requests: object = None, owner: object = None, draft: object = None) -> KVArgs:
    """As the schedulers' `_init_kv_manager` fills them in, for one rank; `owner` hands over pages in `pool`'s place."""
    args = KVArgs()
    args.gpu_id, args.page_size, args.kv_cache_dtype_str, args.num_draft_entries = setups.GPU, page_size, "auto", 0
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = (owner or pool).get_contiguous_buf_infos()
    args.kv_layer_ids = build_kv_layer_ids(
        token_to_kv_pool=pool, draft_token_to_kv_pool=None, num_draft_entries=0, num_hidden_layers=4
    )
    setup_state_kv_args(args, pool, draft, req_to_token_pool=requests)
    args.pdstage_pools = (pool, draft, requests, owner or pool)
    return args


def held(kind: str, tp: tuple[int, int] = (1, 0), mode: str = "decode") -> Memory:
    return Memory(setups.Setup(mode, tp[0], tp[1], 0, kind, PAGE.get(kind, 16), 8))


def layout_of(
    pool, *, page_size: int = 16, tp: tuple[int, int] = (1, 0), is_mla: bool = False, owner: object = None,
    draft: object = None, config: object = PLAIN,
) -> tuple[Layout, Pools]:  # fmt: skip
    args = arguments(pool, page_size=page_size, owner=owner, draft=draft)
    place = Topology(tp_size=tp[0], tp_rank=tp[1])
    made: Pool = memory.pool_of(
        args, place, SimpleNamespace(**vars(MODEL) | {"hf_config": config}), is_mla=is_mla, device=setups.KIND
    )
    return made.layout, Pools.of(args)


def prove(pool, layout: Layout | None = None, **more: object):
    """What the manager does before it makes the node."""
    believed, pools = layout_of(pool, **more)
    return prove_layout(layout or believed, probes_of(layout or believed, pools))


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
    proof = prove(
        made.pool, page_size=made.page_size, tp=tp, is_mla=kind in ("mla", "dsa", "hisparse"), owner=made.host
    )
    assert len(proof.proved) == n_layers
    assert not proof.trusted
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) for one, other in zip(tensors, before, strict=True)
    )


def changed(layout: Layout, **of_view: object) -> Layout:
    """The layout, with every view of K and V changed in the same way."""
    views = [replace(view, **{name: make(view) for name, make in of_view.items()}) for view in layout.views()]
    return Layout.of(layout.regions, views)


WRONG = {
    "a page of half its tokens": lambda layout: changed(
        layout, tokens_per_item=lambda v: v.tokens_per_item // 2, item_stride=lambda v: v.item_stride // 2,
    ),
    "K and V swapped": lambda layout: changed(
        layout, key=lambda v: v.key._replace(role={"k": "v", "v": "k"}[v.key.role])
    ),
    "layers in another order": lambda layout: changed(layout, key=lambda v: v.key._replace(layer=1 - v.key.layer)),
    "heads outside of tokens": lambda layout: changed(
        layout, shard_stride=lambda v: v.width * v.tokens_per_item, rows=lambda v: (RowLevel(1, v.width),)
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_belief_is_refused_by_name(wrong):
    made = held("mha")
    layout, _ = layout_of(made.pool)
    with pytest.raises(UsageError, match="is not laid out as pdstage believes|that no view covers") as refused:
        prove(made.pool, wrong(layout))
    assert "MHATokenToKVPool" in str(refused.value)
    assert "kv of layer" in str(refused.value)


class Later(MHATokenToKVPool):
    """A later release's: the class is another, and nothing is known of it."""


def pool_of(kind: type = MHATokenToKVPool, dtype: torch.dtype = torch.bfloat16) -> MHATokenToKVPool:
    return kind(
        7 * 16, 16, dtype=dtype, head_num=HEADS, head_dim=32, layer_num=2, device=stubs.DEVICE,
        enable_memory_saver=False, enable_alt_stream=False,
    )  # fmt: skip


def test_a_class_that_nobody_knows_is_refused_unless_trusted(monkeypatch):
    layout, pools = layout_of(pool_of(Later))
    with pytest.raises(UsageError, match="nothing proves how attention backend Later") as refused:
        prove_layout(layout, probes_of(layout, pools))
    assert "trust_layout" in refused.value.remedy
    assert len(prove_layout(layout, probes_of(layout, pools), trust_layout=True).trusted) == 2
    monkeypatch.setenv("PDSTAGE_NODE", '{"trust_layout": true, "transport": "nixl"}')
    assert trusts_layout({}, where="")
    monkeypatch.setenv("PDSTAGE_NODE", '{"transport": "nixl"}')
    assert not trusts_layout({}, where="")
    monkeypatch.setenv("PDSTAGE_NODE", '{"trust_layout": "yes"}')
    with pytest.raises(UsageError, match="trust_layout of PDSTAGE_NODE is 'yes'"):
        trusts_layout({}, where="")


def test_hisparses_pages_in_another_order_are_refused():
    """A page of the host pool would be all layers of it; and a pool that nobody knows is none either."""
    made = held("hisparse")
    layout, pools = layout_of(made.pool, page_size=64, is_mla=True, owner=made.host)
    made.host.data_refs = made.host.data_refs[::-1]
    with pytest.raises(UsageError, match="kv of layer 0' is not laid out as .* MLATokenToKVPoolHost"):
        prove_layout(layout, probes_of(layout, pools))
    made.host.layout = "page_first"
    with pytest.raises(UsageError, match="nothing proves how attention backend MLATokenToKVPoolHost"):
        prove_layout(layout, probes_of(layout, pools))


def test_states_that_lie_otherwise_than_they_read_are_refused():
    """As AMX's convolution wants them: SGLang says channels first, and memory has them last."""
    made = held("hybrid")
    conv = made.pool.mamba_pool.mamba_cache.conv
    as_read = conv[0]
    conv[0] = as_read.clone().transpose(-1, -2).contiguous().transpose(-1, -2)
    with pytest.raises(UsageError, match="mamba of layer 1.* is not laid out as pdstage believes"):
        prove(made.pool)


def test_pages_of_which_parts_are_not_handed_over_are_refused():
    """Scales of quantized K and V, and a window's index keys, are in none of the views, whatever the writer stores."""
    made = held("mha")
    layout, pools = layout_of(made.pool)
    made.pool.quant_method = object()
    with pytest.raises(UsageError, match="nothing proves how attention backend MHATokenToKVPool"):
        prove_layout(layout, probes_of(layout, pools))
    window = held("swa")
    layout, _ = layout_of(window.pool)
    latents = held("mla").pool
    window.pool.full_kv_pool = window.pool.swa_kv_pool = latents
    views = [replace(view, key=view.key._replace(role="latent")) for view in layout.views() if view.key.role == "k"]
    pools = Pools(window.pool, None, None, window.pool)
    assert {probe.write for probe in probes_of(Layout.of(layout.regions, views), pools)} == {None}


def test_states_of_several_parts_that_are_not_told_move_between_equal_ranks_only():
    """Mamba 2 keeps x, B and C side by side, and SGLang does not say where they end."""
    of_tp = []
    for tp in ((1, 0), (2, 1)):
        made = held("hybrid", tp)
        made.pool.mamba_pool.conv_shard_groups = None
        layout, pools = layout_of(made.pool, tp=tp)
        prove_layout(layout, probes_of(layout, pools))
        of_tp.append({view.axis for view in layout.views() if view.key.component == "mamba"})
    assert {axis.name for axis in of_tp[1]} == {"rank"}
    assert {axis.total for axis in of_tp[1]} == {2}


def test_a_rank_of_a_later_stage_names_its_layers_as_the_model_does():
    """On both sides: decode's KVArgs do not say which layers a stage has."""
    made = Memory(setups.Setup("decode", 1, 0, 0, "mha", 16, 8, pp_size=2, pp_rank=1))
    layout, pools = layout_of(made.pool)
    assert {view.key.layer for view in layout.views()} == {1}
    prove_layout(layout, probes_of(layout, pools))


def sparse(start: int = 0, shares: list[bool] | None = None) -> DSATokenToKVPool:
    """Two layers, from `start` on, of which those that share another's top-k may have no index keys."""
    return DSATokenToKVPool(
        448, 64, dtype=torch.bfloat16, kv_lora_rank=64, qk_rope_head_dim=16, layer_num=2, device=stubs.DEVICE,
        index_head_dim=128, kv_cache_dim=80, enable_memory_saver=False, start_layer=start, skip_topk_layers=shares,
    )  # fmt: skip


def indexed(pool, **more: object) -> list[int]:
    """The layers of index keys, once they are proved."""
    layout, pools = layout_of(pool, page_size=64, is_mla=True, **more)
    prove_layout(layout, probes_of(layout, pools))
    return sorted(view.key.layer for view in layout.views() if view.key.component == "dsa")


def test_index_keys_are_of_the_models_layers_on_every_stage():
    assert (indexed(sparse()), indexed(sparse(start=2))) == ([0, 1], [2, 3])


def test_a_draft_models_index_keys_are_proved_and_are_no_layer_of_the_model():
    assert indexed(sparse(start=2), draft=sparse()) == [2, 3, 4, 5]


def test_layers_that_share_another_ones_top_k_have_no_keys_on_either_side():
    """With HiSparse, SGLang has memory for them at decode alone."""
    assert indexed(sparse(2), config=SPARSE) == indexed(sparse(2, [True, False]), config=SPARSE) == [3]


def test_without_the_hook_nothing_starts(installed):
    """The plugin's hook shows the pools; a loader that applies none of it gives addresses only."""
    child = Child("rank", setups.Setup("decode", 1, 0, 1))
    child.answer()
    assert "which pools it hands over" in child.call("refusal", "{}", "", False)[1]
    child.close()


def states(*kinds: StateType) -> dict[str, object]:
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

"""The demo's models: tiny configurations, and what each layer keeps of a request.

Pure data.

A layer keeps a few tensors: `[tokens, parts, *inner]` in components with pages, `[parts, *inner]` in components with
slots. Tensor-parallel ranks divide the axis of parts, in sections that are divided separately: a conv state's channels
are `[q | k | v]` or `[x | B | C]`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from pdstage.layout.topology import shard_range
from pdstage.tensors import Section

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdstage.layout.topology import Topology

N_LAYERS = 4
HEAD_DIM = 32
WINDOW = 40
FP64, FP32 = "float64", "float32"
# What a layer keeps of a tensor: every token, the last tokens, or one state of the whole sequence.
PAGES, WINDOW_PAGES, SLOT = "pages", "window", "slot"


def stage_layers(n_layers: int, place: Topology) -> range:
    """The layers of a rank's pipeline stage."""
    return range(*shard_range(n_layers, place.pp_size, place.pp_rank))


class Run(NamedTuple):
    """`n_parts` parts, from `own` on in a rank's tensor and from `whole` on in the whole tensor."""

    whole: int
    own: int
    n_parts: int


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a layer. `role` is its name within `component`, `inner` the shape of one part, `kept` what is kept
    of it.
    """

    component: str
    role: str
    sections: tuple[Section, ...]
    inner: tuple[int, ...]
    kept: str = PAGES
    dtype: str = FP64

    def runs(self, tp: tuple[int, int] = (1, 0)) -> list[Run]:
        """A rank's parts, one run per section; `tp` is its (size, rank)."""
        runs, whole, own = [], 0, 0
        for section in self.sections:
            axis, unit = section.axis(tp), section.unit()
            runs.append(Run(whole + axis.first * unit, own, axis.count * unit))
            whole += axis.total * unit
            own += axis.count * unit
        return runs

    def n_parts(self, tp: tuple[int, int] = (1, 0)) -> int:
        """The number of parts that a rank holds, over all sections."""
        return sum(run.n_parts for run in self.runs(tp))


@dataclass(frozen=True, slots=True)
class Family:
    """One model. `package` is its folder in transformers, `config` and `model` are its classes there; `settings` makes
    the configuration for a number of KV heads. `kinds` selects what of `kept` each layer keeps.
    """

    package: str
    config: str
    model: str
    settings: Callable[[int], Mapping[str, Any]]
    kinds: tuple[str, ...]
    kept: Callable[[int], Mapping[str, tuple[Field, ...]]]
    kv_heads: int = 4
    """Of the model, if no other number is asked for; 0 for one that has none."""
    cache_argument: str = "past_key_values"
    # Whether its top-k indexer leaves ties. Then the slightest change in how a prompt is computed changes the choice.
    ties: bool = False
    window: int = 0
    layers: range = field(default=range(N_LAYERS))

    @property
    def modules(self) -> tuple[str, str]:
        """transformers' modules of its configuration and of its model."""
        where = f"transformers.models.{self.package}"
        return f"{where}.configuration_{self.package}", f"{where}.modeling_{self.package}"

    def fields(self, layer: int, kv_heads: int) -> tuple[Field, ...]:
        return self.kept(kv_heads)[self.kinds[layer]]

    def components(self, kv_heads: int) -> dict[str, tuple[Field, ...]]:
        """Every component's fields; a layer that keeps a component keeps all of it."""
        fields = [field for layer in self.layers for field in dict.fromkeys(self.fields(layer, kv_heads))]
        return {
            name: tuple(f for f in dict.fromkeys(fields) if f.component == name)
            for name in sorted({f.component for f in fields})
        }

    def layers_of(self, component: str, kv_heads: int) -> tuple[int, ...]:
        return tuple(n for n in self.layers if any(f.component == component for f in self.fields(n, kv_heads)))

    def __str__(self) -> str:
        return f"{self.model}, random weights: {len(self.layers)} layers, {', '.join(dict.fromkeys(self.kinds))}"


VOCAB = 512
# Weights so large that every token depends on its whole context. With the usual 0.02, attention hardly changes the
# logits, and a corrupted page would go unnoticed.
_COMMON = {"vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": N_LAYERS, "initializer_range": 0.15}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}


def _attention(kv_heads: int) -> dict[str, Any]:
    """Two queries per KV head; transformers requires a hidden size that is a multiple of the heads."""
    heads = 2 * kv_heads
    return {
        **_COMMON,
        "hidden_size": heads * -(-128 // heads),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": False,
    }


def _gemma3(kv_heads: int) -> dict[str, Any]:
    types = ["sliding_attention", "full_attention"] * (N_LAYERS // 2)
    return {
        **_attention(kv_heads), "intermediate_size": 256, "sliding_window": WINDOW, "layer_types": types,
        "query_pre_attn_scalar": HEAD_DIM,
    }  # fmt: skip


def _gpt_oss(kv_heads: int) -> dict[str, Any]:
    return {
        **_attention(kv_heads), "intermediate_size": 64, "sliding_window": WINDOW, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip


_KEY_HEADS, _VALUE_HEADS, _STATE_DIM, _KERNEL = 4, 8, 16, 4


def _qwen3_next(kv_heads: int) -> dict[str, Any]:
    return {
        **_attention(kv_heads), **_MOE, "intermediate_size": 128, "num_experts": 4, "full_attention_interval": 2,
        "shared_expert_intermediate_size": 64, "linear_key_head_dim": _STATE_DIM, "linear_value_head_dim": _STATE_DIM,
        "linear_num_key_heads": _KEY_HEADS, "linear_num_value_heads": _VALUE_HEADS, "linear_conv_kernel_dim": _KERNEL,
    }  # fmt: skip


_SSM_HEADS = 16


def _mamba2(_: int) -> dict[str, Any]:
    return {
        **_COMMON, "num_heads": _SSM_HEADS, "head_dim": _STATE_DIM, "state_size": _STATE_DIM, "n_groups": 1,
        "conv_kernel": _KERNEL, "chunk_size": 16,
    }  # fmt: skip


LATENT, _ROPE, _INDEX = 32, 16, 32


def _deepseek_v3(_: int) -> dict[str, Any]:
    return {
        **_COMMON, **_MOE, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8,
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "kv_lora_rank": LATENT, "q_lora_rank": 48,
        "qk_rope_head_dim": _ROPE, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
    }  # fmt: skip


def _deepseek_v32(kv_heads: int) -> dict[str, Any]:
    return {**_deepseek_v3(kv_heads), "index_topk": 32, "index_head_dim": _INDEX, "index_n_heads": 4}


def _heads(component: str, kv_heads: int, kept: str = PAGES) -> tuple[Field, ...]:
    return tuple(Field(component, role, (Section("kv_head", kv_heads, 1),), (HEAD_DIM,), kept) for role in ("k", "v"))


_REPLICATED = Section("replicated", 1, 1, replicated=True)
_LATENTS = (Field("kv", "latent", (_REPLICATED,), (LATENT + _ROPE,)),)
_DELTA_NET = (
    Field(
        "mamba", "conv",
        (
            Section("q", _KEY_HEADS, _STATE_DIM),
            Section("k", _KEY_HEADS, _STATE_DIM),
            Section("v", _VALUE_HEADS, _STATE_DIM),
        ),
        (_KERNEL,), SLOT,
    ),
    Field("mamba", "ssm", (Section("head", _VALUE_HEADS, 1),), (_STATE_DIM, _STATE_DIM), SLOT, FP32),
)  # fmt: skip
_STATE_SPACE = (
    # One group: B and C belong to all heads, so every rank holds them whole beside its part of x.
    Field(
        "mamba", "conv",
        (
            Section("x", _SSM_HEADS, _STATE_DIM),
            Section("B", 1, _STATE_DIM, replicated=True),
            Section("C", 1, _STATE_DIM, replicated=True),
        ),
        (_KERNEL,), SLOT,
    ),
    Field("mamba", "ssm", (Section("head", _SSM_HEADS, 1),), (_STATE_DIM, _STATE_DIM), SLOT, FP32),
)  # fmt: skip


def _windowed(kv_heads: int) -> dict[str, tuple[Field, ...]]:
    return {"sliding window": _heads("swa", kv_heads, WINDOW_PAGES), "full attention": _heads("kv", kv_heads)}


FAMILIES = {
    "llama": Family(
        "llama", "LlamaConfig", "LlamaForCausalLM",
        lambda kv_heads: {**_attention(kv_heads), "intermediate_size": 256}, ("full attention",) * 4,
        lambda kv_heads: {"full attention": _heads("kv", kv_heads)}, kv_heads=8,
    ),
    "gemma3": Family(
        "gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", _gemma3, ("sliding window", "full attention") * 2, _windowed,
        window=WINDOW,
    ),
    "qwen3-next": Family(
        "qwen3_next", "Qwen3NextConfig", "Qwen3NextForCausalLM", _qwen3_next,
        ("linear attention", "full attention") * 2,
        lambda kv_heads: {"linear attention": _DELTA_NET, "full attention": _heads("kv", kv_heads)},
    ),
    "mamba2": Family(
        "mamba2", "Mamba2Config", "Mamba2ForCausalLM", _mamba2, ("state space",) * 4,
        lambda _: {"state space": _STATE_SPACE}, kv_heads=0, cache_argument="cache_params",
    ),
    "deepseek-v3": Family(
        "deepseek_v3", "DeepseekV3Config", "DeepseekV3ForCausalLM",
        lambda kv_heads: {**_deepseek_v3(kv_heads), "num_mtp_layers": 0}, ("latents",) * 4,
        lambda _: {"latents": _LATENTS}, kv_heads=0,
    ),
    "deepseek-v32": Family(
        "deepseek_v32", "DeepseekV32Config", "DeepseekV32ForCausalLM", _deepseek_v32, ("indexed latents",) * 4,
        lambda _: {"indexed latents": (*_LATENTS, Field("dsa", "index", (_REPLICATED,), (_INDEX,)))},
        kv_heads=0, ties=True,
    ),
    "gpt-oss": Family(
        "gpt_oss", "GptOssConfig", "GptOssForCausalLM", _gpt_oss, ("sliding window", "full attention") * 2, _windowed,
        window=WINDOW,
    ),
}  # fmt: skip

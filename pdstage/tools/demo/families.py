"""The demo's models, tiny and with random weights, and what each of their layers keeps of a request. Pure data.

A layer keeps a few tensors: `[tokens, parts, *inner]` in components with pages, `[parts, *inner]` in components with
slots. Tensor-parallel ranks divide the axis of parts, in sections that are divided separately: a conv state's channels
are `[q | k | v]` or `[x | B | C]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdstage.tensors import Section

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdstage.layout.topology import Range, Topology

N_LAYERS, HEAD_DIM, WINDOW, VOCAB = 4, 32, 40, 512
# What a layer keeps of a tensor: every token, the last tokens, or one state of the whole sequence.
PAGES, WINDOW_PAGES, SLOT = "pages", "window", "slot"


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a layer: `role` is its name within `component`, `inner` the shape of one part."""

    component: str
    role: str
    sections: tuple[Section, ...]
    inner: tuple[int, ...]
    kept: str = PAGES
    dtype: str = "float64"

    @property
    def axis(self) -> int:
        """That of the parts."""
        return 0 if self.kept == SLOT else 1

    def runs(self, place: Topology | None = None) -> list[tuple[int, int]]:
        """First part and number of parts that a rank holds of each section; without a place: all."""
        runs, whole = [], 0
        for section in self.sections:
            axis, unit = section.axis((place.tp_size, place.tp_rank) if place else (1, 0)), section.unit()
            runs.append((whole + axis.first * unit, axis.count * unit))
            whole += axis.total * unit
        return runs


@dataclass(frozen=True, slots=True)
class Family:
    """`kind` and `settings` are those of transformers' configuration. Each layer keeps the fields of `layers`."""

    kind: str
    settings: Mapping[str, Any]
    layers: tuple[tuple[Field, ...], ...]
    cache_argument: str = "past_key_values"

    def fields(self, component: str) -> tuple[Field, ...]:
        """A layer that keeps a component keeps all of it."""
        return tuple(field for field in dict.fromkeys(sum(self.layers, ())) if field.component == component)

    @property
    def components(self) -> list[str]:
        return sorted({field.component for layer in self.layers for field in layer})

    def span(self, component: str, n_tokens: int) -> Range:
        """The tokens of a whole prompt that are kept; `(0, 1)` for a slot."""
        match self.fields(component)[0].kept:
            case "slot":
                return 0, 1
            case "window":  # the next token sees itself and the window - 1 tokens before
                return max(0, n_tokens - WINDOW + 1), n_tokens
            case _:
                return 0, n_tokens


# Weights so large that every token depends on its whole context. With the usual 0.02, attention hardly changes the
# logits, and a corrupted page would go unnoticed.
_COMMON = {"vocab_size": VOCAB, "hidden_size": 128, "num_hidden_layers": N_LAYERS, "initializer_range": 0.15}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ATTENTION = {
    **_COMMON, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": HEAD_DIM, "tie_word_embeddings": False,
}  # fmt: skip
_KEY_HEADS, _VALUE_HEADS, _SSM_HEADS, _STATE, _KERNEL = 4, 8, 16, 16, 4
LATENT, _ROPE, _INDEX = 32, 16, 32
_DEEPSEEK = {
    **_COMMON, **_MOE, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "kv_lora_rank": LATENT, "q_lora_rank": 48,
    "qk_rope_head_dim": _ROPE, "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
}  # fmt: skip


def _heads(component: str, n: int, kept: str = PAGES) -> tuple[Field, ...]:
    return tuple(Field(component, role, (Section("kv_head", n, 1),), (HEAD_DIM,), kept) for role in ("k", "v"))


def _states(heads: int, *sections: Section) -> tuple[Field, ...]:
    return (
        Field("mamba", "conv", sections, (_KERNEL,), SLOT),
        Field("mamba", "ssm", (Section("head", heads, 1),), (_STATE, _STATE), SLOT, "float32"),
    )


_FULL, _SLIDING = _heads("kv", 4), _heads("swa", 4, WINDOW_PAGES)
_DELTA_NET = _states(
    _VALUE_HEADS, Section("q", _KEY_HEADS, _STATE), Section("k", _KEY_HEADS, _STATE), Section("v", _VALUE_HEADS, _STATE)
)
# One group: B and C belong to all heads, so every rank holds them whole beside its part of x.
_STATE_SPACE = _states(
    _SSM_HEADS, Section("x", _SSM_HEADS, _STATE), Section("B", 1, _STATE, replicated=True),
    Section("C", 1, _STATE, replicated=True),
)  # fmt: skip
_REPLICATED = (Section("replicated", 1, 1, replicated=True),)
_LATENTS = (Field("kv", "latent", _REPLICATED, (LATENT + _ROPE,)),)

FAMILIES = {
    "llama": Family(
        "llama",
        {**_ATTENTION, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 256},
        (_heads("kv", 8),) * N_LAYERS,
    ),
    "gemma3": Family(
        "gemma3_text",
        {
            **_ATTENTION, "intermediate_size": 256, "sliding_window": WINDOW, "query_pre_attn_scalar": HEAD_DIM,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        (_SLIDING, _FULL) * 2,
    ),
    "qwen3-next": Family(
        "qwen3_next",
        {
            **_ATTENTION, **_MOE, "intermediate_size": 128, "num_experts": 4, "full_attention_interval": 2,
            "shared_expert_intermediate_size": 64, "linear_key_head_dim": _STATE, "linear_value_head_dim": _STATE,
            "linear_num_key_heads": _KEY_HEADS, "linear_num_value_heads": _VALUE_HEADS,
            "linear_conv_kernel_dim": _KERNEL,
        },
        (_DELTA_NET, _FULL) * 2,
    ),
    "mamba2": Family(
        "mamba2",
        {
            **_COMMON, "num_heads": _SSM_HEADS, "head_dim": _STATE, "state_size": _STATE, "n_groups": 1,
            "conv_kernel": _KERNEL, "chunk_size": 16,
        },
        (_STATE_SPACE,) * N_LAYERS,
        "cache_params",
    ),
    "deepseek-v3": Family("deepseek_v3", {**_DEEPSEEK, "num_mtp_layers": 0}, (_LATENTS,) * N_LAYERS),
    "deepseek-v32": Family(
        "deepseek_v32",
        {**_DEEPSEEK, "index_topk": 32, "index_head_dim": _INDEX, "index_n_heads": 4},
        ((*_LATENTS, Field("dsa", "index", _REPLICATED, (_INDEX,))),) * N_LAYERS,
    ),
    "gpt-oss": Family(
        "gpt_oss",
        {
            **_ATTENTION, "intermediate_size": 64, "sliding_window": WINDOW, "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        (_SLIDING, _FULL) * 2,
    ),
}  # fmt: skip

"""vLLM's recurrent states as pdstage views: one page of a block is `[conv state][SSM state]...[padding]`.

Only the kind of layer says what the conv state's channels are, as in vLLM's own ssm_conv_transfer_utils.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from pdstage.arguments import quotient
from pdstage.tensors import Naming, Part, Section, mamba_conv, mamba_ssm, slot_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_cache_interface import MambaSpec

    from pdstage.layout.topology import Tp


_KINDS = MambaAttentionBackendEnum


def state_parts(cache: torch.Tensor, spec: MambaSpec, *, tp: Tp, n_groups: int | None, naming: Naming) -> list[Part]:
    """A layer's states. `n_groups` are the groups of B and C in the whole model, if known. States of unknown kinds are
    transferred whole, between equal TP sizes only.
    """
    views = SimpleNamespace(get_state_shape=lambda: spec.shapes, get_state_dtype=lambda: spec.dtypes)
    MambaBase.bind_kv_cache(views, cache.view(torch.int8))
    states = views.kv_cache
    if spec.tp_replicated:
        return [slot_states([state], role=f"state{i}", **naming) for i, state in enumerate(states)]
    sections = _sections(spec, tp[0], n_groups)
    if sections is None:
        nbytes = (state.flatten(1).view(torch.int8)[:, None, None] for state in states)
        return [
            mamba_ssm([state], total_heads=tp[0], tp=tp, role=f"share{i}.of{tp[0]}", **naming)
            for i, state in enumerate(nbytes)
        ]
    first = is_conv_state_dim_first()
    # Rows for speculation are last, and no state: a prefill leaves it in the leading rows (causal_conv1d.py). Mamba-1
    # has none.
    window = spec.shapes[0][1 if first else 0]
    if spec.mamba_type is not _KINDS.MAMBA1:
        window -= spec.num_speculative_blocks
    conv = mamba_conv(
        [states[0]], sections=sections, tp=tp, channels_last=not first, window=window, whole=True,
        role="conv" if first else "conv_sd", **naming,
    )  # fmt: skip
    heads = states[1].shape[1] * tp[0]
    cut = _pieces(heads) if spec.mamba_type is _KINDS.MAMBA1 else heads
    # vLLM's kernels for the CPU keep a gated delta net's state as [head, k, v] in a tensor [head, v, k].
    turned = spec.mamba_type is _KINDS.GDN_ATTN and cache.device.type == "cpu"
    return [conv, mamba_ssm([states[1]], total_heads=cut, tp=tp, role="ssm_kv" if turned else "ssm", **naming)]


def groups_of_states(hf_config: object) -> int | None:
    """The groups of a Mamba-2 model's B and C. vLLM gives each rank one if there are fewer than ranks."""
    names = ("mamba_n_groups", "n_groups", "mamba_ngroups")
    return next((n for name in names if isinstance(n := getattr(hf_config, name, None), int)), None)


def _sections(spec: MambaSpec, tp_size: int, n_groups: int | None) -> Sequence[Section] | None:
    """The channels of a conv state, `[x]`, `[x | B | C]` or `[Q | K | V]`; None for unknown kinds."""
    if len(spec.shapes) != 2 or len(spec.shapes[0]) != 2:
        return None
    conv, ssm = spec.shapes
    held, heads = conv[0 if is_conv_state_dim_first() else 1] * tp_size, ssm[0] * tp_size
    match spec.mamba_type:
        case _KINDS.MAMBA1:
            return [_cut("x", held)]
        case _KINDS.MAMBA2:
            x = Section("x", heads, ssm[1])
            if n_groups is not None:
                return [x, *(Section(name, n_groups, ssm[2]) for name in "bc")]
            other = quotient("the channels of B and C in a conv state", held - heads * ssm[1], 2)
            return [x, _cut("b", other), _cut("c", other)]
        case _KINDS.GDN_ATTN:
            other = quotient("the channels of Q and K in a conv state", held - heads * ssm[1], 2)
            return [_cut("q", other), _cut("k", other), Section("v", heads, ssm[1])]
    return None


def _cut(name: str, channels: int) -> Section:
    """Channels without heads, in as many pieces as any TP size may need."""
    pieces = _pieces(channels)
    return Section(name, pieces, channels // pieces)


def _pieces(channels: int) -> int:
    return math.gcd(channels, 64)

"""Tiny random models, saved as a checkpoint folder that an engine serves.

A model is sharp: weights of queries and keys are drawn large, so that attention picks few tokens, and one wrong byte of
KV changes what is generated. The weights are a function of the model's name alone.

`python -m tests.e2e.sglang.run tests.e2e.models NAME FOLDER` saves one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 512
LONGEST = 1024
"""Tokens of a sequence, prompt and answer."""

_COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LONGEST,
    "hidden_size": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
_DENSE = _COMMON | {
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
_QUERIES = ("q_proj", "k_proj")
_SHARP = 0.5
_BLUNT = 0.06
"""The deviation of MLA's queries. Prefill and decode compute MLA in two forms, equal but for their rounding; where
attention is sharp, each layer makes a difference in its input larger, and other tokens win.
"""
_REDUCED = ("o_proj", "down_proj", "out_proj", "output_linear")
"""Projections that tensor parallelism splits by their input and sums up. Each half of the output sees half of the
input, so that with two ranks each sum has one term that is not 0: their rounding is that of one rank, in bf16 too.
"""


def _llama() -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_DENSE))


def _gemma3() -> transformers.PreTrainedModel:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3TextConfig(**_DENSE, sliding_window=96, layer_types=kinds, query_pre_attn_scalar=32)
    return transformers.Gemma3ForCausalLM(config)


def _deepseek_v2() -> transformers.PreTrainedModel:
    config = transformers.DeepseekV2Config(
        **(_DENSE | {"num_key_value_heads": 8, "head_dim": 32}),
        first_k_dense_replace=6,  # no experts
        q_lora_rank=None,
        kv_lora_rank=512,  # the only one that vLLM's CPU kernel has, with 64 for the rotated part
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        rope_parameters={  # scaled, as every DeepSeek's: without, vLLM 0.32 rotates otherwise on the CPU, SGLang fails
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    return transformers.DeepseekV2ForCausalLM(config)


def _qwen3_next() -> transformers.PreTrainedModel:
    kinds = ["linear_attention", "linear_attention", "full_attention"] * 2
    config = transformers.Qwen3NextConfig(
        **_DENSE,
        layer_types=kinds,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        decoder_sparse_step=1,  # vLLM wants experts
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    )
    return transformers.Qwen3NextForCausalLM(config)


_MAMBA2 = {
    "mamba_n_heads": 16,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}


def _granite() -> transformers.PreTrainedModel:
    kinds = ["mamba", "mamba", "attention"] * 2
    config = transformers.GraniteMoeHybridConfig(
        **_DENSE, **_MAMBA2, layer_types=kinds, num_local_experts=0, shared_intermediate_size=512
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


def _falcon_h1() -> transformers.PreTrainedModel:
    return transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**_DENSE, **_MAMBA2, mamba_d_ssm=512))


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": _llama,
    "llama-twin": _llama,
    "gemma3": _gemma3,
    "deepseek-v2": _deepseek_v2,
    "qwen3-next": _qwen3_next,
    "granite": _granite,
    "falcon-h1": _falcon_h1,
}
"""What makes each, of transformers' own classes: full attention; two of three
layers with a sliding window; MLA; gated delta nets; and two hybrids with Mamba-2, in layers of its own and beside
attention in each layer.
"""


def save(name: str, folder: Path) -> Path:
    """Writes the checkpoint, fp32, and a word-level tokenizer: token 17 is the word w17. Returns the folder."""
    torch.manual_seed(sum(name.encode()))
    made = MODELS[name]().to(torch.float32)
    with torch.no_grad():
        for parameter, weight in made.named_parameters():
            draw(parameter, weight, _BLUNT if name == "deepseek-v2" and "q_proj" in parameter else _SHARP)
    made.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    made.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def draw(name: str, weight: torch.Tensor, query_std: float) -> None:
    """Draws one weight in place, queries and keys with deviation `query_std`. What is no matrix keeps what its class
    gives it: norms, decays, steps.
    """
    if "embed_tokens" in name:
        weight.normal_(std=1.0)
    elif "q_norm" in name or "k_norm" in name:
        weight.fill_(2.0)
    elif weight.ndim >= 2:
        weight.normal_(std=query_std if any(part in name for part in _QUERIES) else 0.12)
    if weight.ndim >= 2 and any(part in name for part in _REDUCED):  # of experts all in one
        half = weight.shape[-2] // 2, weight.shape[-1] // 2
        weight[..., : half[0], half[1] :] = 0
        weight[..., half[0] :, : half[1]] = 0


def _save_tokenizer(folder: Path) -> None:
    words = {f"w{n}": n for n in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(words, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    told: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "w0",
        "eos_token": "w1",
        "pad_token": "w2",
        "unk_token": "w3",
        "clean_up_tokenization_spaces": False,
        "model_max_length": LONGEST,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))

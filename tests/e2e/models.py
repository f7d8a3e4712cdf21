"""Tiny random models, saved as a checkpoint folder that an engine serves.

A model is sharp: weights of queries and keys are drawn large, so that attention picks few tokens, and one wrong byte of
KV changes what is generated. The weights are a function of the model's name alone.

`python -P tests/e2e/models.py NAME FOLDER` saves one, in a process that does not see this repository's `kernels/`, which
transformers would take for the package of that name.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
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
_SHARP = ("q_proj", "k_proj", "kv_a_proj_with_mqa", "q_a_proj", "q_b_proj")


@dataclass(frozen=True)
class Model:
    """A model to save. `make` builds it from transformers' own classes; `windows` says that layers see a sliding window,
    `states` that some keep a recurrent state.
    """

    name: str
    make: Callable[[], transformers.PreTrainedModel]
    windows: bool = False
    states: bool = False
    blocks: int = 0
    """Tokens a block where the engine allows one size only; 0 where any will do."""


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
    )
    return transformers.DeepseekV2ForCausalLM(config)


def _qwen3_next() -> transformers.PreTrainedModel:
    kinds = ["linear_attention", "linear_attention", "full_attention"] * 2
    config = transformers.Qwen3NextConfig(
        **_DENSE,
        layer_types=kinds,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        decoder_sparse_step=1,
        mlp_only_layers=list(range(6)),  # no experts
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


def _bamba() -> transformers.PreTrainedModel:
    return transformers.BambaForCausalLM(transformers.BambaConfig(**_DENSE, **_MAMBA2, attn_layer_indices=[2, 5]))


def _falcon_h1() -> transformers.PreTrainedModel:
    return transformers.FalconH1ForCausalLM(transformers.FalconH1Config(**_DENSE, **_MAMBA2, mamba_d_ssm=512))


MODELS = {
    one.name: one
    for one in (
        Model("llama", _llama),
        Model("gemma3", _gemma3, windows=True),
        Model("deepseek-v2", _deepseek_v2, blocks=16),
        Model("qwen3-next", _qwen3_next, states=True),
        Model("bamba", _bamba, states=True),
        Model("falcon-h1", _falcon_h1, states=True),
    )
}


def save(model: Model, folder: Path) -> Path:
    """Writes `model`'s checkpoint, fp32, and a word-level tokenizer: token 17 is the word w17. Returns the folder."""
    torch.manual_seed(sum(model.name.encode()))
    made = model.make().to(torch.float32)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            draw(name, weight)
    made.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    made.save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def draw(name: str, weight: torch.Tensor) -> None:
    """Draws one weight in place. What is no matrix keeps the value its class gives it: norms, decays, steps."""
    if "embed_tokens" in name:
        weight.normal_(std=1.0)
    elif weight.ndim >= 2:
        weight.normal_(std=0.5 if any(part in name for part in _SHARP) else 0.12)


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
    save(MODELS[sys.argv[1]], Path(sys.argv[2]))

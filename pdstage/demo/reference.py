"""The judge: the same model in one process, by transformers alone, with its own cache.

Layer 6 (demo). Must not know ranks, pools or transfers. The only module that imports transformers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import pdstage

# transformers looks for Hugging Face's package `kernels`. Where Python starts in this project's checkout, it would find
# the folder of that name instead, which is no package of its own: hide it.
_found = find_spec("kernels")
if _found and _found.origin and Path(_found.origin).samefile(Path(pdstage.__path__[0], "kernels", "__init__.py")):
    sys.modules["kernels"] = None  # type: ignore[assignment]

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.demo.options import ModelShape


def build_model(shape: ModelShape, seed: int) -> Any:  # noqa: ANN401  (transformers is untyped here)
    """A randomly initialised `LlamaForCausalLM`, built from a config: nothing is downloaded."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.norm_eps,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).double().eval()


@dataclass(frozen=True, slots=True)
class Truth:
    """`tokens`: the greedy continuation. `margin`: the smallest gap between the best two logits on the way."""

    tokens: list[int]
    margin: float


@torch.no_grad()
def continue_greedily(model: Any, prompt: Sequence[int], n_tokens: int) -> Truth:  # noqa: ANN401
    cache = DynamicCache()
    fed, tokens, margin = torch.tensor([list(prompt)]), [], float("inf")
    for _ in range(n_tokens):
        logits = model(input_ids=fed, past_key_values=cache, use_cache=True).logits[0, -1]
        best = logits.topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        fed = best.indices[:1][None]
    return Truth(tokens, margin)

"""The models as transformers computes them, and the expected tokens: one process with its own cache.

Only this module imports transformers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import pdstage
from pdstage.errors import UsageError
from pdstage.tools.demo import cache as caches
from pdstage.tools.demo.options import KV_DTYPES

# transformers looks for Hugging Face's package `kernels`. If Python starts in this project's checkout, it would find
# the folder of that name, which is not a package: hide it.
_found = find_spec("kernels")
if _found and _found.origin and Path(_found.origin).samefile(Path(pdstage.__path__[0], "kernels", "__init__.py")):
    sys.modules["kernels"] = None  # type: ignore[assignment]

import transformers  # noqa: E402
from transformers import DynamicCache  # noqa: E402
from transformers.utils import logging  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.tools.demo.families import Family
    from pdstage.tools.demo.options import Options

logging.set_verbosity_error()  # a default generation configuration, printed for every rank


class _KeptAs(DynamicCache):  # type: ignore[misc]
    """A cache that rounds keys and values as a pool of another dtype would."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:  # noqa: ANN401
        super().__init__(config=config)
        self._dtype = dtype

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        kept = [states.to(self._dtype).to(states.dtype) for states in (key_states, value_states)]
        return super().update(*kept, *args, **kwargs)


class Model:
    """One of transformers' models, run on one sequence. `kept_as`: the dtype of its cache, if another."""

    def __init__(
        self,
        network: Any,  # noqa: ANN401  (untyped here)
        cache_argument: str = "past_key_values",
        kept_as: torch.dtype | None = None,
    ) -> None:
        self.network = network
        self._cache_argument = cache_argument
        self._kept_as = kept_as

    def new_cache(self) -> Any:  # noqa: ANN401
        if self._kept_as is not None:
            return _KeptAs(self.network.config, self._kept_as)
        return DynamicCache(config=self.network.config)

    @torch.no_grad()
    def forward(self, tokens: Sequence[int], cache: Any) -> torch.Tensor:  # noqa: ANN401
        """Logits `[vocab]` after `tokens`, which follow those in `cache` and are added to it."""
        state = {self._cache_argument: cache}
        given = torch.tensor([list(tokens)])
        logits: torch.Tensor = self.network(input_ids=given, use_cache=True, **state).logits[0, -1]
        return logits


def build_model(options: Options) -> Model:
    """A model of random weights, the same in every process for the same options: nothing is downloaded.

    Raises `UsageError` if the installed transformers does not have it.
    """
    family = options.family
    torch.manual_seed(options.seed)
    try:
        configuration, network = map(import_module, family.modules)
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"transformers {transformers.__version__} has no {options.model}: {missing}",
            remedy="pip install -U 'pdstage[demo]'",
            field="model",
        ) from missing
    config = getattr(configuration, family.config)(**family.settings(options.heads))
    # The fast paths of experts have no kernels for float64, which rounds least: every rank's tokens are compared.
    config._experts_implementation = "eager"
    kept_as = getattr(torch, options.kept_as) if options.kept_as != KV_DTYPES[0] else None
    return Model(getattr(network, family.model)(config).double().eval(), family.cache_argument, kept_as)


@dataclass(frozen=True, slots=True)
class Truth:
    """`tokens`: the greedy continuation. `margin`: the smallest gap between the best two logits on the way."""

    tokens: list[int]
    margin: float


def true_continuation(model: Model, options: Options, prompt: Sequence[int]) -> Truth:
    """The tokens that decode must produce after `prompt`."""
    n_tokens = options.new_tokens + 1
    if options.family.ties:
        return continue_transplanted(
            model, prompt, n_tokens, family=options.family, kv_heads=options.heads,
            chunk_tokens=options.chunk_tokens,
        )  # fmt: skip
    return continue_greedily(model, prompt, n_tokens)


def continue_greedily(model: Model, prompt: Sequence[int], n_tokens: int) -> Truth:
    """Computes the whole prompt at once, then token by token."""
    cache = model.new_cache()
    return _greedily(model, model.forward(prompt, cache), cache, n_tokens)


def continue_transplanted(
    model: Model, prompt: Sequence[int], n_tokens: int, *, family: Family, kv_heads: int, chunk_tokens: int
) -> Truth:
    """Computes the prompt in chunks like the prefill ranks, then continues from a copy of that cache, written as decode
    does.

    For a model whose top-k leaves ties: the same tokens follow only from the same cache, and another way to compute the
    prompt makes another cache.
    """
    cache = model.new_cache()
    for start in range(0, len(prompt), chunk_tokens):
        logits = model.forward(prompt[start : start + chunk_tokens], cache)
    spans = {component: (0, len(prompt)) for component in family.components(kv_heads)}
    copy = model.new_cache()
    caches.write(copy, caches.read(cache, family, kv_heads, spans), len(prompt))
    return _greedily(model, logits, copy, n_tokens)


def _greedily(model: Model, logits: torch.Tensor, cache: Any, n_tokens: int) -> Truth:  # noqa: ANN401
    tokens, margin = [], float("inf")
    for at in range(n_tokens):
        best = logits.topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
        if at + 1 < n_tokens:
            logits = model.forward(tokens[-1:], cache)
    return Truth(tokens, margin)

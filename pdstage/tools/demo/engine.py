"""The model as transformers computes it, its cache as arrays by component, role and layer, and their shares.

Splitting seven models' arithmetic over ranks would take seven engines, and the demo is about the cache. So one process
runs transformers' own model, and a rank holds what a rank at its place in TP and PP would hold: its KV heads, its
layers, its channels and heads of the states, the window's pages of sliding layers, and latents and index keys like
every rank.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

import pdstage
from pdstage import Key, Topology
from pdstage.errors import PdstageError, UsageError
from pdstage.layout.topology import Range, shard_range
from pdstage.tools.demo.families import LATENT, PAGES, SLOT, Family, Field

# transformers looks for Hugging Face's package `kernels`. If Python starts in this project's checkout, it would find
# the folder of that name, which is not a package: hide it.
_found = find_spec("kernels")
if _found and _found.origin and Path(_found.origin).samefile(Path(pdstage.__path__[0], "kernels", "__init__.py")):
    sys.modules["kernels"] = None  # type: ignore[assignment]

import transformers  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from pdstage.tools.demo.options import Options

transformers.utils.logging.set_verbosity_error()  # it warns of a default generation configuration

States: TypeAlias = "dict[Key, NDArray[Any]]"
"""Arrays `[tokens, parts, *inner]` or `[parts, *inner]`, by component, role and layer."""
Spans: TypeAlias = "dict[str, Range]"
"""Tokens `[start, stop)` by component; `(0, 1)` for a slot."""

# A role's layout in a layer of the cache, for one sequence: `[tokens, heads, width]`, or `[parts, *inner]`.
_READ: dict[str, Callable[[Any], torch.Tensor]] = {
    "k": lambda layer: layer.keys[0].transpose(0, 1),
    "v": lambda layer: layer.values[0].transpose(0, 1),
    # transformers keeps a latent and its rotated key as keys and values of one head; an engine keeps them in one row.
    "latent": lambda layer: torch.cat([layer.keys[0], layer.values[0]], -1).transpose(0, 1),
    "index": lambda layer: layer.indexer_keys[0][:, None],
    "conv": lambda layer: layer.conv_states[0][0],
    "ssm": lambda layer: layer.recurrent_states[0][0],
}


class Model:
    """A model of random weights, the same for the same seed: nothing is downloaded.

    Raises `UsageError` if the installed transformers does not have it.
    """

    def __init__(self, options: Options) -> None:
        self._family = options.family
        torch.manual_seed(options.seed)
        try:
            config = AutoConfig.for_model(self._family.kind, **self._family.settings)
        except ValueError as missing:
            raise UsageError(
                f"transformers {transformers.__version__} has no {options.model}",
                remedy="pip install -U 'pdstage[demo]'",
            ) from missing
        # The fast paths of experts have no kernels for float64, which rounds least: every rank's tokens are compared.
        config._experts_implementation = "eager"
        self._network = AutoModelForCausalLM.from_config(config).double().eval()

    def new_cache(self) -> Any:  # noqa: ANN401  (transformers is untyped)
        return DynamicCache(config=self._network.config)

    @torch.no_grad()
    def forward(self, tokens: Sequence[int], cache: Any) -> int:  # noqa: ANN401
        """The token after `tokens`, which follow those in `cache` and are added to it."""
        given = {self._family.cache_argument: cache}
        return int(
            self._network(input_ids=torch.tensor([list(tokens)]), use_cache=True, **given).logits[0, -1].argmax()
        )

    def prefill(
        self,
        prompt: Sequence[int],
        cache: Any,  # noqa: ANN401
        chunk_tokens: int,
    ) -> Iterator[tuple[States, Spans, int]]:
        """Computes `prompt` chunk by chunk: the states of which tokens are there, and the next token.

        Windows and slots are ready only at its end.
        """
        family, n = self._family, len(prompt)
        for start in range(0, n, chunk_tokens):
            stop = min(start + chunk_tokens, n)
            token = self.forward(prompt[start:stop], cache)
            spans = {name: family.span(name, n) for name in family.components if stop == n}
            spans |= {name: (start, stop) for name in family.components if family.fields(name)[0].kept == PAGES}
            yield read(cache, family, spans), spans, token

    def go_on(self, cache: Any, token: int, n_tokens: int) -> list[int]:  # noqa: ANN401
        """`token` and the `n_tokens` after it."""
        tokens = [token]
        for _ in range(n_tokens):
            tokens.append(self.forward(tokens[-1:], cache))
        return tokens

    def go_on_from(self, states: States, n_prompt_tokens: int, token: int, n_tokens: int) -> list[int]:
        """The same from a new cache that holds `states`."""
        cache = self.new_cache()
        write(cache, states, n_prompt_tokens)
        return self.go_on(cache, token, n_tokens)


def read(cache: Any, family: Family, spans: Spans) -> States:  # noqa: ANN401
    """The tokens `spans` of their components, all heads and layers."""
    states = {}
    for number, (layer, fields) in enumerate(zip(cache.layers, family.layers, strict=True)):
        for field in fields:
            if field.component in spans:
                held = _READ[field.role](layer)
                if field.kept != SLOT:
                    start, stop = spans[field.component]
                    first = layer.get_seq_length() - held.shape[0]  # a sliding window has dropped earlier tokens
                    held = held[start - first : stop - first]
                states[Key(field.component, field.role, number)] = held.numpy()
    return states


def write(cache: Any, states: States, n_tokens: int) -> None:  # noqa: ANN401
    """Fills an empty cache with what was read at the end of a prompt of `n_tokens`, by the models' own methods."""
    for number, layer in enumerate(cache.layers):
        held = {key.role: torch.from_numpy(state) for key, state in states.items() if key.layer == number}
        if "latent" in held:
            latent = _as_cached(held["latent"])
            layer.update(latent[..., :LATENT].contiguous(), latent[..., LATENT:].contiguous())
        if "k" in held:
            layer.update(_as_cached(held["k"]), _as_cached(held["v"]))
            if layer.is_sliding:
                layer.cumulative_length = n_tokens
        if "index" in held:
            layer.update_indexer(held["index"][:, 0][None])
        if "conv" in held:
            layer.update_conv_state(held["conv"][None])
            layer.update_recurrent_state(held["ssm"][None])


def _as_cached(held: torch.Tensor) -> torch.Tensor:
    """`[tokens, heads, width]` as `[1, heads, tokens, width]`."""
    return held.transpose(0, 1)[None].contiguous()


def _part(states: NDArray[Any], field: Field, first: int, n: int) -> NDArray[Any]:
    return states[first : first + n] if field.axis == 0 else states[:, first : first + n]


def layers_of(family: Family, place: Topology) -> range:
    """The layers of a rank's pipeline stage."""
    return range(*shard_range(len(family.layers), place.pp_size, place.pp_rank))


def cut(states: States, family: Family, place: Topology) -> States:
    """A rank's share: its layers, and its parts of them."""
    layers, fields = layers_of(family, place), _fields(family)
    return {
        key: np.concatenate([_part(state, field, *run) for run in field.runs(place)], field.axis)
        for key, state in states.items()
        if key.layer in layers and (field := fields[key.component, key.role])
    }


def put_together(family: Family, places: Sequence[Topology], held: Sequence[States]) -> States:
    """The whole states of the ranks at `places`. Raises `PdstageError` if two ranks' copies of a part differ."""
    whole = {}
    seen = set()
    fields = _fields(family)
    for place, states in zip(places, held, strict=True):
        for key, part in states.items():
            field, own = fields[key.component, key.role], 0
            if key not in whole:
                size = [*part.shape]
                size[field.axis] = sum(n for _, n in field.runs())
                whole[key] = np.full(size, np.nan, part.dtype)
            for first, n in field.runs(place):
                here, new = _part(whole[key], field, first, n), _part(part, field, own, n)
                if (key, first) in seen and not np.array_equal(here, new):
                    raise PdstageError(f"decode ranks hold different copies of {key}", remedy="report this as a bug")
                seen.add((key, first))
                here[...] = new
                own += n
    return whole


def spoilt(states: States, family: Family, component: str, options: Options) -> States:
    """The states with noise in one of decode's pages, or the slot, of the component: noise as large as the data."""
    rng, made = np.random.default_rng(options.seed), dict(states)
    for key, state in states.items():
        if key.component == component:
            made[key] = state.copy()
            middle = len(state) // 2 if family.fields(component)[0].kept != SLOT else 0
            part = made[key][middle : middle + options.decode_page]
            part[...] = rng.normal(scale=float(state.std()), size=part.shape)
    return made


def _fields(family: Family) -> dict[tuple[str, str], Field]:
    return {(field.component, field.role): field for layer in family.layers for field in layer}

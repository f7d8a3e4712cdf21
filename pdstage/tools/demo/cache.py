"""Reads what a transformers cache holds of a request, as tensors by component, role and layer, and writes it back.

A cache is a `DynamicCache` made for its model's configuration. It is written with its own `update` methods, as the
models do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pdstage import Key
from pdstage.tools.demo.families import LATENT, SLOT

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.tools.demo.families import Family
    from pdstage.tools.demo.holding import Spans, States

# The layout of a role in a layer of the cache, for one sequence: `[tokens, heads, width]`, or `[parts, *inner]`.
_READ: dict[str, Callable[[Any], torch.Tensor]] = {
    "k": lambda layer: layer.keys[0].transpose(0, 1),
    "v": lambda layer: layer.values[0].transpose(0, 1),
    # transformers keeps a latent and its rotated key as keys and values of one head; an engine keeps them in one row.
    "latent": lambda layer: torch.cat([layer.keys[0], layer.values[0]], -1).transpose(0, 1),
    "index": lambda layer: layer.indexer_keys[0][:, None],
    "conv": lambda layer: layer.conv_states[0][0],
    "ssm": lambda layer: layer.recurrent_states[0][0],
}


def read(cache: Any, family: Family, kv_heads: int, spans: Spans) -> States:  # noqa: ANN401  (transformers is untyped)
    """The tokens `spans` of every component, all heads and layers; components that are not named are left out."""
    states: States = {}
    for number, layer in enumerate(cache.layers):
        for field in family.fields(number, kv_heads):
            if field.component not in spans:
                continue
            held = _READ[field.role](layer)
            if field.kept != SLOT:
                start, stop = spans[field.component]
                first = layer.get_seq_length() - held.shape[0]  # a sliding window has dropped earlier tokens
                held = held[start - first : stop - first]
            states[Key(field.component, field.role, number)] = held
    return states


def write(cache: Any, states: States, n_tokens: int) -> None:  # noqa: ANN401
    """Fills an empty cache with what `read` returned at the end of a prompt of `n_tokens`."""
    for number, layer in enumerate(cache.layers):
        held = {key.role: state for key, state in states.items() if key.layer == number}
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

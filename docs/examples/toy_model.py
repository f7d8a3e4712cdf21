"""The model of engine.py: attention of one token over random tables, with its K and V in an engine's pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from engine import Pages

LAYERS, HEADS, DIM, VOCABULARY = 4, 8, 32, 500
TABLES = np.random.default_rng(0).standard_normal((4, VOCABULARY, HEADS, DIM), np.float32)


def store(cache: Pages, at: Any, k: np.ndarray, v: np.ndarray) -> None:
    """The model's cache write: K and V of one token at `[layer, page, token]`, of one layer or of all."""
    cache.k[at], cache.v[at] = k, v


def forward(cache: Pages, pages: list[int], start: int, tokens: list[int]) -> None:
    """Stores K and V of `tokens`, from position `start` on, in the request's `pages`."""
    for position, token in enumerate(tokens, start):
        at = np.s_[:, pages[position // cache.page_size], position % cache.page_size]
        phase = (np.arange(LAYERS, dtype=np.float32) + position)[:, None, None]
        store(cache, at, TABLES[0, token] * np.cos(phase), TABLES[1, token] * np.sin(phase))


def next_token(cache: Pages, pages: list[int], n_tokens: int, last: int) -> int:
    """Attention of the token `last` over all `n_tokens` that are cached."""
    k, v = (one[:, pages].reshape(LAYERS, -1, HEADS, DIM)[:, :n_tokens] for one in (cache.k, cache.v))
    scores = np.exp(np.einsum("lthd,hd->lth", k, TABLES[2, last]) / DIM)
    seen = np.einsum("lth,lthd->hd", scores / scores.sum(1, keepdims=True), v)
    return int(np.argmax(np.einsum("hd,xhd->x", seen, TABLES[3])))


def alone(cache: Pages, prompt: list[int], n_new: int) -> list[int]:
    """The answer of the same model in one process, in empty pages."""
    pages, tokens = cache.free, list(prompt)
    forward(cache, pages, 0, prompt)
    for _ in range(n_new):
        tokens.append(next_token(cache, pages, len(tokens), tokens[-1]))
        forward(cache, pages, len(tokens) - 1, tokens[-1:])
    return tokens[-n_new:]

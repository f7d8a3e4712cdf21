"""What every byte of a request's KV cache must be: pure arithmetic on its tokens, that knows neither pdstage nor vLLM.

The bytes of a position depend on all tokens up to it, as attention's do, on the layer and on the KV head of the whole
model. So two requests share a prefix's bytes exactly if they share its tokens, and ranks of any size agree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

VOCABULARY = 500
_MASK = (1 << 64) - 1


def digests(tokens: Sequence[int]) -> NDArray[np.uint64]:
    """One number a position, of all tokens up to and with it."""
    found = np.empty(len(tokens), np.uint64)
    state = 0
    for at, token in enumerate(tokens):
        state = found[at] = (state * 6364136223846793005 + token + 1442695040888963407) & _MASK
        state = int(state)
    return found


def next_token(tokens: Sequence[int]):
    """What the model samples after these tokens."""
    return int(digests(tokens)[-1] >> np.uint64(33)) % VOCABULARY


def cells(digest: NDArray[np.uint64], layer, heads: Sequence[int], nbytes) -> NDArray[np.uint8]:
    """`[digest, head, nbytes]`: the bytes of each cell."""
    with np.errstate(over="ignore"):
        mixed = (
            digest[:, None, None]
            + np.uint64(layer) * np.uint64(0x9E3779B97F4A7C15)
            + np.asarray(heads, np.uint64)[None, :, None] * np.uint64(0xC2B2AE3D27D4EB4F)
            + np.arange(nbytes, dtype=np.uint64) * np.uint64(0x165667B19E3779F9)
        )
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        return ((mixed ^ (mixed >> np.uint64(32))) >> np.uint64(24)).astype(np.uint8)

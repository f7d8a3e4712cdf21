"""The definition of a chunk's checksum, for every layout, TP pair and backend.

The reference and the numpy code use it; other backends are tested against it.

The checksum of some cells is a sum modulo 2^64 over their words, so that it does not depend on the order of staging,
and the sums of several writers add up to the sum of the whole. A cell is `width` bytes at (view key, token, global
shard, segment); word j of it is its bytes [8j, 8j+8) as a little-endian integer, padded with zeros:

    place = seed(key) + token*TOKEN + shard*SHARD + segment*SEGMENT
    keyed = word ^ (fold(fold(place) * MIX) + j*WORD)
    term  = low 32 bits of keyed * high 32 bits of keyed

`fold(x)` is `x ^ x >> 32`. `token` is the absolute position of a row's first token (the index in the list, for
components without positions), so both sides of a transfer use the same. A term is one multiplication of 32 bits, as in
NH (Black, Halevi, Krawczyk, Krovetz and Rogaway, "UMAC: Fast and Secure Message Authentication", CRYPTO 1999), with
keys joined by xor, as in XXH3 (Collet, xxHash). It detects lost, late, swapped and misplaced bytes, as NH does with
random keys: one wrong chunk in 2^32 passes. It does not protect against an adversary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    UInt64s = NDArray[np.uint64]

TOKEN = 0x9E3779B97F4A7C15
SHARD = 0xC2B2AE3D27D4EB4F
SEGMENT = 0x165667B19E3779F9
WORD = 0xD6E8FEB86659FD93
MIX = 0xBF58476D1CE4E5B9
_HALF = np.uint64(32)


def fold(x: UInt64s) -> UInt64s:
    folded: UInt64s = x ^ (x >> _HALF)
    return folded


def checksum(seed: int, tokens: NDArray[np.int64], first_shard: int, cells: NDArray[np.uint8]) -> int:
    """The sum of one view's cells: `cells` is `[row, shard, segment, byte]`, `tokens[row]` each row's first token.

    Shards are numbered from `first_shard`. The result is in [0, 2^64).
    """
    _, shards, segs, width = cells.shape
    n_words = -(-width // 8)
    padded = np.zeros((*cells.shape[:3], n_words * 8), np.uint8)
    padded[..., :width] = cells
    words = padded.view("<u8").astype(np.uint64)
    place = (
        np.uint64(seed % 2**64)
        + (tokens.astype(np.uint64) * np.uint64(TOKEN))[:, None, None]
        + (np.arange(first_shard, first_shard + shards, dtype=np.uint64) * np.uint64(SHARD))[:, None]
        + np.arange(segs, dtype=np.uint64) * np.uint64(SEGMENT)
    )
    step = np.arange(n_words, dtype=np.uint64) * np.uint64(WORD)
    keyed = words ^ (fold(fold(place) * np.uint64(MIX))[..., None] + step)
    return int((keyed.astype(np.uint32) * (keyed >> _HALF)).sum(dtype=np.uint64))

"""What every byte of a room must be: a pure function of room, layer, role, token and head."""

from __future__ import annotations

import numpy as np

LAYERS, HEADS, DIM = 2, 4, 64
ROLES = "kv"
_WORDS = DIM // 8
_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1


def rows(serial: int, layer: int, role: int, tokens: range, heads: range) -> np.ndarray:
    """`[tokens, heads, DIM]` uint8 of one room's layer and role."""
    key = _mixed_int((serial * 64 + layer) * 2 + role)
    t = np.arange(tokens.start, tokens.stop, dtype=np.uint64)[:, None, None]
    h = np.arange(heads.start, heads.stop, dtype=np.uint64)[None, :, None]
    w = np.arange(_WORDS, dtype=np.uint64)[None, None, :]
    words = _mixed((t * np.uint64(HEADS) + h) * np.uint64(_WORDS) + w + np.uint64(key))
    return words.view(np.uint8)


def filler(generation: int) -> np.uint64:
    """The word that fills a page between two rooms; another for each time it is given back."""
    return np.uint64(_mixed_int(~generation & _MASK))


AUX_NBYTES = 52


def aux(serial: int) -> bytes:
    return (b"%d/" % serial + _mixed_int(serial).to_bytes(8, "little") * 8)[:AUX_NBYTES]


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: neighbouring numbers share no bytes."""
    x = x * np.uint64(_GOLDEN)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58_476D_1CE4_E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))


def _mixed_int(x: int) -> int:
    return int(_mixed(np.array([x & _MASK], np.uint64))[0])

"""An input's bytes as a supply of choices, and ways to alter what was well formed.

The same bytes make the same choices, so that an input is a finding one can keep, and a coverage-guided fuzzer that
changes bytes changes choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

NUMBERS = (
    0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 257, 512, 1024, 4095, 4096, 65535, 65536, (1 << 31) - 1, 1 << 31, 1 << 32,
    1 << 53, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -256, -(1 << 31), -(1 << 63),
)  # fmt: skip
_DEEP: list[Any] = []
for _ in range(60):
    _DEEP = [_DEEP]
VALUES = (
    *NUMBERS, float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 5e-324, 1e308, None, True, False, "", "kv", "swa",
    "x" * 300, "\0\n", "cuda", "test", "local", b"", b"i1", b"\xff" * 9, b"x" * 300, [], {}, [[]], [0] * 70, _DEEP,
)  # fmt: skip


class Draw:
    """Choices out of `data`; once it is used up, always the first one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def empty(self) -> bool:
        return self._at >= len(self._data)

    def below(self, n: int) -> int:
        size = ((n - 1).bit_length() + 7) // 8
        taken = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(taken, "little") % n if n > 1 else 0

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def chance(self, of_256: int) -> bool:
        """True for the upper part of a byte: never once the bytes are used up."""
        return self.below(256) >= 256 - of_256


def altered_bytes(data: bytes, draw: Draw) -> bytes:
    """Some bytes flipped, cut, doubled or put in."""
    held = bytearray(data)
    for _ in range(1 + draw.below(3)):
        at = draw.below(len(held) + 1)
        match draw.below(5):
            case 0 if held:
                held[at % len(held)] ^= 1 << draw.below(8)
            case 1 if held:
                held[at % len(held)] = draw.below(256)
            case 2:
                del held[at : at + 1 + draw.below(16)]
            case 3:
                held[at:at] = held[at : at + 1 + draw.below(64)]
            case _:
                held[at:at] = draw.below(1 << 32).to_bytes(4, "little")[: 1 + draw.below(4)]
    return bytes(held)


_MAX_PLACES = 1 << 14
"""Of a frame of many megabytes not every value is listed: that took gigabytes."""


def altered_msgpack(body: bytes, draw: Draw) -> bytes:
    """One to three places of a msgpack value changed; now and then its bytes instead."""
    if draw.chance(24):
        return altered_bytes(body, draw)
    try:
        tree = [msgspec.msgpack.decode(body)]
    except (msgspec.MsgspecError, ValueError, RecursionError):  # an integer as a map's key is no dict's
        return altered_bytes(body, draw)
    try:
        for _ in range(1 + draw.below(3)):
            _alter(tree, draw)
        return msgspec.msgpack.encode(tree[0] if tree else None)
    except RecursionError:  # it was deep already
        return altered_bytes(body, draw)


def bent_msgpack(body: bytes, draw: Draw) -> bytes:
    """One number, text or flag changed a little: what comes out mostly is a message still, and says what is not so."""
    tree = [msgspec.msgpack.decode(body)]
    places = [(where, key) for where, key in _places(tree) if isinstance(where[key], int | str | float)]
    where, key = places[draw.below(len(places))]
    held = where[key]
    if isinstance(held, bool):
        where[key] = not held
    elif isinstance(held, int):
        near = held + draw.pick((1, -1, 2, 3, 4, 64, 128, -128, 256, -256, 512, 1024, 4096, -4096, 1 << 32, 1 << 62))
        where[key] = min(max(near, 0), (1 << 64) - 1) if draw.chance(200) else draw.pick(NUMBERS[:16])
    elif isinstance(held, float):
        where[key] = draw.pick((5e-324, 0.1, 1.0, 1e6, 1e308))
    else:
        where[key] = draw.pick(("kv", "swa", "k", "v", "accepted", "refused", "too_big", "covered", "gone", "cpu"))
    return msgspec.msgpack.encode(tree[0])


def _alter(tree: list[Any], draw: Draw) -> None:
    places = list(islice(_places(tree), _MAX_PLACES))
    if not places:
        tree.append(draw.pick(VALUES))
        return
    where, key = places[draw.below(len(places))]
    match draw.below(8):
        case 0 if isinstance(where, list):
            del where[key]
        case 1 if isinstance(where, list):
            where.insert(key, where[key])
        case 2:
            other, at = places[draw.below(len(places))]
            where[key] = _shallow(other[at])
        case 3 | 4 if isinstance(where[key], int):
            near = int(where[key]) + draw.pick((1, -1, 2, 128, -128, 256, -256, 1 << 32))
            where[key] = min(max(near, -(1 << 63)), (1 << 64) - 1)
        case 5 if isinstance(where[key], bytes):
            where[key] = altered_bytes(where[key], draw)
        case _:
            where[key] = draw.pick(VALUES)


def _shallow(value: Any) -> Any:
    """Never part of itself: a value that is put beneath itself would have no end."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def _places(tree: Any, depth: int = 0) -> Any:
    """(container, key) of every value in it, to a depth and a number that suffice."""
    for key in range(len(tree)) if isinstance(tree, list) else list(tree)[:64]:
        if isinstance(tree, list) and key >= 64:
            return
        yield tree, key
        if isinstance(tree[key], list | dict) and depth < 12:
            yield from _places(tree[key], depth + 1)

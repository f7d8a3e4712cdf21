"""What is drawn of a case. Nothing here knows the library; tokens, items and layers are absolute numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

DIMS = ("layer", "item", "block", "row", "role", "shard", "seg")


class Role(NamedTuple):
    """One array of a component: `total` shards of `segs` runs of `width` bytes for each `tokens_per_row` tokens.

    `axis` None means that every rank holds it whole.
    """

    name: str
    axis: str | None
    total: int
    segs: int
    width: int
    tokens_per_row: int = 1


@dataclass(frozen=True)
class Logical:
    """What both sides agree on of one component."""

    name: str
    layers: tuple[int, ...]
    roles: tuple[Role, ...]
    positional: bool = True

    @property
    def tokens_per_row(self) -> int:
        return max(role.tokens_per_row for role in self.roles)


@dataclass(frozen=True)
class Stored:
    """How one side keeps a component: how its dimensions nest in memory, outermost first, and the padding after each.

    Dimensions after "role" are each role's own, so roles of different sizes lie one after the other there. Pages are of
    `page` tokens; `block` tokens of them, if not 0, are one step of the dimension "block" (a kernel's page).
    """

    page: int
    nest: tuple[str, ...]
    pads: dict[str, int] = field(default_factory=dict)
    block: int = 0
    skew: int = 0
    spare_items: int = 0
    first_token: int = 0


@dataclass(frozen=True)
class Side:
    """One engine: its ranks, the layers of each stage `[stages[i], stages[i+1])`, and how it stores each component.

    On an (axis, total) in `uneven`, rank i holds shards `[cuts[i], cuts[i + 1])`; on others an even part.
    """

    tp: int
    stages: tuple[int, ...]
    stored: dict[str, Stored]
    one_region: bool = False
    uneven: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    cp: int = 1
    parted: dict[str, int] = field(default_factory=dict)
    """Components of which each of the `cp` ranks holds a part of the tokens: blocks of so many in turn."""

    @property
    def pp(self) -> int:
        return len(self.stages) - 1


class Span(NamedTuple):
    """Tokens (or slots) `[start, stop)` of layers `[layer_start, layer_stop)` of one component."""

    component: str
    start: int
    stop: int
    layer_start: int
    layer_stop: int


@dataclass(frozen=True)
class Case:
    """One transfer. `asked` are each component's tokens, `chunks` what the prefill side gives, in order."""

    logical: tuple[Logical, ...]
    src: Side
    dst: Side
    asked: dict[str, tuple[int, int]]
    chunks: tuple[tuple[Span, ...], ...]
    path: str = "staged"
    code: str = "c++"
    limit: int = 1 << 40
    checksum: bool = False
    order: int = 0
    """Seeds what no description needs to say: which items, and in which order writers' chunks land."""

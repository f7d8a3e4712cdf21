"""A rank's place among the ranks of its engine, and which shards of an axis it holds by default."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from pdstage.arguments import integer
from pdstage.errors import UsageError

MAX_RANKS = 1 << 15
"""Per kind: so the number of a place among all four kinds has at most 60 bits."""

Range: TypeAlias = tuple[int, int]
"""Half-open: `[start, stop)`."""
Tp: TypeAlias = tuple[int, int]
"""Its size, and a rank's number in it."""


class Axis(NamedTuple):
    """One rank's part of a view's shard axis: shards `[first, first + count)` of `total`.

    `name` says what is sharded ("kv_head", "ssm_head", "conv_channel", ...). Replicated means `total == 1`.
    """

    name: str
    total: int
    first: int
    count: int  # type: ignore[assignment]  # the field's name, over tuple.count


def shard_range(total: int, tp: int, rank: int) -> Range:
    """Shards `[start, end)` of `total` that `rank` of `tp` holds. Neither number need divide the other.

    With more ranks than shards, every rank holds exactly one and replicas are consecutive ranks, as SGLang, vLLM and
    Megatron place GQA replicas.
    """
    if total < 1 or tp < 1 or not 0 <= rank < tp:
        raise UsageError(
            f"shard_range(total={total}, tp={tp}, rank={rank}) is impossible",
            remedy="give total >= 1, tp >= 1 and 0 <= rank < tp",
            total=total,
            tp=tp,
            rank=rank,
        )
    start = rank * total // tp
    return start, max(start + 1, (rank + 1) * total // tp)


def shard_axis(name: str, total: int, tp: int, rank: int) -> Axis:
    """The default `Axis` of `rank` among `tp` ranks: `shard_range` with a name."""
    start, end = shard_range(total, tp, rank)
    return Axis(name, total, start, end - start)


REPLICATED = Axis("replicated", 1, 0, 1)


@dataclass(frozen=True)
class Topology:
    """A rank's place in its engine. `tp` is the KV rank's: the attention TP under DP attention.

    `unique_rank` encodes all four places without collision. The ranks of one dp replica form the group that receives a
    room together.
    """

    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "cp", "dp"):
            size = integer(f"{name}_size", getattr(self, f"{name}_size"), low=-MAX_RANKS, high=MAX_RANKS)
            rank = integer(f"{name}_rank", getattr(self, f"{name}_rank"), low=-MAX_RANKS, high=MAX_RANKS)
            object.__setattr__(self, f"{name}_size", size)
            object.__setattr__(self, f"{name}_rank", rank)
            if size < 1 or not 0 <= rank < size:
                raise UsageError(
                    f"Topology has {name}_size={size} and {name}_rank={rank}",
                    remedy=f"give {name}_size >= 1 and 0 <= {name}_rank < {name}_size",
                )

    @property
    def unique_rank(self) -> int:
        """`dp`-major, then `pp`, `cp`, `tp`: different places have different numbers."""
        return self.dp_rank * self.group_size + self.group_rank

    @cached_property
    def group_rank(self) -> int:
        """The rank's number among the ranks of its dp replica."""
        return (self.pp_rank * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank

    @cached_property
    def group_size(self) -> int:
        """The number of ranks that serve one request together."""
        return self.pp_size * self.cp_size * self.tp_size


def places_of(rank: Topology) -> list[tuple[str, int, int]]:
    """Each kind, the outermost first: its name, the rank's place, and its size."""
    return [(kind, getattr(rank, f"{kind}_rank"), getattr(rank, f"{kind}_size")) for kind in ("dp", "pp", "cp", "tp")]

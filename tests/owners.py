"""Token ownership by its definition, token by token: the judge of everything that computes it faster."""

from __future__ import annotations

from hypothesis import strategies as st

from pdstage import Layout, TokenShard


def holds(owned: TokenShard, token: int) -> bool:
    return owned.size == 1 or token // owned.interleave % owned.size == owned.rank


def held(owned: TokenShard, n: int) -> list[int]:
    return [token for token in range(n) if holds(owned, token)]


def place_of(owned: TokenShard, n: int) -> dict[int, int]:
    """Where among its items' tokens a rank stores each token it holds."""
    return {t: place for place, t in enumerate(held(owned, n))}


def all_ranks(size: int, interleave: int) -> list[TokenShard]:
    return [TokenShard(size, rank, interleave) for rank in range(size)]


def every_way() -> list[tuple[int, int]]:
    """(size, interleave) of one side: whole, or dealt to up to 4 ranks."""
    return [(1, 0), *((size, by) for size in range(2, 5) for by in (1, 16, 64))]


def ways():
    """(size, interleave) of one side."""
    return st.tuples(st.integers(1, 4), st.sampled_from([1, 1, 2, 3, 4, 16, 64]))


def with_owned(layout: Layout, owned: TokenShard) -> Layout:
    """The same layout of a rank that holds these tokens of each component with positions."""
    names = [component.name for component in layout.components if component.positional]
    slots = [component.name for component in layout.components if not component.positional]
    return Layout.of(layout.regions, layout.views(), slots=slots, owned=dict.fromkeys(names, owned))

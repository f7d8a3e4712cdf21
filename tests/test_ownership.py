"""Numbers of common tokens, and who is dealt which, against the definition token by token."""

from __future__ import annotations

import itertools
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdstage import Topology, UsageError
from pdstage.layout import ALL_TOKENS, Layout, Region, TokenShard
from pdstage.layout.topology import shard_axis
from pdstage.plan import shares
from pdstage.plan.ownership import CommonTokens
from tests.owners import all_ranks, every_way, holds, ways, with_owned
from tests.test_plan import layout_of, view

N = 600


@pytest.mark.parametrize("src", every_way())
def test_numbers_are_those_of_the_definition(src):
    theirs = [rank for dst in every_way() for rank in all_ranks(*dst)]
    for a, b in itertools.product(all_ranks(*src), theirs):
        numbering = CommonTokens.of(a, b)
        ours = [t for t in range(N) if holds(a, t) and holds(b, t)]
        assert [numbering.count(t) for t in range(N)] == [bisect_left(ours, t) for t in range(N)]
        assert [numbering.token(n) for n in range(len(ours))] == ours
        assert numbering.whole == (len(ours) == N)


@given(ways(), ways(), st.integers(0, 200))
def test_reach_is_never_too_far(src, dst, n):
    for a, b in itertools.product(all_ranks(*src), all_ranks(*dst)):
        numbering = CommonTokens.of(a, b)
        reach = numbering.reach(n)
        if not numbering.per_period:
            assert reach == 0
            continue
        worst = max(numbering.count(at + reach) - numbering.count(at) for at in range(numbering.period))
        assert worst <= n <= reach


def test_interleaves_that_hardly_ever_meet_are_refused():
    with pytest.raises(UsageError, match=r"part 0 of 1021 \(blocks of 1\) at prefill, part 0 of 1019 \(blocks of 1\)"):
        CommonTokens.of(TokenShard(1021, 0, 1), TokenShard(1019, 0, 1))


@pytest.mark.parametrize("wrong", [(0, 0, 1), (2, 2, 1), (2, -1, 1), (2, 0, 0), (1 << 11, 0, 1), (2, 0, 1 << 21)])
def test_no_such_part(wrong):
    with pytest.raises(UsageError, match="holds tokens by blocks of"):
        TokenShard(*wrong)


def test_the_default_part_is_the_topologys():
    assert TokenShard.by(Topology(cp_size=4, cp_rank=3), 16) == TokenShard(4, 3, 16)
    assert TokenShard.by(Topology(), 16) == ALL_TOKENS


def layout(n_heads=4, tp=1, rank=0, *, layers=range(2), component="kv", tokens_per_row=1):
    axis = shard_axis("kv_head", n_heads, tp, rank)
    keys = itertools.product([component], "kv", layers)
    return layout_of(*(view(key, axis, tokens_per_row=tokens_per_row) for key in keys))


def test_a_missing_part_is_named_with_both_sides_values():
    engine = {0: with_owned(layout(), TokenShard(4, 0, 16)), 1: with_owned(layout(), TokenShard(4, 2, 16))}
    with pytest.raises(UsageError) as refused:
        shares(engine, with_owned(layout(), TokenShard(2, 1, 16)), (1, 0))
    for words in ("'kv'", "part 0 of 4 (blocks of 16), part 2 of 4", "decode holds part 1 of 2", "nobody sends part 1"):
        assert words in str(refused.value)
    assert set(shares(engine, with_owned(layout(), TokenShard(2, 0, 16)), (1, 0))) == {0, 1}, "what it needs is there"


def test_rows_of_several_tokens_are_not_cut():
    with pytest.raises(UsageError, match="a row of view .* covers 4 tokens, yet the rank holds part 0 of 2"):
        with_owned(layout(tokens_per_row=4), TokenShard(2, 0, 6))
    assert with_owned(layout(tokens_per_row=4), TokenShard(2, 0, 8))


def test_only_components_with_positions_are_cut():
    with pytest.raises(UsageError, match="has no token positions"):
        Layout.of([Region(0, 1 << 20)], layout().views(), slots=["kv"], owned={"kv": TokenShard(2, 0, 1)})


def test_replicas_of_a_part_share_its_work():
    """And holders of other tokens are no replicas of it."""
    engine = {n: with_owned(layout(1, 4, n % 4), owned) for n, owned in enumerate(all_ranks(2, 16) * 4)}
    dealt = shares(engine, layout(1), (1, 0))
    counts = [sum(len(range(*share.layers)) for share in parts) for parts in dealt.values()]
    assert sum(counts) == 2 * 4 and max(counts) <= 2


def test_of_several_partitions_the_coarsest_complete_one_serves():
    whole, half = layout(), with_owned(layout(), TokenShard(2, 0, 16))
    dealt = shares({0: half, 1: whole}, layout(), (1, 0))
    assert not dealt[0] and len(dealt[1]) == 2


def test_partitions_may_differ_from_shard_to_shard():
    """Two halves of the tokens of four heads, and a rank that holds all tokens of head 1: that is sent from there."""
    halves = {n: with_owned(layout(layers=[0]), owned) for n, owned in enumerate(all_ranks(2, 16))}
    dealt = shares(halves | {2: layout(4, 4, 1, layers=[0])}, layout(layers=[0]), (1, 0))
    sent = {n: [(s.role, h) for s in parts for h in range(s.first, s.first + s.count)] for n, parts in dealt.items()}
    assert sent[0] == sent[1] == [(role, head) for role in "kv" for head in (0, 2, 3)]
    assert sent[2] == [("k", 1), ("v", 1)]

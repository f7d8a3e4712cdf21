"""Places of ranks, and `shard_range` for every pair of sizes up to 16."""

from __future__ import annotations

import itertools

import pytest

from pdstage import UsageError
from pdstage.layout.topology import Topology, shard_range


@pytest.mark.parametrize(("total", "tp", "rank"), [(0, 1, 0), (8, 0, 0), (8, 4, 4), (8, 4, -1), (-1, 1, 0)])
def test_shard_range_refuses_nonsense(total, tp, rank):
    with pytest.raises(UsageError, match="is impossible") as caught:
        shard_range(total, tp, rank)
    assert caught.value.fields == {"total": total, "tp": tp, "rank": rank}


def test_unique_ranks_do_not_collide():
    places = [
        Topology(tp_size=3, tp_rank=tp, pp_size=2, pp_rank=pp, cp_size=4, cp_rank=cp, dp_size=2, dp_rank=dp)
        for tp, pp, cp, dp in itertools.product(range(3), range(2), range(4), range(2))
    ]
    assert sorted(one.unique_rank for one in places) == list(range(48))
    assert {one.group_size for one in places} == {24}
    assert sorted((one.dp_rank, one.group_rank) for one in places) == list(itertools.product(range(2), range(24)))


@pytest.mark.parametrize("name", ["tp", "pp", "cp", "dp"])
@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_topology_names_the_bad_place(name, size, rank):
    with pytest.raises(UsageError, match=f"{name}_size={size} and {name}_rank={rank}"):
        Topology(**{f"{name}_size": size, f"{name}_rank": rank})

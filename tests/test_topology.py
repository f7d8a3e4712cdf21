"""Places of ranks, and `shard_range` for every pair of sizes up to 16."""

from __future__ import annotations

import itertools

import pytest

from pdstage.errors import UsageError
from pdstage.layout.topology import Topology, shard_range


@pytest.mark.parametrize(("total", "tp", "rank"), [(0, 1, 0), (8, 0, 0), (8, 4, 4), (8, 4, -1), (-1, 1, 0)])
def test_shard_range_refuses_nonsense(total, tp, rank):
    with pytest.raises(UsageError, match=rf"total={total}, tp={tp}, rank={rank}\) is impossible"):
        shard_range(total, tp, rank)


def test_unique_ranks_do_not_collide():
    sizes = {"tp": 3, "pp": 2, "cp": 4, "dp": 2}
    numbers, groups = [], {}
    for ranks in itertools.product(*(range(size) for size in sizes.values())):
        place = dict(zip(sizes, ranks, strict=True))
        topology = Topology(
            **{f"{name}_size": size for name, size in sizes.items()},
            **{f"{name}_rank": rank for name, rank in place.items()},
        )
        numbers.append(topology.unique_rank)
        groups.setdefault(topology.dp_rank, []).append(topology.group_rank)
        assert topology.group_size == 24
    assert sorted(numbers) == list(range(48))
    assert all(sorted(group) == list(range(24)) for group in groups.values())


@pytest.mark.parametrize("name", ["tp", "pp", "cp", "dp"])
@pytest.mark.parametrize(("size", "rank"), [(0, 0), (2, 2), (2, -1)])
def test_topology_names_the_bad_place(name, size, rank):
    with pytest.raises(UsageError, match=f"{name}_size={size} and {name}_rank={rank}"):
        Topology(**{f"{name}_size": size, f"{name}_rank": rank})

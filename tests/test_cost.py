"""The cost model: a pure function of bytes, runs and chunks."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pdstage import UsageError
from pdstage.plan.cost import CostModel

LINEAR = CostModel.linear(bytes_per_s=4e9, descriptor_s=1e-6, post_s=10e-6)
COST = replace(
    LINEAR, bulk_bytes_per_s=8e9, gather_bytes_per_s=10e9, gather_run_s=10e-9,
    scatter_bytes_per_s=5e9, scatter_run_s=20e-9, lease_s=300e-6, chunk_s=50e-6, overlap=1.0,
)  # fmt: skip
NBYTES = 40_000_000
GATHER_S, WRITE_S, SCATTER_S = 4e-3 + 1e-3, 5e-3, 8e-3 + 2e-3  # of 100,000 runs


def test_direct_pays_for_posts_descriptors_and_bytes():
    assert COST.direct_s(NBYTES, 1000, 3) == pytest.approx(3 * 10e-6 + 1e-3 + 10e-3)


def test_between_two_lengths_a_descriptor_takes_what_lies_between():
    cost = replace(COST, descriptors=((1000, 1e-6), (2000, 5e-6), (4000, 2e-6)))
    for nbytes, seconds in ((1, 1e-6), (1000, 1e-6), (1500, 3e-6), (2000, 5e-6), (3000, 3.5e-6), (8000, 4e-6)):
        assert cost.descriptor_s(nbytes) == pytest.approx(seconds)
        assert cost.direct_s(100 * nbytes, 100, 1) == pytest.approx(10e-6 + 100 * seconds)


def test_a_length_that_is_dear_by_itself_is_staged():
    """NIXL over TCP: 64 KiB by a slower protocol than 32 KiB, so that the longer runs are the ones to stage."""
    cost = replace(COST, lease_s=0.0, chunk_s=0.0, descriptors=((1 << 15, 6e-6), (1 << 16, 24e-6), (1 << 18, 30e-6)))
    assert [cost.prefers_direct(NBYTES, NBYTES // (1 << n)) for n in (15, 16, 18)] == [True, False, True]


@pytest.mark.parametrize("n_chunks", [1, 10])
def test_where_all_stages_run_at_once_the_longest_remains(n_chunks):
    """However few chunks: those of other rooms are gathered meanwhile."""
    expected = 300e-6 + n_chunks * 50e-6 + SCATTER_S
    assert COST.staged_s(NBYTES, 100_000, n_chunks) == pytest.approx(expected)


def test_of_the_shorter_stages_a_share_hides():
    cost = replace(COST, overlap=0.4)
    assert cost.staged_s(NBYTES, 100_000) == pytest.approx(350e-6 + SCATTER_S + 0.6 * (GATHER_S + WRITE_S))


def test_the_more_and_shorter_the_runs_the_more_for_staging():
    cost = replace(COST, bulk_bytes_per_s=None)
    prefers = [cost.prefers_direct(NBYTES, NBYTES // run, 10) for run in (256, 1024, 4096, 65536, NBYTES)]
    assert prefers == sorted(prefers)
    assert (prefers[0], prefers[-1]) == (False, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [("descriptors", ()), ("descriptors", ((256, 1e-6), (256, 2e-6))), ("descriptors", ((0, 1e-6),)),
     ("descriptors", ((256, float("nan")),)), ("bulk_bytes_per_s", 0.0), ("gather_bytes_per_s", -1.0),
     ("post_s", -1e-9), ("overlap", 1.5), ("lease_s", float("nan")), ("chunk_s", float("inf"))],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused_by_name(field, value):
    with pytest.raises(UsageError, match=field) as caught:
        replace(COST, **{field: value})
    assert caught.value.fields["field"] == field


def test_bytes_computed_in_turn_go_in_as_many_pieces_as_pay():
    """What is left when the last are computed, and what the pieces cost, are least together."""
    cost = replace(COST, overlap=0.0)

    def left_s(n: int) -> float:
        return (cost.staged_s(NBYTES, 0) - cost.lease_s - cost.chunk_s) / n + n * cost.chunk_s

    n = cost.pieces(NBYTES)
    assert n > 1
    assert left_s(n) <= 1.02 * min(left_s(other) for other in range(1, 1000))
    assert [cost.pieces(nbytes) for nbytes in (0, 1, 10_000)] == [1, 1, 1], "no crumbs"
    assert replace(COST, chunk_s=0.0).pieces(NBYTES) == 1


def test_the_best_piece_is_no_worse_than_half_or_twice_as_long():
    """A pipeline's time in whole pieces: the slowest stage of all bytes, the others of one piece, and each its cost."""

    def took_s(piece: int) -> float:
        *others, slowest = sorted(COST._stages_s(NBYTES, 0))
        return slowest + sum(others) * piece / NBYTES + COST.chunk_s * NBYTES / piece

    assert COST.piece_nbytes(1000) == 1000, "no crumbs"
    best = COST.piece_nbytes(NBYTES)
    assert took_s(best) < min(took_s(best // 2), took_s(2 * best), took_s(NBYTES))

"""Spans are found in regions as a plain search would find them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdstage.errors import UsageError
from pdstage.layout import Region
from pdstage.transport.base import Ranges


@st.composite
def disjoint_regions(draw) -> list[Region]:
    edges = draw(st.lists(st.integers(1, 400), min_size=2, max_size=12, unique=True).map(sorted))
    regions = [
        Region(low, high - low, draw(st.sampled_from(["cpu", "cpu", "cuda"])), draw(st.integers(0, 2)))
        for low, high in pairwise(edges)
        if draw(st.booleans())
    ]
    return draw(st.permutations(regions))


@given(disjoint_regions(), st.lists(st.tuples(st.integers(-2, 410), st.integers(1, 60)), min_size=1, max_size=8))
def test_find_equals_a_plain_search(regions, spans):
    homes = [[r for r in regions if r.base <= at and at + n <= r.base + r.nbytes] for at, n in spans]
    at, nbytes = np.array(spans, np.int64).T
    ranges = Ranges("these", regions)
    allowed = all(homes) and len({home[0].kind for home in homes}) == 1
    if not allowed:
        with pytest.raises(UsageError):
            ranges.find(at.copy(), nbytes.copy())
        return
    place = ranges.find(at.copy(), nbytes.copy())
    assert place.kind == homes[0][0].kind
    assert np.broadcast_to(place.device, len(spans)).tolist() == [home[0].device for home in homes]
    assert all(ranges.holds(*span) for span in spans)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("span", [(1 << 63) - 8, -(1 << 63), 0, 1 << 62])
@pytest.mark.parametrize("nbytes", [1, (1 << 63) - 1])
def test_no_sum_wraps_around(n, span, nbytes):
    ranges = Ranges("these", [Region(4096, 4096), Region(1 << 40, 4096)])
    with pytest.raises(UsageError):
        ranges.find(np.full(n, span, np.int64), np.full(n, nbytes, np.int64))


def test_add_and_take_away():
    one, other = Region(4096, 64), Region(4160, 64)
    both = Ranges("these", [other]).with_regions([one, one])
    assert both.regions == (one, other)
    assert not both.holds(4150, 20)  # neighbours are not one region
    assert both.without([one]).regions == (other,)
    with pytest.raises(UsageError, match="not registered"):
        both.without([Region(4096, 63)])
    with pytest.raises(UsageError, match="overlaps"):
        both.with_regions([Region(4100, 4)])

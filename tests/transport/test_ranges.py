"""Spans are found in regions as a plain search would find them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdstage import Region, UsageError
from pdstage.transport.base import Ranges


@st.composite
def disjoint_regions(draw):
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

"""The checksum: its definition again, slowly; other backends are held to the reference."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from pools import cells, transfers
from rigs import REFERENCE, SUM_BEFORE, outcome

from pdstage.kernels.checksum import MIX, SEGMENT, SHARD, TOKEN, WORD
from pdstage.plan import TOKEN_MAJOR
from pdstage.plan.tables import Table
from tests.rows import drawn

MASK = 2**64 - 1


def fold(x):
    return x ^ x >> 32


def slow_sum(seed, token, shard, segment, cell):
    """One cell's terms, as the module's docstring has them."""
    place = (seed + token * TOKEN + shard * SHARD + segment * SEGMENT) & MASK
    key = fold(fold(place) * MIX & MASK)
    words = (int.from_bytes(cell[at : at + 8], "little") for at in range(0, len(cell), 8))
    keyed = (word ^ key + j * WORD & MASK for j, word in enumerate(words))
    return sum((one & 2**32 - 1) * (one >> 32) for one in keyed) & MASK


def slow_sum_of(held, select, index, tokens):
    """Everything that a call on `held` moves, cell by cell."""
    total = 0
    for chosen, row in zip(sorted(select), Table.of(held.layout, select).rows, strict=True):
        view, entry = held.layout.by_key()[chosen.key], index[chosen.key.component]
        start, stop = tokens[chosen.key.component]
        per, shards = view.tokens_per_row, range(chosen.start, chosen.start + chosen.count)
        if start == stop:
            continue
        names = itertools.product(range(start // per * per, stop, per), shards, range(view.segs))
        places = cells(held, chosen, entry, entry.keep, (start, stop))
        for (token, shard, seg), (region, at) in zip(names, places, strict=True):
            cell = bytes(held.memory[region][at : at + view.width])
            total += slow_sum(row.seed, token, view.axis.first + shard, seg, cell)
    return total & MASK


@settings(max_examples=drawn(20, full=60))
@given(transfer=transfers().filter(lambda t: t.checksum))
def test_the_reference_sums_what_the_definition_says(transfer):
    t = transfer
    want = (SUM_BEFORE + slow_sum_of(t.src, t.src_select, t.src_index, t.tokens)) & MASK
    found = outcome(REFERENCE, t)
    assert found["gather: checksum"].view(np.uint64)[0] == want
    if t.wire == TOKEN_MAJOR:  # where page sizes differ, head-major staging means something else on either side
        assert found["scatter: checksum"].view(np.uint64)[0] == want

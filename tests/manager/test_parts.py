"""Context parallelism between nodes: ranks that hold parts of the tokens, and every destination byte looked at."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pdstage import Items, State, TokenShard
from tests.manager.engine import LAYERS, Rank, drive, truth
from tests.owners import items_for, place_of

TOKENS = {0: 50, 1: 1, 2: 133}
"""Of each room."""
PREFIX = {0: 0, 1: 0, 2: 29}
STEP = 48
# Of both sides: CP ranks by blocks of so many tokens, 0 for contiguous; TP; page; heads first.
CASES = {
    "CP 2 x TP 2, blocks of 1 -> TP 4": ((2, 1, 2, 4, False), (1, 0, 4, 16, True)),
    "CP 2 x TP 2, contiguous -> TP 4": ((2, 0, 2, 8, False), (1, 0, 4, 4, False)),
    "TP 4 -> DCP 2 x TP 2, blocks of 16": ((1, 0, 4, 8, True), (2, 16, 2, 16, False)),
    "CP 4, contiguous -> DCP 2 x TP 2, blocks of 16": ((4, 0, 1, 4, False), (2, 16, 2, 16, False)),
}


def ranks(cp, block, tp, page, hnd):
    for part, rank in product(range(cp), range(tp)):
        yield Rank(tp, rank, page=page, n_pages=96, hnd=hnd, owned=TokenShard(cp, part, block))


def items_of(rank: Rank, room: int, since: int = 0) -> Items:
    """The room's pages: none is another room's."""
    numbers = np.random.default_rng(rank.owned.rank).permutation(rank.n_pages)[32 * room : 32 * room + 34]
    return Items(*items_for(rank.owned, TOKENS[room], rank.page, numbers[:32] if room < 2 else numbers, since))


def fill(rank: Rank, room: int, items: Items, since: int = 0) -> None:
    """The room's truth for every token that the rank holds from `since` on."""
    places = place_of(rank.owned, TOKENS[room])
    for layer, (role, tensors) in product(range(LAYERS), (("k", rank.k), ("v", rank.v))):
        values = truth(room, layer, role, TOKENS[room], rank.heads)
        for token, place in places.items():
            if token >= since:
                page, t = divmod(place - items.first_token, rank.page)
                rank._row(tensors[layer], items.pages[page], t)[:] = values[token]


@pytest.mark.parametrize("path", ["staged", "direct"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_hold_parts_of_the_tokens(site, case, path):
    """I5: each room ends well at every rank, and no byte is missing, wrong or where none belongs."""
    (src, dst), truthful = (list(ranks(*side)) for side in CASES[case]), list(ranks(*CASES[case][1]))
    ps, ds = [site.prefill(rank, path=path) for rank in src], [site.decode(rank, path=path) for rank in dst]
    handles = []
    for room, n in TOKENS.items():
        for rank, node in zip(src, ps, strict=True):
            items = items_of(rank, room)
            fill(rank, room, items)
            handles.append(node.send(room))
            low, high = rank.owned.part_of(n) if rank.owned.contiguous else (0, n)
            for start in range(low, high, STEP):
                handles[-1].chunk({"kv": items}, {"kv": (start, min(high, start + STEP))})
            handles[-1].finish()
        for rank, node, twin in zip(dst, ds, truthful, strict=True):
            items = items_of(rank, room, PREFIX[room])
            fill(twin, room, items, PREFIX[room])
            handles.append(node.receive(room, site.address))
            handles[-1].bind({"kv": items}, {"kv": (PREFIX[room], n)})
    drive(site.nodes, lambda: all(handle.released for handle in handles))
    assert {handle.wait(0) for handle in handles} == {State.SUCCESS}
    for rank, twin in zip(dst, truthful, strict=True):
        for got, want in zip((*rank.k, *rank.v), (*twin.k, *twin.v), strict=True):
            np.testing.assert_array_equal(got, want)

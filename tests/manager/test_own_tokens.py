"""What an engine names on a rank that holds parts of the tokens: items by its own tokens, ranges by the sequence's."""

from __future__ import annotations

import pytest

from pdstage import Items, TokenShard, UsageError
from pdstage.manager.items import check
from tests.manager.engine import Rank

INTERLEAVED = TokenShard(2, 1, 2)


def checked(owned, items, tokens, *, destination=False):
    return check(Rank(owned=owned).pool.layout, {"kv": items}, tokens and {"kv": tokens}, unique=destination)["kv"]


@pytest.mark.parametrize("destination", [True, False])
def test_items_of_interleaved_tokens_count_the_ranks_own(destination):
    """Rank 1 of 2 by blocks of two holds 2, 3, 6, 7, ...: tokens 8..24 are its own 4..12, the second and third page."""
    one = checked(INTERLEAVED, Items([5, 6], 4), (8, 24), destination=destination)
    assert (one.start, one.stop, one.index.first_token) == (8, 24, 4)
    checked(INTERLEAVED, Items([5, 6], 4), (9, 26), destination=destination)
    for tokens in ((7, 24), (8, 27)):
        with pytest.raises(UsageError, match=r"part 1 of 2 \(blocks of 2\).*not in items that cover 4\.\.12"):
            checked(INTERLEAVED, Items([5, 6], 4), tokens, destination=destination)
    with pytest.raises(UsageError, match="inside an item"):
        checked(INTERLEAVED, Items([5, 6], 2), (8, 12), destination=destination)


def test_a_range_without_an_own_token_needs_no_items():
    for tokens in ((4, 6), (0, 2), (3, 3), None):
        checked(INTERLEAVED, [], tokens)
    with pytest.raises(UsageError):
        checked(INTERLEAVED, [], (4, 7))


def test_without_a_range_the_items_say_which_tokens():
    one = checked(INTERLEAVED, Items([5, 6], 4), None, destination=True)
    assert (one.start, one.stop) == (10, 24)

"""A short, seeded part of `make chaos`, and the proof that its checks can fail."""

from __future__ import annotations

import pytest

from tests.chaos import network
from tests.chaos.memory import Pages
from tests.chaos.plan import KINDS, draw_site
from tests.chaos.round import Round
from tests.rows import usable

TRANSPORTS = usable("local", "nixl", "mooncake")
SEED, SECONDS = 20, 6.0


@pytest.mark.full  # .ci/run drives longer rounds by `make chaos`
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_killed_stopped_and_cut_off_while_rooms_flow(transport):
    """I1, I2, I5, I6, I8, I10, I14: no wrong byte, no room that hangs, nothing left behind."""
    site = draw_site(SEED, 0, transport, SECONDS, namespaces=network.permitted())
    one = Round(SEED, 0, site, SECONDS).run()
    assert not one.wrong, "\n".join(one.wrong)
    # How many there are in these seconds is the machine's affair; without any, nothing was tried.
    assert one.counts.keys() & KINDS.keys()
    assert one.counts["rooms succeeded"]
    assert one.counts["judged: writes held against both ends"]


def test_a_write_into_a_page_of_nobody_or_of_another_room_is_seen():
    """The negative control: what a writer does that was not told that its room has failed."""
    pages = Pages(1, 0, page=8, n_pages=4, hnd=True)
    for known in (lambda page: pages.give_back([page]), lambda page: pages.delivered(1, [page], 0, 8)):
        (page,) = pages.allocate(8)
        pages.lend([page])
        assert not pages.sweep(), "a room may write it now"
        known(page)
        assert not pages.sweep()
        pages._mem[0, 0, page, 0, 0, 0] ^= 1
        assert "1 bytes of page" in pages.sweep()[0]

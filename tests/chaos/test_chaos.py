"""A short, seeded part of `make chaos`, and the proof that its checks can fail."""

from __future__ import annotations

import pytest

from tests.chaos import network
from tests.chaos.__main__ import drive
from tests.chaos.control import stopped_writer
from tests.chaos.plan import draw_faults, draw_site
from tests.chaos.round import Round
from tests.rows import rows, usable

TRANSPORTS = usable("local", "nixl", "mooncake")
SEED, SECONDS = 20, 6.0


@pytest.mark.full  # .ci/run drives longer rounds by `make chaos`
def test_ranks_killed_stopped_and_cut_off_while_rooms_flow():
    """I1, I2, I5, I6, I8, I10, I14: no wrong byte, no room that hangs, nothing left behind."""
    namespaces = network.permitted()
    sites = [draw_site(SEED, number, name, SECONDS, namespaces=namespaces) for number, name in enumerate(TRANSPORTS)]
    tally = drive((Round(SEED, number, site, SECONDS) for number, site in enumerate(sites)), parallel=2)
    assert not tally.wrong, "\n".join(f"round {number}: {what}" for number, what in tally.wrong)
    # How many there are in these seconds is the machine's affair; without any, nothing was tried.
    assert tally.n_signals
    assert tally.counts["rooms succeeded"]


@pytest.mark.parametrize("transport", rows(TRANSPORTS, full={"nixl", "mooncake"}))
def test_pages_stay_reserved_while_a_stopped_writer_may_go_on(transport):
    """I2: released only once the writer is proved dead or quiet."""
    seen = stopped_writer(transport, sabotage=False)
    assert not seen.wrong
    assert not seen.released_early
    assert seen.released_at_death


def test_an_engine_that_reuses_pages_too_early_is_seen():
    """The negative control: the same stopped writer, its bytes seen in pages of others."""
    assert stopped_writer("local", sabotage=True).wrong


def test_a_round_is_drawn_from_its_seed_alone():
    one, other = (draw_site(7, 3, "both", SECONDS, namespaces=True) for _ in range(2))
    assert one == other
    assert draw_faults(7, 3, one, 10.0) == draw_faults(7, 3, other, 10.0) != draw_faults(8, 3, one, 10.0)

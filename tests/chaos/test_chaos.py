"""A short, seeded part of `make chaos`, and the proof that its checks can fail."""

from __future__ import annotations

import pytest

from tests.chaos import network
from tests.chaos.control import stopped_writer
from tests.chaos.plan import KINDS, small
from tests.chaos.round import Round
from tests.rows import rows, usable

TRANSPORTS = usable("local", "nixl", "mooncake")
SEED, SECONDS = 20, 6.0


@pytest.mark.full  # .ci/run drives longer rounds by `make chaos`
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_killed_stopped_and_cut_off_while_rooms_flow(transport):
    """I1, I2, I5, I6, I8, I10, I14: no wrong byte, no room that hangs, nothing left behind."""
    site = small(SEED, 0, transport, SECONDS, namespaces=network.permitted())
    one = Round(SEED, 0, site, SECONDS).run()
    assert not one.wrong, "\n".join(one.wrong)
    # How many there are in these seconds is the machine's affair; without any, nothing was tried.
    assert one.counts.keys() & KINDS.keys()
    assert one.counts["rooms succeeded"]
    assert one.counts["judged: chunks seen at both ends"]


@pytest.mark.parametrize("transport", rows(TRANSPORTS, full={"nixl", "mooncake"}))
def test_pages_stay_reserved_while_a_stopped_writer_may_go_on(tmp_path, transport):
    """I2: released only once the writer is proved dead or quiet."""
    seen = stopped_writer(tmp_path, transport, sabotage=False)
    assert not seen.wrong
    assert not seen.released_early
    assert seen.released_at_death


def test_an_engine_that_reuses_pages_too_early_is_seen(tmp_path):
    """The negative control: the same stopped writer, its bytes seen in pages of others."""
    assert stopped_writer(tmp_path, "local", sabotage=True).wrong

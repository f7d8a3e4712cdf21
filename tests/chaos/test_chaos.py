"""A short, seeded part of `make chaos`, and the proof that its checks can fail."""

from __future__ import annotations

import shutil

import pytest

from tests.chaos import network
from tests.chaos.__main__ import drive
from tests.chaos.control import stopped_writer
from tests.chaos.plan import draw_faults, draw_site
from tests.chaos.round import Round
from tests.judge.runs import run, written
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
    assert tally.counts["judged: writes seen at both ends"]


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


def test_what_the_ranks_wrote_down_is_judged(tmp_path):
    """A round without a journal is wrong, as one is whose journal is: here of a room that left Success."""
    site = draw_site(SEED, 0, "local", SECONDS, namespaces=False)
    nothing, bad = Round(SEED, 0, site, 0.0), Round(SEED, 1, site, 0.0)
    run(bad._journals, rooms=4)
    decode = written(bad._journals)["decode 0"]
    decode.lines[decode.find(what="room", after="SUCCESS")].after = "TRANSFERRING"
    decode.put(bad._journals)
    for one in (nothing, bad):
        one.end()
        shutil.rmtree(one._folder)
    assert nothing.wrong[0] == "the ranks wrote nothing down that could be judged"
    assert nothing.counts["judged: moves"] == 0
    assert bad.wrong[0].startswith("judged: ")
    assert bad.counts["judged: moves"] > 0


def test_a_round_is_drawn_from_its_seed_alone():
    one, other = (draw_site(7, 3, "both", SECONDS, namespaces=True) for _ in range(2))
    assert one == other
    assert draw_faults(7, 3, one, 10.0) == draw_faults(7, 3, other, 10.0) != draw_faults(8, 3, one, 10.0)

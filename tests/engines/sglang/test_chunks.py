"""When prefill's pages are read: not before they are written. SGLang says so by an event, by a result, or not at all.

SGLang's own methods send the chunks here. A page that is read too early has what the test writes before it computes it.
"""

from __future__ import annotations

import pytest

from tests.engines.sglang.fleet import SUCCESS, TOKENS, TRANSFERRING, WAITING, Fleet

LOOKS = 50
OVERLAP, STAGES, IN_TURN = (1, ()), (2, ()), (1, ("--disable-overlap-schedule",))


def fleet_of(kind):
    stages, options = kind
    return Fleet(1, 1, prefill_pp=stages, options=options)


def goes_on(fleet, room, stop):
    """The step that writes tokens up to `stop` is over only now; then the rest."""
    assert {fleet.prefill.poll(room) for _ in range(LOOKS)} <= {WAITING, TRANSFERRING}
    fleet.prefill.each("compute", room, 0, stop)
    fleet.prefill.each("end", "step")
    fleet.rest(room, stop)
    fleet.forgets_all()


@pytest.mark.parametrize("kind", [STAGES, IN_TURN], ids=["stages", "in turn"])
def test_a_chunk_is_read_when_the_step_that_computes_it_is_over(kind):
    """Without overlap SGLang sends a chunk when it has launched it."""
    with fleet_of(kind) as fleet:
        fleet.open(1)
        fleet.prefill.each("launch", "forward_stream", "step")
        fleet.prefill.each("chunked", 1, TOKENS, 64)
        goes_on(fleet, 1, 64)


@pytest.fixture(scope="module")
def fleet():
    with fleet_of(OVERLAP) as made:
        yield made


def test_a_chunk_whose_result_is_in_does_not_wait_for_the_next_step(fleet):
    """With overlap SGLang sends a chunk when its result is there. The next step goes on."""
    fleet.open(2)
    fleet.prefill.each("compute", 2, 0, 64)
    fleet.prefill.each("launch", "forward_stream", "next step")
    fleet.prefill.each("chunked", 2, TOKENS, 64)
    fleet.compute(2, 64)
    assert fleet.decode.until(2, SUCCESS) == SUCCESS
    fleet.prefill.each("end", "next step")
    fleet.finish(2)


def test_a_cached_prefix_is_read_when_the_step_before_is_over(fleet):
    """Which may still write it."""
    fleet.open(3)
    fleet.prefill.each("launch", "forward_stream", "step")
    assert fleet.prefill.each("cached", 3, TOKENS, 48) == [48]
    goes_on(fleet, 3, 48)

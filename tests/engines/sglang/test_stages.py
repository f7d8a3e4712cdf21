"""Prefill with pipeline stages: until a request begins, SGLang asks the ranks of the first stage alone.

It takes the least of what all stages have said by then. So a stage says what became of a room when it happens: nobody
polls it.
"""

from __future__ import annotations

import pytest

from tests.engines.sglang.fleet import FAILED, SUCCESS, WAITING, eventually, shared_fleet

fleet = shared_fleet(1, 1, prefill_pp=2)


def waits(fleet):
    """A room that has not begun."""
    fleet.announce(8)
    fleet.bind(8)
    fleet.prefill.bootstrapped(8, WAITING)


def fails(fleet, room=8):
    fleet.prefill.each("failure", room)
    fleet.fails_at_decode(room)


def test_a_room_that_decode_gives_up_fails_before_it_begins(fleet):
    """The first stage learns of it though the second is never polled."""
    waits(fleet)
    fleet.decode.each("abort", 8)
    eventually(lambda: all(fleet.prefill.each("given_up", 8)))
    assert fleet.prefill.bootstrapped(8, FAILED) == FAILED
    fails(fleet)
    fleet.run(8)


def test_a_stage_that_fails_alone_fails_the_room(fleet):
    """The second stage's memory goes away: SGLang takes it at the first, and no request waits for ever."""
    waits(fleet)
    fleet.prefill.ranks[1].call("sleep")
    assert fleet.prefill.bootstrapped(8, FAILED) == FAILED
    fails(fleet)
    fleet.prefill.ranks[1].call("wake")
    fleet.run(8)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_fails_in_transfer_fails_the_room(fleet, stage):
    """No stage waits for ever for the others, and none of them frees a page that is read."""
    room = 12 + stage
    fleet.open(room)
    fleet.first_chunk(room)
    fleet.prefill.ranks[stage].call("sleep")
    fleet.compute(room, 64)
    for rank in fleet.prefill.ranks:
        assert eventually(lambda rank=rank: rank.call("poll", room), lambda state: state in (FAILED, SUCCESS)) == FAILED
    fails(fleet, room)
    fleet.prefill.ranks[stage].call("wake")
    fleet.run(room)


def test_what_a_stage_hears_after_the_end_is_told_to_nobody(fleet):
    """A status under the number of a room that is over would be another request's."""
    fleet.open(11)
    fleet.compute(11)
    assert fleet.decode.until(11, FAILED, SUCCESS) == SUCCESS
    assert fleet.prefill.until(11, FAILED, SUCCESS) == SUCCESS
    assert all(fleet.prefill.each("clear_and_hear_late", 11))
    fleet.decode.each("clear", 11)

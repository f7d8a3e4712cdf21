"""When SGLang is told that a request is over: not before its memory is safe, whatever happened to it and its name."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from sglang.srt.disaggregation.common.conn import CommonKVReceiver

from pdstage.integrations.sglang.plugin import polled
from pdstage.integrations.sglang.receiver import PdStageKVReceiver
from pdstage.integrations.sglang.sender import PdStageKVSender
from pdstage.protocol.state import State
from tests.engines.sglang.fleet import (
    BOOTSTRAPPING,
    DIRECT,
    FAILED,
    SUCCESS,
    TOKENS,
    TRANSFERRING,
    WAITING,
    eventually,
    shared_fleet,
)

LOOKS = 50


fleet = shared_fleet(1, 1, "hybrid", DIRECT)


def send_part(fleet, room):
    fleet.open(room)
    fleet.first_chunk(room)


def test_success_waits_until_the_memory_is_released(fleet):
    """At both sides: SGLang gives a request's pages to others as soon as it hears of its success."""
    fleet.open(1)
    fleet.compute(1)
    for engine in fleet.engines:
        engine.each("withhold", 1)
    for engine in fleet.engines:
        assert {engine.poll(1) for _ in range(LOOKS)} <= {WAITING, TRANSFERRING}
        engine.each("release_withheld", 1)
    assert fleet.prefill.until(1, SUCCESS, FAILED) == SUCCESS
    assert fleet.prefill.each("latency", 1) != [None], "its duration is told"
    fleet.finish(1)


def test_a_room_given_up_between_chunks_leaves_its_pages_at_once(fleet):
    """SGLang frees them when `abort` returns. What a write that still reads them brings is in memory that decode holds,
    for a room that cannot succeed, since its last chunk was never given.
    """
    fleet.prefill.each("hold_writes")
    send_part(fleet, 5)
    fleet.prefill.each("refuse_to_wait")
    assert fleet.prefill.each("errors_of", "abort", 5) == [[]]
    assert not any(fleet.prefill.each("released", 5))
    fleet.prefill.each("fill", 5, TOKENS, 7)
    assert fleet.decode.until(5, FAILED, SUCCESS) == FAILED
    fleet.prefill.each("let_go")
    fleet.fails_at_prefill(5)
    fleet.fails_at_decode(5)


def sender_of(state, room):
    """One rank's, whose last chunk was sent."""
    one = object.__new__(PdStageKVSender)
    one.kv_mgr = SimpleNamespace(status_lock=nullcontext(), failure_records={})
    one.bootstrap_room, one.conclude_state, one._room = 21, state, room
    one._node = SimpleNamespace(driver=SimpleNamespace(closed=False, failure=None))
    one._is_whole, one._is_given_up, one._is_cleared, one._transfer_start_time = True, False, False, 1.0
    return one


def test_ranks_that_are_done_or_have_nothing_to_send_fail_with_the_others():
    """The second rank's writes are over, and the third is a context-parallel rank that sends nothing: both said Success
    before the first rank failed. No rank says Failed while the fourth's pages are read.
    """
    read = SimpleNamespace(state=State.FAILED, released=False)
    rooms = [SimpleNamespace(state=state, released=True) for state in (State.FAILED, State.SUCCESS)]
    ranks = [sender_of(FAILED, rooms[0]), sender_of(SUCCESS, rooms[1]), sender_of(SUCCESS, None)]
    ranks.append(sender_of(SUCCESS, read))

    def told():
        polls = polled(lambda pollers: [min(one.poll() for one in pollers)] * 4, ranks)
        return set(polls)

    for one in ranks:
        one.kv_mgr.check_status = None  # each has concluded
    assert {*told(), *told(), *told()} == {TRANSFERRING}
    read.released = True
    assert told() == {FAILED}
    assert told() == {FAILED}, "a pipeline stage asks twice"


@pytest.mark.parametrize("stream", ["schedule_stream", "forward_stream"])
def test_nothing_is_written_while_decode_may_still_write_its_pages(fleet, stream):
    """What SGLang launched before it named them is over first: the clearing of a state's slot, and with overlap the
    step of a request that has ended, and whose pages these were.
    """
    room = 6 if stream == "schedule_stream" else 26
    fleet.decode.each("launch", stream, "work")
    fleet.announce(room)
    fleet.bind(room)
    assert {fleet.prefill.poll(room) for _ in range(LOOKS)} == {BOOTSTRAPPING}
    fleet.decode.each("end", "work")
    fleet.begin(room)
    fleet.rest(room)


def fail_in_transfer(fleet, room, known_as):
    """Decode gives the room up in mid transfer, and holds its memory: prefill does not say that its writes are over."""
    send_part(fleet, room)
    fleet.decode.each("abort", room)
    for engine in (fleet.decode, fleet.prefill):
        engine.each("failure", room)
    fleet.decode.each("defer", room)
    fleet.decode.each("call", room, known_as)


def test_memory_of_a_later_room_of_a_name_is_held_on(fleet):
    """SGLang takes back what the first held, after its timeout: that says nothing of the second."""
    fleet.prefill.each("hold_writes")
    for known_as in (109, 209):
        fail_in_transfer(fleet, 9, known_as)
    ((error,),) = fleet.decode.each("errors_of", "release", 109)
    assert "room 9: SGLang reuses its memory though a peer may still write to it" in error
    assert {safe for _ in range(LOOKS) for safe in fleet.decode.each("safe", 209)} == {False}
    fleet.prefill.each("let_go")
    eventually(lambda: all(fleet.decode.each("safe", 209)))
    assert fleet.decode.each("errors_of", "release", 209) == [[]]


def test_a_whole_room_whose_memory_never_comes_back_fails_its_request(monkeypatch):
    """A writer was lost, and only an operator knows that it is dead: SGLang itself would wait for ever."""
    said, config = [], SimpleNamespace(drain_s=20.0)
    one = object.__new__(PdStageKVReceiver)
    node = SimpleNamespace(config=config)
    one.kv_mgr = SimpleNamespace(fail=lambda request, error: said.append(str(error)), node=node)
    one._room = SimpleNamespace(state=State.SUCCESS, released=False)
    monkeypatch.setattr(CommonKVReceiver, "_poll", lambda self: TRANSFERRING)
    for config.drain_s, n_failures in ((20.0, 0), (0.0, 1)):
        one._poll()
        assert len(said) == n_failures
    assert "has not closed it, and may write to the pages still" in said[0]


@pytest.mark.parametrize("bound", [None, "pages"])
def test_only_a_room_that_was_told_of_memory_is_held(bound):
    """SGLang takes nothing back from another, so nobody would ever let it go. What the node's thread decides is fixed
    here: the room is not released yet as the receiver looks.
    """
    held = []
    one = object.__new__(PdStageKVReceiver)
    one.number = 20
    one.kv_mgr = SimpleNamespace(hold=lambda number, room: held.append(number))
    one._room = SimpleNamespace(state=State.FAILED, released=False, bound=bound)
    one._give_up("decode gave it up")
    assert held == ([20] if bound else [])


def test_a_room_that_is_held_leaves_its_name_to_the_next(fleet):
    """Its memory goes back while another request of that name lives, which SGLang goes on to poll."""
    fleet.prefill.each("hold_writes")
    fail_in_transfer(fleet, 10, 110)
    fleet.prefill.each("let_go")
    fleet.announce(10)
    eventually(lambda: all(fleet.decode.each("safe", 110)))
    fleet.decode.each("release", 110)
    fleet.bind(10)
    fleet.begin(10)
    fleet.rest(10)

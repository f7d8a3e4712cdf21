"""When SGLang is told that a request is over: not before its memory is safe, whatever happened to it and its name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdstage.integrations.sglang.receiver import PdStageKVReceiver
from pdstage.protocol.state import State
from tests.engines.sglang.fleet import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING, Fleet, eventually

NODE = '{"path": "direct", "transport": "local"}'
TOKENS = 100
LOOKS = 50


@pytest.fixture(scope="module")
def fleet(installed):
    with Fleet(1, 1, "hybrid", NODE) as made:
        yield made


def send_part(fleet, room: int) -> None:
    fleet.open(room, TOKENS)
    fleet.compute(room, 0, 64, False)


def drop(fleet, room: int) -> None:
    """Both schedulers after a failure, and decode gets its memory back."""
    assert fleet.prefill.until(room, FAILED, SUCCESS) == FAILED
    fleet.prefill.each("failure", room)
    assert fleet.decode.until(room, FAILED, SUCCESS) == FAILED
    fleet.decode.each("failure", room)
    fleet.decode.each("defer", room)
    eventually(lambda: all(fleet.decode.each("safe", room)))
    fleet.decode.each("release", room)


def test_success_waits_until_the_memory_is_released(fleet):
    """At both sides: SGLang gives a request's pages to others as soon as it hears of its success."""
    fleet.open(1, TOKENS)
    fleet.compute(1, 0, TOKENS, True)
    for engine in (fleet.prefill, fleet.decode):
        engine.each("withhold", 1)
    for engine in (fleet.prefill, fleet.decode):
        assert {engine.poll(1) for _ in range(LOOKS)} <= {WAITING, TRANSFERRING}
        engine.each("release_withheld", 1)
    fleet.finish(1, TOKENS)
    fleet.forgets_all()


def test_the_latency_of_a_transfer_is_told(fleet):
    fleet.open(2, TOKENS)
    fleet.compute(2, 0, TOKENS, True)
    assert fleet.prefill.until(2, SUCCESS, FAILED) == SUCCESS
    assert fleet.prefill.each("latency", 2) != [None]
    fleet.finish(2, TOKENS)


def test_prefill_fails_a_room_only_when_nothing_reads_its_pages(fleet):
    """The decode side gave it up; prefill's write of it is under way, as far as its node knows."""
    fleet.prefill.each("hold_writes")
    send_part(fleet, 3)
    fleet.decode.each("abort", 3)
    eventually(lambda: all(fleet.prefill.each("failed", 3)))
    assert {fleet.prefill.poll(3) for _ in range(LOOKS)} == {TRANSFERRING}
    fleet.prefill.each("let_go")
    drop(fleet, 3)
    fleet.forgets_all()


def test_a_scheduler_that_gives_a_room_up_waits_for_its_writes(fleet):
    fleet.prefill.each("hold_writes")
    send_part(fleet, 4)
    fleet.prefill.each("waits", 60.0)
    fleet.prefill.each("let_go_once_waited_for")
    assert fleet.prefill.each("errors_of", "abort", 4) == [[]]
    assert all(fleet.prefill.each("released", 4)), "the scheduler frees the pages when this returns"
    drop(fleet, 4)
    fleet.forgets_all()


def test_pages_that_are_reused_under_a_write_are_named(fleet):
    fleet.prefill.each("hold_writes")
    send_part(fleet, 5)
    fleet.prefill.each("waits", 0.0)
    ((error,),) = fleet.prefill.each("errors_of", "abort", 5)
    assert "room 5" in error
    assert "a write may still read them" in error
    assert not any(fleet.prefill.each("released", 5))
    fleet.prefill.each("let_go")
    fleet.prefill.each("waits", 60.0)
    drop(fleet, 5)
    fleet.forgets_all()


def test_nothing_is_written_while_decode_may_still_zero_its_pages(fleet):
    """What SGLang launched before it named them, such as the clearing of a state's slot, is over first."""
    fleet.decode.each("busy", True)
    fleet.announce(6)
    fleet.bind(6, TOKENS)
    assert {fleet.prefill.poll(6) for _ in range(LOOKS)} == {BOOTSTRAPPING}
    fleet.decode.each("busy", False)
    fleet.begin(6, TOKENS)
    fleet.compute(6, 0, TOKENS, True)
    fleet.finish(6, TOKENS)


def test_a_request_while_memory_is_given_away_fails_and_nothing_else(fleet):
    for engine in (fleet.decode, fleet.prefill):
        engine.each("sleep")
    fleet.announce(7)
    for engine in (fleet.decode, fleet.prefill):
        assert engine.poll(7) == FAILED
        assert "KV memory is released" in engine.each("failure", 7)[0]
        engine.each("wake")
    fleet.run(8, TOKENS)


def fail_in_transfer(fleet, room: int, known_as: int) -> None:
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
    fleet.prefill.each("waits", 0.0)
    for known_as in (109, 209):
        fail_in_transfer(fleet, 9, known_as)
    ((error,),) = fleet.decode.each("errors_of", "release", 109)
    assert "room 9: SGLang reuses its memory though a peer may still write to it" in error
    assert {safe for _ in range(LOOKS) for safe in fleet.decode.each("safe", 209)} == {False}
    fleet.prefill.each("let_go")
    fleet.prefill.each("waits", 60.0)
    eventually(lambda: all(fleet.decode.each("safe", 209)))
    assert fleet.decode.each("errors_of", "release", 209) == [[]]
    fleet.forgets_all()


@pytest.mark.parametrize("bound", [None, "pages"])
def test_only_a_room_that_was_told_of_memory_is_held(bound):
    """SGLang takes nothing back from another, so nobody would ever let it go. What the node's thread decides is fixed
    here: the room is not released yet as the receiver looks.
    """
    held = []
    one = object.__new__(PdStageKVReceiver)
    one.bootstrap_room = 20
    one.kv_mgr = SimpleNamespace(hold=lambda number, room: held.append(number))
    one._room = SimpleNamespace(state=State.FAILED, released=False, bound=bound)
    one._give_up("decode gave it up")
    assert held == ([20] if bound else [])


def test_a_room_that_is_held_leaves_its_name_to_the_next(fleet):
    """Its memory goes back while another request of that name lives, which SGLang goes on to poll."""
    fleet.prefill.each("hold_writes")
    fleet.prefill.each("waits", 0.0)
    fail_in_transfer(fleet, 10, 110)
    fleet.prefill.each("let_go")
    fleet.prefill.each("waits", 60.0)
    fleet.announce(10)
    eventually(lambda: all(fleet.decode.each("safe", 110)))
    fleet.decode.each("release", 110)
    fleet.bind(10, TOKENS)
    fleet.begin(10, TOKENS)
    fleet.compute(10, 0, TOKENS, True)
    fleet.finish(10, TOKENS)
    fleet.forgets_all()

"""Aborts, dead and stopped peers, and what SGLang does then; memory is given back only when nothing writes to it."""

from __future__ import annotations

import signal

import pytest

from tests.engines.sglang.fleet import (
    DIRECT,
    FAILED,
    SUCCESS,
    TOKENS,
    TRANSFERRING,
    WAITING,
    Fleet,
    eventually,
    shared_fleet,
)

fleet = shared_fleet(2, 1, "hybrid", DIRECT)


@pytest.fixture
def doomed():
    """A fleet of which a test kills a part; a silent peer is given up soon."""
    node = '{"path": "direct", "transport": "local", "config": {"max_silence_s": 3, "drain_s": 3}}'
    with Fleet(2, 1, "mha", node) as made:
        yield made


STEPS = ["known to prefill", "known to both", "bound", "begun", "in transfer"]


def bring(fleet, room, step):
    at = STEPS.index(step)
    fleet.prefill.each("send_to", room)
    if at > 0:
        fleet.decode.each("receive", room)
    if at > 1:
        fleet.bind(room)
    if at > 2:
        fleet.begin(room)
    if at > 3:
        fleet.first_chunk(room)
        fleet.decode.until(room, TRANSFERRING)


@pytest.mark.parametrize(
    ("step", "who"), [(step, who) for step in STEPS for who in ("prefill", "decode")[: 2 - (step == STEPS[0])]]
)
def test_an_abort_at_any_step_ends_both_sides(fleet, step, who):
    room = 16 * (1 + STEPS.index(step)) + 4 * (who == "decode")
    bring(fleet, room, step)
    getattr(fleet, who).each("abort", room)
    if step == "known to prefill":
        fleet.decode.each("receive", room)
    bound = who == "prefill" or step in STEPS[2:]
    if bound and step in STEPS[:2]:
        fleet.bind(room)  # decode hears of it when it says where the memory is
    reasons = fleet.fails_at_decode(room, bound=bound) + fleet.fails_at_prefill(room)
    assert any("Aborted by AbortReq" in reason for reason in reasons), reasons
    if bound:
        assert all(fleet.decode.each("holds", room, TOKENS, 7)), "something was written after the memory was safe"
    fleet.run(room)  # the same number again, as a retried or retracted request has it


@pytest.mark.parametrize("at", ["prefill", "decode", "both"])
@pytest.mark.parametrize("ends", ["poll", "abort"])
def test_a_number_that_comes_again_fails_the_later_request_alone(fleet, at, ends):
    """A router gives a `bootstrap_room` again while the first request with it is in transfer (sglang#40125)."""
    room, first, second = 32, 33, 34
    fleet.open(room)
    fleet.first_chunk(room)
    for engine in fleet.engines:
        engine.until(room, TRANSFERRING)
    for engine, name in ((fleet.prefill, "send_to"), (fleet.decode, "receive")):
        if at not in (engine.mode, "both"):
            continue
        engine.each("call", room, first)
        engine.each(name, room)
        engine.each("call", room, second)
        engine.each("call", first, room)
        if ends == "abort":
            engine.each("abort", second)
        assert engine.until(second, FAILED, SUCCESS) == FAILED
        assert all(f"an earlier request has bootstrap_room {room}" in said for said in engine.each("failure", second))
        engine.each("clear", second)
        assert engine.poll(room) == TRANSFERRING
    fleet.rest(room, 64)


@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_a_number_that_comes_again_after_a_failure_keeps_the_failures_apart(fleet, at):
    """The first has failed, and its scheduler has not heard of it: the later request is served, with its own end."""
    room, first = 35, 36
    fleet.open(room)
    fleet.prefill.each("abort", room)
    assert fleet.decode.until(room, FAILED) == FAILED
    others = fleet.prefill if at == "decode" else fleet.decode
    assert others.until(room, FAILED) == FAILED
    others.each("failure", room)
    if at == "prefill":
        fleet.gives_back(room)
    engine = getattr(fleet, at)
    engine.each("call", room, first)
    fleet.open(room)
    assert all("another rank" not in said for said in engine.each("failure", first)), "each failure has its own reason"
    engine.each("clear", first)
    fleet.rest(room)


def test_memory_that_a_stopped_writer_may_write_is_not_given_back(fleet):
    fleet.open(10)
    fleet.prefill.ranks[0].stop()
    fleet.decode.each("abort", 10)
    assert fleet.decode.poll(10) == FAILED, "the client is told at once"
    fleet.decode.each("failure", 10)
    fleet.decode.each("defer", 10)
    for _ in range(50):
        assert not any(fleet.decode.each("safe", 10))
    fleet.prefill.ranks[0].signal(signal.SIGCONT)
    fleet.gives_back(10)
    fleet.fails_at_prefill(10)
    assert all(fleet.decode.each("holds", 10, TOKENS, 7))
    fleet.run(11)


@pytest.mark.parametrize("who", ["one rank", "prefill", "decode"])
def test_pages_stay_until_no_rank_reads_them_and_no_scheduler_waits(fleet, who):
    """I8: one rank's writes are under way when a rank fails alone, or either side gives the room up. SGLang fails the
    request for all ranks at once, and frees the pages of all.
    """
    room = 12 + 16 * ["one rank", "prefill", "decode"].index(who)
    fleet.open(room)
    fleet.prefill.ranks[0].call("hold_writes")
    fleet.compute(room)
    for rank in fleet.prefill.ranks:
        rank.call("refuse_to_wait")
    givers = {"one rank": fleet.prefill.ranks[1:], "prefill": fleet.prefill.ranks, "decode": fleet.decode.ranks}
    for rank in givers[who]:
        rank.call("abort", room)
    eventually(lambda: fleet.prefill.poll(room) == TRANSFERRING and all(fleet.prefill.each("given_up", room)))
    assert {fleet.prefill.poll(room) for _ in range(50)} == {TRANSFERRING}
    assert not fleet.prefill.ranks[0].call("released", room)
    fleet.prefill.ranks[0].call("let_go")
    assert fleet.prefill.until(room, FAILED, SUCCESS) == FAILED
    assert all(fleet.prefill.each("released", room)), "the scheduler frees the pages when it has heard of the failure"
    assert [one for some in fleet.prefill.each("errors_of", "failure", room) for one in some] == []
    fleet.ends_at_decode(room)


def test_sglangs_timeout_holds_for_each_of_a_requests_waits(fleet):
    """A pause of generation in the middle of a prompt may last as long as that before its first chunk."""
    for wait_s, transfer_s in fleet.decode.each("waits"):
        assert wait_s == transfer_s == 300.0


def test_memory_goes_and_comes_again(fleet):
    """SGLang releases its memory for a while and resumes it: rooms fail meanwhile, and are served after it."""
    fleet.open(13)
    for engine in (fleet.decode, fleet.prefill):
        engine.each("sleep")
    fleet.announce(15)
    for engine in (fleet.decode, fleet.prefill):
        assert engine.poll(15) == FAILED
        assert all("KV memory is released" in said for said in engine.each("failure", 15))
    assert fleet.fails_at_decode(13)
    fleet.fails_at_prefill(13)
    for engine in (fleet.prefill, fleet.decode):
        engine.each("wake")
    fleet.run(14)


def test_a_killed_prefill_rank_fails_the_room_and_frees_its_memory_after_its_death_is_known(doomed):
    doomed.open(1)
    doomed.first_chunk(1)
    doomed.decode.until(1, TRANSFERRING, WAITING)
    doomed.prefill.ranks[1].signal(signal.SIGKILL)
    (said,) = doomed.fails_at_decode(1)
    assert said
    alone = doomed.prefill.ranks[0]
    eventually(lambda: alone.call("poll_alone", 1), lambda state: state == FAILED)


def test_a_killed_decode_rank_fails_the_room_at_prefill(doomed):
    doomed.open(1)
    doomed.first_chunk(1)
    doomed.decode.ranks[0].signal(signal.SIGKILL)
    doomed.fails_at_prefill(1)
    assert all(doomed.prefill.each("released", 1)), "the scheduler frees the pages when this returns"


def test_what_a_node_that_failed_holds_is_given_back_in_the_end(doomed):
    """Nothing tells any more that its pages are not read, and SGLang waits for no less."""
    doomed.open(1)
    broken = doomed.prefill.ranks[0]
    broken.call("hold_writes")
    doomed.compute(1)
    broken.call("break_node")
    assert broken.call("prefix", 1) == 0, "its scheduler goes on"
    assert doomed.prefill.poll(1) == TRANSFERRING, "a peer may still take what it wrote"
    assert doomed.prefill.until(1, FAILED, SUCCESS) == FAILED

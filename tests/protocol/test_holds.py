"""What prefill holds for decode, which waits with announced rooms: for pages, say. Its heartbeats name them."""

from __future__ import annotations

import pytest

from pdstage import State
from pdstage.protocol import messages as m
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.room import room_key
from pdstage.protocol.session import HOLD_EVERY_S
from tests.pair import World, assert_failed, is_message, nth
from tests.rows import drawn

HOUR_S = 3600.0
HELD_S = 3 * HOLD_EVERY_S
SHORT = {"open_wait_s": HELD_S, "max_silence_s": 1000.0, "deadline_s": 2 * HOUR_S, "max_deadline_s": 2 * HOUR_S}


def test_a_finished_room_is_held_for_an_hour_while_decode_waits_with_it() -> None:
    world = World(**SHORT)
    handle, sent = world.announce(1), world.send(1)
    world.run(until=HOUR_S)
    assert not sent.ended
    world.bind(handle, 8, [0, 1])
    world.run(until=HOUR_S + 1.0)
    world.check(handle, 1)
    assert sent.state is State.SUCCESS


def test_a_room_is_held_beside_others_whose_messages_leave_no_pause_for_a_heartbeat() -> None:
    world = World(**SHORT)
    world.announce(1)
    sent = world.send(1)
    for number in range(2, 20):
        other, served = world.receive(number), world.send(number)
        world.run(until=world.now + HOLD_EVERY_S / 2)
        assert other.state is served.state is State.SUCCESS
    assert world.now > 2 * HELD_S
    assert not sent.ended


def test_what_nobody_waits_with_is_held_no_longer_than_its_wait() -> None:
    """A request that a router lost; and one whose decode was cut off, or ended."""
    world = World(prefill=1, **SHORT)
    world.announce(1)
    lost, waited = world.send(2), world.send(1)
    world.run(until=HELD_S + 0.1)
    assert lost.state is State.FAILED and not waited.ended
    cut_at = world.now
    world.drop(lambda item: item.kind == "frame" and item.src is world.d)
    world.run(until=cut_at + HELD_S + 0.1)
    assert waited.state is State.FAILED


def test_thousands_of_rooms_are_held_by_one_message_a_peer_and_interval() -> None:
    world, n_rooms = World(prefill=2, **SHORT), drawn(1_000, full=10_000)
    core: DecodeCore = world.d.core
    sent = [world.prefill[1].core.submit(room_key(n)) for n in range(n_rooms)]
    for n in range(n_rooms):
        core.found(core.announce(room_key(n), deadline_s=HOUR_S), {0: b"P0", 1: b"P1"})
    world.carry(world.d)
    world.run(until=1.0)
    said: list[m.Heartbeat] = []
    world.drop(lambda item: is_message(m.Heartbeat)(item) and item.src is world.d and said.append(item.message))
    world.run(until=1.0 + 8 * HOLD_EVERY_S + 0.01)
    assert len(said) == 2 * 8
    assert all(len(beat.asks) + len(beat.waits) == n_rooms for beat in said)
    assert not any(room.ended for room in sent), "until one of these came"


def test_a_lost_answer_is_asked_for_again_by_the_next_heartbeat() -> None:
    """I4."""
    world = World(**SHORT)
    world.drop(nth(0, is_message(m.Asking)))
    handle = world.announce(1)
    world.run(until=0.1)
    world.drop(nth(0, is_message(m.Asking)))
    world.send(1)
    world.run(until=0.2)
    assert not handle.ready_to_bind
    world.run(until=0.2 + 2 * HOLD_EVERY_S)
    assert handle.ready_to_bind


@pytest.mark.parametrize(
    ("late_s", "looks", "asked_s"), [(0.0, False, None), (9.0, False, 0.25), (9.0, True, 0.0)],
    ids=["binds at once", "binds late", "looks"],
)  # fmt: skip
def test_prefill_is_asked_whether_a_room_is_finished_when_its_engine_looks_or_is_late(
    late_s: float, looks: bool, asked_s: float | None
) -> None:
    world = World(retry_s=0.25)
    world.receive(1, 4, [2])
    world.send(1, 4, [2])
    world.run()
    begun = world.now
    handle, sent = world.announce(2), world.send(2)
    if looks:
        world.d.core.wait_to_bind(handle)
        world.carry(world.d)
    if not late_s:
        world.bind(handle, 8, [0, 1])
    world.run(until=begun + 0.2)
    assert handle.ready_to_bind is (True if asked_s == 0.0 else None)
    world.run(until=begun + 1.0)
    assert handle.ready_to_bind is (None if asked_s is None else True)
    if late_s:
        world.bind(handle, 8, [0, 1])
        world.run()
    world.check(handle, 2)
    assert sent.state is State.SUCCESS


def test_an_engine_that_looks_before_the_two_sides_have_met_is_answered_as_they_meet() -> None:
    world = World(retry_s=9.0)
    handle = world.announce(1)
    world.d.core.wait_to_bind(handle)
    world.send(1)
    world.run(until=1.0)
    assert handle.ready_to_bind


def test_no_room_is_held_beyond_the_longest_deadline() -> None:
    """I10: of an engine that hangs, while its node's thread lives."""
    world = World(**SHORT | {"max_deadline_s": 10 * HELD_S})
    world.announce(1)
    sent = world.send(1)
    world.run(until=10 * HELD_S - 0.1)
    assert not sent.ended
    world.run(until=10 * HELD_S + 0.1)
    assert sent.state is State.FAILED


@pytest.mark.parametrize("asks_first", [True, False])
@pytest.mark.parametrize("why", ["it was aborted", "no room begins"])
def test_decode_that_has_not_bound_hears_that_a_room_will_not_be_sent(why: str, asks_first: bool) -> None:
    """It would wait for its whole deadline (I10)."""
    world = World()
    world.serve(1)
    begun, handle = world.now, world.announce(2)

    def ask() -> None:
        world.d.core.wait_to_bind(handle)
        world.carry(world.d)
        world.run(until=begun)

    if asks_first:
        ask()
    if why == "it was aborted":
        world.abort(world.p, world.submit(2), why)
    else:
        world.p.core.drain()
        world.carry(world.p)
    if not asks_first:
        ask()
    world.run(until=begun + 0.1)
    assert_failed(handle, "prefill rank 0 gave the room up")
    assert not world.p.session.asking

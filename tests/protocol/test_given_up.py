"""Rooms that decode gives up before it opens them: who is told, and when a room of that name may come again (I10)."""

import pytest

from pdstage.errors import Aborted, DeadlineExceeded
from pdstage.protocol import messages as m
from pdstage.protocol.room import State
from tests.pair import Decode, World, assert_flat, is_message

WHY = "the client left"


def abort(world: World, room, rank: int = 0) -> None:
    world.decode[rank].core.abort(room, WHY, world.now)
    world.carry(world.decode[rank])


def assert_given_up(*rooms) -> None:
    for room in rooms:
        assert room.state is State.FAILED and room.released
        assert isinstance(room.error, Aborted)
        assert WHY in str(room.error)


def aborts(world: World) -> int:
    return sum("Abort(" in line for line in world.log)


def test_every_writer_of_an_unbound_room_is_told_at_once() -> None:
    world = World(prefill=2)
    sent = [world.send(1, 8, [0, 1], rank) for rank in (0, 1)]
    handle = world.announce(1)
    world.run()
    assert handle.state is State.WAITING_FOR_INPUT
    abort(world, handle)
    world.run()
    assert_given_up(handle, *sent)
    assert world.now == 0.0
    assert_flat(world)


def test_a_writer_that_has_not_answered_yet_is_told_once_it_does() -> None:
    world = World()
    sent = world.send(1, 8, [0, 1])
    world.hold(is_message(m.Welcome))
    handle = world.receive(1, 8, [0, 1])
    world.run()
    abort(world, handle)
    world.run()
    assert handle.released and not sent.ended
    world.free()
    world.run()
    assert_given_up(handle, sent)
    assert_flat(world)


def test_of_two_writers_each_is_told_when_it_answers() -> None:
    """One of them never does: what it has computed goes at its own deadline, and the other's does not wait for that."""
    world = World(prefill=2, hello_s=5.0, open_wait_s=50.0)
    sent = [world.send(1, 8, [0, 1], rank) for rank in (0, 1)]
    world.hold(lambda item: item.src is world.prefill[1])
    handle = world.announce(1)
    world.run(until=6.0)
    assert isinstance(handle.error, DeadlineExceeded)
    assert sent[0].state is State.FAILED and "no answer from" in str(sent[0].error)
    assert not sent[1].ended


def test_a_room_given_up_before_it_is_submitted_fails_when_it_is() -> None:
    world = World()
    handle = world.announce(1)
    world.run()
    abort(world, handle)
    world.run()
    sent = world.send(1, 8, [0, 1])
    world.run()
    assert_given_up(handle, sent)
    assert_flat(world)


def test_what_was_given_up_fails_one_room_and_not_the_next_of_its_name() -> None:
    world = World()
    abort(world, world.announce(1))
    world.run()
    assert_given_up(world.submit(1))
    handle, sent = world.receive(1, 8, [0, 1]), world.send(1, 8, [0, 1])
    world.run()
    assert sent.state is State.SUCCESS
    world.check(handle, 1, 8)


@pytest.mark.parametrize("bound", [True, False], ids=["opened", "asked for"])
def test_a_room_wanted_again_is_not_given_up(bound: bool) -> None:
    world = World()
    abort(world, world.announce(1))
    world.run()
    handle = world.announce(1)
    if bound:
        world.bind(handle, 8, [0, 1])
    world.run(until=0.1)
    sent = world.send(1, 8, [0, 1])
    if not bound:
        world.bind(handle, 8, [0, 1])
    world.run()
    assert sent.state is State.SUCCESS
    world.check(handle, 1, 8)
    assert_flat(world)


def test_a_room_wanted_again_before_its_writer_answered_was_never_given_up() -> None:
    world = World()
    sent = world.send(1, 8, [0, 1])
    world.hold(is_message(m.Welcome))
    abort(world, world.announce(1))
    handle = world.receive(1, 8, [0, 1])
    world.free()
    world.run()
    assert sent.state is State.SUCCESS
    world.check(handle, 1, 8)
    assert not aborts(world)


def test_one_rank_of_decode_gives_up_and_its_fellow_is_refused() -> None:
    """The fellow has opened it already, or does so later, and need not wait for its own deadline."""
    for late in (True, False):
        world = World(decode=2)
        rooms = [world.announce(1, rank) for rank in (0, 1)]
        world.run()
        if not late:
            world.bind(rooms[1], 8, [0, 1], 1)
            world.run()
        abort(world, rooms[0])
        world.run()
        sent = world.submit(1)
        if late:
            world.bind(rooms[1], 8, [0, 1], 1)
        world.run()
        assert_given_up(rooms[0], sent)
        assert rooms[1].state is State.FAILED and rooms[1].released
        assert WHY in str(rooms[1].error)
        assert_flat(world)


def test_both_ranks_of_decode_give_up_and_want_it_again() -> None:
    world = World(decode=2)
    for rank in (0, 1):
        abort(world, world.announce(1, rank), rank)
    world.run()
    rooms = [world.receive(1, 8, [0, 1], rank) for rank in (0, 1)]
    world.run()
    sent = world.send(1, 8, [0, 1])
    world.run()
    assert sent.state is State.SUCCESS
    for rank, room in enumerate(rooms):
        world.check(room, 1, 8, rank)


def test_a_room_that_fails_at_prefill_and_at_decode_may_be_opened_again() -> None:
    """The destination that gave it up means the room again, and is not refused as one that comes late."""
    world = World()
    sent, handle = world.submit(1), world.announce(1)
    world.run()
    world.prefill[0].core.abort(sent, "out of memory", world.now)
    world.carry(world.prefill[0])
    abort(world, handle)
    world.run()
    handle = world.receive(1, 8, [0, 1])
    world.run()
    assert not handle.ended
    assert world.send(1, 8, [0, 1]) is not sent
    world.run()
    world.check(handle, 1, 8)


def test_a_room_whose_writers_were_still_looked_up_is_given_up_with_a_greeting() -> None:
    world = World()
    sent = world.send(1, 8, [0, 1])
    give_up(world.decode[0], world)
    world.run()
    assert sent.state is State.FAILED and WHY in str(sent.error)
    assert_flat(world)


def test_a_room_received_anew_meanwhile_is_not_given_up() -> None:
    world = World()
    sent, handle = world.send(1, 8, [0, 1]), world.receive(1, 8, [0, 1])
    give_up(world.decode[0], world)
    world.run()
    assert sent.state is State.SUCCESS
    world.check(handle, 1, 8)


def give_up(node: Decode, world: World) -> None:
    node.core.give_up(b"i1", {0: world.prefill[0].name}, WHY, world.now)
    world.carry(node)

"""Leases that decode lends with Open: what they save, and that none is written once given back (I2, I12, I16)."""

from __future__ import annotations

import re

import pytest

from pdstage import State
from pdstage.plan import Rect
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from tests.pair import World, assert_flat, is_message

LEASE = 512
"""Staged bytes of 8 tokens."""


def said(world: World, first: int = 0) -> list[str]:
    """The messages since line `first` of the log, each as "way kind"."""
    found = (re.match(r"frame (\w)\d>(\w)\d (\w+)\(", line) for line in world.log[first:])
    return [f"{one[1]}>{one[2]} {one[3]}" for one in found if one]


def met(world: World) -> World:
    world.receive(0, 4, [15])
    world.send(0, 4, [15])
    world.run()
    return world


@pytest.mark.parametrize("notifies", [True, False])
def test_a_room_of_one_chunk_takes_two_messages_each_way(notifies: bool) -> None:
    world = met(World(notifies=notifies))
    first = len(world.log)
    handle, sent = world.serve(1)
    world.check(handle, 1)
    assert sent.state is State.SUCCESS
    whole = said(world, first)
    assert [one for one in whole if one.startswith("D")] == ["D>P Open", "D>P Closed"]
    assert [one for one in whole if one.startswith("P")] == [
        "P>D Opened",
        *["P>D Tagged"] * (not notifies),
        "P>D CloseOk",
    ]
    assert_flat(world)


def test_the_second_room_of_a_size_asks_for_none_of_its_chunks() -> None:
    """A room in chunks of 4 tokens, and then one as large in the same; a longer one asks for what the last was not."""
    world = met(World(lane_nbytes=1 << 14))
    asked = []
    for room in (1, 2, 3):
        first = len(world.log)
        handle = world.receive(room, 24, list(range(6)))
        sent = world.send(room, 24, list(range(6)), step=4)
        world.run()
        world.check(handle, room, 24)
        assert sent.state is State.SUCCESS
        asked.append(said(world, first).count("P>D Reserve"))
    assert asked == [5, 0, 0], "the first room's memory was lent for one chunk"
    assert_flat(world)


def test_a_tag_of_more_than_was_lent_is_stale() -> None:
    """A writer that has it right cannot have written it there (I3)."""
    world = met(World(lane_nbytes=1 << 14))
    world.receive(1, 24, list(range(6)))
    world.send(1, 24, list(range(6)), step=4)
    world.run()
    world.receive(2, 24, list(range(6)))
    world.run()
    core = world.d.core
    lease = min(core.leases.advances, key=lambda lease: lease.chunk)
    tag = wire.Tag(lease.session.id, 3, 0, lease.lane, lease.cursor, (Rect("kv", 0, 24, 0, 2),))
    core.tag(wire.encode_tag(tag, ("kv",)))
    assert core.counters.tags_stale == 1
    assert lease.phase == "granted"


@pytest.mark.parametrize("path", ["direct", "auto"])
def test_a_writer_that_writes_in_place_is_lent_nothing_in_advance(path: str) -> None:
    world = met(World(path=path, choose=lambda _: True))
    handle, _ = world.serve(1)
    world.check(handle, 1)
    assert world.d.core.counters.leases_granted == 0
    assert_flat(world)


def test_what_waits_gets_what_was_lent_in_advance_within_a_moment() -> None:
    """Room 1 is lent half of the lane, and its engine is slow. Others need more than the rest, once and again (I12)."""
    world = met(World(lane_nbytes=2 * LEASE, n_pages=32))
    slow = world.receive(1)
    world.run()
    (lease,) = world.d.core.leases.advances
    begun = world.now
    for room in (2, 3):
        handle = world.receive(room, 32, list(range(2, 10)))
        world.send(room, 32, list(range(2, 10)), step=8)
        world.run(until=begun + 0.03)
        world.check(handle, room, 32)
    assert not world.d.core.leases.advances
    assert lease.phase == "released"
    sent = world.send(1)
    world.run()
    world.check(slow, 1)
    assert sent.state is State.SUCCESS
    assert_flat(world)


def test_an_advance_that_never_came_and_is_too_small_is_given_back() -> None:
    """Open and the word that recalls its advance are lost, and the chunk is longer than the last room's (I4): that
    costs time, and no session.
    """
    world = met(World(lane_nbytes=4096, n_pages=32))
    world.receive(1, 16, [0, 1, 2, 3])
    world.send(1, 16, [0, 1, 2, 3])
    world.run()
    world.drop(is_message(m.Open, m.Recall))
    handle = world.receive(2, 24, list(range(6)))
    (lease,) = world.d.core.leases.advances
    assert lease.nbytes == 2 * LEASE
    world.run()
    world.free()
    world.drop(is_message(m.Recall))
    other = world.receive(3, 56, list(range(6, 20)))
    sent = [world.send(2, 24, list(range(6))), world.send(3, 56, list(range(6, 20)))]
    world.run(until=world.now + 0.1)
    assert lease.recalled
    world.free()
    world.run(until=world.now + 60.0)
    world.check(handle, 2, 24)
    world.check(other, 3, 56)
    assert [one.state for one in sent] == [State.SUCCESS] * 2
    assert_flat(world)


def test_nothing_is_lent_for_leases_that_a_writer_has_never_had() -> None:
    """It says that it wrote there. Two leases of no bytes would lie at one place (I3)."""
    world = met(World(path="direct", choose=lambda _: True))
    world.hold(is_message(m.CloseOk))
    handle, _ = world.serve(1)
    world.say(world.d, m.CloseOk(handle.epoch, (m.Written(0, 0, 0), m.Written(0, 0, 0)), b"aux"))
    world.check(handle, 1)
    world.receive(2)
    assert not world.d.core.leases.live()

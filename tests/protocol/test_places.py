"""Rooms between engines cut differently: pipelines on either side, DP attention, ranks that have nothing to do."""

from __future__ import annotations

import pytest

from pdstage import State
from pdstage.protocol import messages as m
from pdstage.protocol.decode_rooms import DecodeRoom
from pdstage.protocol.destinations import PrefillRoom
from tests.pair import World, assert_flat
from tests.rows import both_paths

EVEN, DRAFT_LAST, THREE = ((0, 2), (2, 4)), ((0, 1), (1, 4)), ((0, 1), (1, 2), (2, 4))
CUTS = {
    "TP 2 x PP 2 -> TP 1": (4, EVEN, 1, ()),
    "TP 2 x PP 2 -> TP 2": (4, EVEN, 2, ()),
    "PP 2 -> TP 4": (2, EVEN, 4, ()),
    "TP 4 -> PP 2": (4, (), 2, EVEN),
    "PP 2 -> PP 2": (2, EVEN, 2, EVEN),
    "PP 2, draft layers on the last -> PP 2": (2, DRAFT_LAST, 2, EVEN),
    "PP 3 -> TP 2 x PP 2": (3, THREE, 4, EVEN),
    "TP 2 x PP 2 -> PP 3": (4, EVEN, 3, THREE),
    "TP 4 -> TP 2 x PP 2, draft layers on the last": (4, (), 4, DRAFT_LAST),
}


def cut(name: str, path: str = "staged", **how: object) -> World:
    prefill, src_stages, decode, dst_stages = CUTS[name]
    return World(
        prefill=prefill, decode=decode, src_stages=src_stages, dst_stages=dst_stages, layers=4, heads=2, path=path,
        lane_nbytes=16384, buffer_nbytes=16384, **how,
    )  # type: ignore[arg-type]  # fmt: skip


def all_over(world: World, handles: list[DecodeRoom], sent: list[PrefillRoom]) -> None:
    for rank, handle in enumerate(handles):
        world.check(handle, 1, 11, rank)
        assert handle.aux == b"aux"
        assert handle.released
    assert all(room.state is State.SUCCESS and room.released for room in sent)
    assert not [line for node in world.nodes() for line in node.peer_warnings]
    assert_flat(world)


@both_paths
@pytest.mark.parametrize("name", CUTS)
def test_engines_cut_differently(name: str, path: str) -> None:
    world = cut(name, path)
    handles = [world.receive(1, 11, [9, 2, 5], rank) for rank in range(len(world.decode))]
    sent = [world.send(1, 11, [3, 1, 7], rank, step=8) for rank in range(len(world.prefill))]
    world.run()
    assert world.now == 0.0
    all_over(world, handles, sent)


# Ranks that hold nothing for a room.


def opened_with_nothing(world: World) -> tuple[DecodeRoom, int]:
    """Room 1 of two prefill ranks, opened; which of them was sent an Open that asks for no shares, and no aux."""
    found = set()

    def look(item) -> bool:  # type: ignore[no-untyped-def]
        if isinstance(item.message, m.Open) and not item.message.shares and not item.message.aux:
            found.add(int(item.dst.name[1:]))
        return False

    world.drop(look)
    handle = world.receive(1)
    world.run()
    (idle,) = found
    return handle, idle


@both_paths
@pytest.mark.parametrize("ever", [True, False])
def test_a_writer_that_holds_nothing_keeps_nobody_waiting(path: str, ever: bool) -> None:
    """Its engine submits the room much later, or never: Success and `released` come at once all the same (I10), and no
    record is left (I14).
    """
    world = World(prefill=2, heads=1, layers=1, path=path)  # two replicas of one layer: one of them sends it
    handle, idle = opened_with_nothing(world)
    busy = world.send(1, rank=1 - idle)
    world.run()
    assert world.now == 0.0
    world.check(handle, 1)
    assert handle.released
    assert busy.state is State.SUCCESS and busy.released
    if ever:
        late = world.send(1, rank=idle)
        world.run()
        assert late.state is State.SUCCESS and late.released
    else:
        assert len(world.prefill[idle].core.pending) == 1
        world.run(until=400.0)
    assert_flat(world)


def test_a_writer_that_holds_nothing_and_gives_up_fails_no_room() -> None:
    """It waited for a room that its engine never began; the room goes on, however long it takes (I10)."""
    world = World(prefill=2, heads=1, layers=1, send_wait_s=5.0, wait_s=100.0)
    handle, idle = opened_with_nothing(world)
    busy = world.submit(1, 1 - idle)
    world.run(until=30.0)
    assert handle.state is State.WAITING_FOR_INPUT, handle.error
    assert not world.prefill[idle].core.destinations
    world.chunk(busy, rank=1 - idle)
    world.finish(busy, 1 - idle)
    world.run(until=60.0)
    world.check(handle, 1)
    assert handle.released
    assert_flat(world)

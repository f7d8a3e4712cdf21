"""I9: the sides name different numbers of slots: the longer list is trimmed, or the kind refuses; never silently."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from pdstage import State
from pdstage.protocol import messages as m
from pdstage.protocol.decode_rooms import DecodeRoom
from pdstage.protocol.destinations import PrefillRoom
from pdstage.protocol.session import Session
from tests.pair import World, assert_failed, assert_flat, is_message
from tests.rows import both_paths

by_lengths = pytest.mark.parametrize(("n_prefill", "n_decode"), [(3, 5), (5, 3), (0, 4), (4, 0), (1, 2)])


def world_of(path: str = "staged", **how: object) -> World:
    return World(**{"path": path, "slots": True, "src_page": 1, "dst_page": 1} | how)  # type: ignore[arg-type]


def begun(world: World, n_prefill: int | tuple[int, ...], n_decode: int) -> tuple[list[DecodeRoom], list[PrefillRoom]]:
    """Room 1 with its slots named at every rank, at prefill as many at each or at all; the caller runs it."""
    handles = [world.receive(1, n_decode, [7, 5, 3, 1, 0][:n_decode], n) for n in range(len(world.decode))]
    numbers = n_prefill if isinstance(n_prefill, tuple) else (n_prefill,) * len(world.prefill)
    sent = []
    for rank, n in enumerate(numbers):
        pages = [2, 4, 6, 8, 10][:n]
        world.fill(1, n, pages, rank)
        sent.append(world.submit(1, rank))
        world.chunk(sent[-1], (0, n), pages, rank)
        world.finish(sent[-1], rank)
    return handles, sent


def is_over(world: World, handles: list[DecodeRoom], sent: list[PrefillRoom]) -> None:
    assert all(room.released for room in (*handles, *sent))
    assert_flat(world)


@both_paths
@by_lengths
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_longer_list_is_trimmed_and_both_nodes_say_so_once(
    n_prefill: int, n_decode: int, path: str, prefill: int, decode: int
) -> None:
    world = world_of(path, prefill=prefill, decode=decode)
    for n in range(2):
        handles, sent = begun(world, n_prefill, n_decode)
        world.run(until=world.now + 40.0)
        for rank, handle in enumerate(handles):
            world.check(handle, 1, min(n_prefill, n_decode), rank)
        assert all(room.state is State.SUCCESS for room in sent)
        is_over(world, handles, sent)
        words = f"component 'kv' has {n_prefill} slots at prefill and {n_decode} at decode: "
        for node in world.nodes():
            said = [line for line in node.peer_warnings if line.startswith(words)]
            assert len(said) == len(node.peer_warnings) <= 1
            assert node.core.counters.slots_trimmed > n or not said
        assert all(node.peer_warnings for node in world.prefill)
        assert any(node.peer_warnings for node in world.decode)


def test_equal_lengths_say_nothing() -> None:
    for exact in (False, True):
        world = world_of(exact=exact)
        handles, sent = begun(world, 4, 4)
        world.run(until=40.0)
        world.check(handles[0], 1, 4)
        is_over(world, handles, sent)
        assert not [line for node in world.nodes() for line in node.peer_warnings]
        assert not [node for node in world.nodes() if node.core.counters.slots_trimmed]


@both_paths
@by_lengths
@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 1), (1, 2)])
def test_a_kind_that_needs_exact_lengths_refuses_on_both_sides(
    n_prefill: int, n_decode: int, path: str, prefill: int, decode: int
) -> None:
    world = world_of(path, exact=True, prefill=prefill, decode=decode)
    handles, sent = begun(world, n_prefill, n_decode)
    world.run(until=40.0)
    words = f"component 'kv' has {n_prefill} slots at prefill and {n_decode} at decode, and must have as many"
    for room in (*handles, *sent):
        assert_failed(room, words)
    is_over(world, handles, sent)


@both_paths
@pytest.mark.parametrize("numbers", [*itertools.permutations((2, 3, 5), 2)])
def test_writers_that_give_other_numbers_leave_no_slot_half_written(numbers: tuple[int, int], path: str) -> None:
    """I5: a Success says of each slot that all of it is here, or that none of it was sent."""
    world = world_of(path, prefill=2)
    (handle,), sent = begun(world, numbers, 4)
    world.run(until=40.0)
    assert_failed(handle, "component 'kv' got slots that are not whole: ")
    is_over(world, [handle], sent)


def test_a_writer_that_never_named_its_slots_fails_the_room() -> None:
    """None given is no word of there being none: its engine forgot them."""
    for exact in (False, True):
        world = world_of(exact=exact)
        handle = world.receive(1, 2, [1, 2])
        world.finish(world.submit(1))
        world.run(until=40.0)
        assert_failed(handle, "finished without 'kv' layer 0 from token 0")
        assert_flat(world)


def lie(world: World, n: int, component: str) -> None:
    """Every CloseOk that prefill sends says another number of slots."""
    core = world.p.core
    send = core.endpoint.send

    def lying(session: Session, message: m.AnyMessage) -> None:
        if isinstance(message, m.CloseOk):
            message = msgspec.structs.replace(message, slots=(m.Given(component, n),))
        send(session, message)

    core.endpoint.send = lying  # type: ignore[method-assign]
    core.slots.compare = lambda *_: ""  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("given", "n", "component", "words"),
    [*((3, n, "kv", "") for n in (0, 2, 3, 5, 1 << 40)), (4, 4, "other", "the number of slots of 'kv'")],
)
def test_a_lie_about_slots_of_an_exact_kind_fails_the_room(given: int, n: int, component: str, words: str) -> None:
    """I5: decode looks for itself; and nothing is a Success before the number was told."""
    world = world_of(exact=True)
    lie(world, n, component)
    handles, _ = begun(world, given, 4)
    world.run(until=40.0)
    assert_failed(handles[0], words)
    assert_flat(world)


def test_an_exact_room_is_no_success_before_the_number_was_told() -> None:
    """I5: a writer without aux, whose every slot has arrived, may still give one too many."""
    world = world_of(exact=True, prefill=2)
    world.hold(is_message(m.CloseOk, m.CloseFailed))
    handles, sent = begun(world, 5, 3)
    world.run(until=1.0)
    assert all(handle.state is not State.SUCCESS for handle in handles)
    world.free()
    world.run(until=40.0)
    assert all(room.state is State.FAILED for room in (*handles, *sent))

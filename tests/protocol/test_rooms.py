"""Whole rooms: the loss, duplication or delay of any one thing; every deadline; every typed error; both sides."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from pdstage import Aborted, PeerError, TransportError, UsageError
from pdstage.plan import Rect
from pdstage.protocol import messages as m
from pdstage.protocol import prefill, wire
from pdstage.protocol.decode_rooms import DecodeRoom, Writer
from pdstage.protocol.destinations import Chunk, Destination, PrefillRoom, SubmittedChunk
from pdstage.protocol.room import Room
from pdstage.protocol.state import ChunkPhase, State
from tests.pair import World, assert_failed, assert_flat, is_kind, is_message, nth, snapshot
from tests.rows import both_paths

LEASE = 512


# Every deadline (I10): what is silenced, whose clock, what it says.


def asked(world: World) -> Room:
    return world.receive(1)


DEADLINES: list[tuple[dict[str, float], Callable[[World], object], Callable[[World], Room], str]] = [
    ({"hello_s": 3.0}, lambda w: w.drop(is_message(m.Welcome)), asked, "prefill gave no answer in 3.0 s"),
    ({"open_s": 3.0}, lambda w: w.drop(is_message(m.Open)), asked, "not answered by prefill in 3.0 s"),
    ({"deadline_s": 3.0}, lambda _: None, lambda w: w.announce(1), "did not end in its 3.0 s"),
    ({"wait_s": 3.0}, lambda w: w.submit(1), asked, "got no chunk in 3.0 s"),
    ({"deadline_s": 3.0}, lambda w: w.submit(1), asked, "did not end in its 3.0 s"),
    ({"open_wait_s": 3.0}, lambda _: None, lambda w: w.send(1), "no decode rank opened room 1 in 3.0 s"),
    ({"send_wait_s": 3.0}, lambda _: None, asked, "prefill never began room 1"),
    ({"deadline_s": 3.0}, asked, lambda w: w.submit(1), "in its 3.0 s"),
    # A destination that stays, and takes nothing, must not hold prefill's pages for as long as it likes.
    (
        {"deadline_s": 1e300, "max_deadline_s": 3.0, "wait_s": 1e9, "transfer_s": 1e9},
        asked,
        lambda w: w.submit(1),
        "not sent in its 3.0 s",
    ),
    # Nothing of the data plane is repeated; its only chunk counts as begun, since the writer's close says so (I5).
    (
        {"transfer_s": 3.0, "wait_s": 30.0},
        lambda w: w.drop(is_kind("tag")),
        lambda w: w.serve(1)[0],
        "nothing new in 3.0 s",
    ),
]


@pytest.mark.parametrize(
    ("config", "silence", "begin", "words"), DEADLINES, ids=[f"{n}-{d[3][:24]}" for n, d in enumerate(DEADLINES)]
)
def test_each_deadline_ends_the_room_with_its_reason(
    config: dict[str, float], silence: Callable[[World], object], begin: Callable[[World], Room], words: str
) -> None:
    """I10."""
    world = World(**config)
    silence(world)
    room = begin(world)
    world.run(until=2.9)
    assert not room.ended
    world.run(until=3.6)
    assert_failed(room, words)
    world.free()
    world.run(until=100.0)
    assert room.released
    assert_flat(world)


def test_a_write_older_than_write_s_tears_its_session_down() -> None:
    """I8, I10."""
    world = World(write_s=2.0)
    world.hold(is_kind("write", "fence"))
    handle, sent = world.receive(1), world.send(1)
    world.run(until=1.9)
    assert not sent.ended
    world.run(until=2.1)
    assert "took over 2.0 s" in str(sent.error)
    assert not sent.released, "the post may still read these pages"
    assert len(world.p.core.chunks.free) == 1
    world.free()
    world.run(until=30.0)
    assert sent.released
    assert handle.state is State.FAILED
    assert_flat(world)


def test_an_abort_that_is_not_drained_in_time_loses_the_session() -> None:
    world = World(drain_s=2.0)
    world.hold(is_kind("write"))
    handle, _ = world.serve(1)
    world.hold(is_kind("fence"))
    world.abort(world.d, handle, "enough")
    world.run(until=1.9)
    assert world.d.core.sessions
    world.run(until=2.1)
    assert not world.d.core.sessions
    assert any("did not drain in 2.0 s" in words for words in world.d.peer_warnings)
    assert world.d.core.leases.lanes[0].quarantined_nbytes == LEASE
    world.free()
    world.run(until=30.0)
    assert_flat(world)


# Typed errors: usage.


def usage(world: World) -> dict[str, Callable[[], object]]:
    prefill = world.p.core
    world.receive(1)
    sent, other = world.submit(1), world.submit(3)
    world.finish(sent)

    return {
        "received already": lambda: world.announce(1),
        "being sent already": lambda: world.submit(1),
        "chunk after finish": lambda: world.chunk(sent),
        "65 components": lambda: prefill.chunk(other, (Rect("kv", 0, 4, 0, 2),) * 65, {}),
    }


@pytest.mark.parametrize("words", usage(World()))
def test_a_callers_mistake_is_a_usage_error_and_changes_nothing(words: str) -> None:
    world = World()
    mistakes = usage(world)
    before = [snapshot(node.core) for node in world.nodes()]
    timers = [len(node.core.endpoint.timers) for node in world.nodes()]
    with pytest.raises(UsageError, match=words):
        mistakes[words]()
    assert [snapshot(node.core) for node in world.nodes()] == before
    assert [len(node.core.endpoint.timers) for node in world.nodes()] == timers
    assert not any(node.core.endpoint.take_effects() for node in world.nodes())


# Typed errors: what a peer may not say.


def opened(world: World) -> tuple[DecodeRoom, PrefillRoom]:
    handle, sent = world.receive(1), world.submit(1)
    world.run()
    return handle, sent


@pytest.mark.parametrize(
    ("reserve", "words"),
    [
        ((1, 0, 0, LEASE, (Rect("swa", 0, 8, 0, 2),)), "'swa' was not asked of it"),
        ((1, 0, 0, LEASE, (Rect("kv", 0, 9, 0, 2),)), "'kv' 0..9 is outside 0..8"),
        ((1, 0, 0, LEASE, (Rect("kv", 0, 8, 2, 4),)), "'kv' layers 2..4 are not its own"),
        ((1, 0, 0, LEASE - 128, (Rect("kv", 0, 8, 0, 2),)), "384 bytes for what has 512 here"),
        ((1, 0, 0, LEASE, ()), "repeat a component, or are none"),
        ((1, 0, 0, LEASE, (Rect("kv", 0, 4, 0, 2), Rect("kv", 4, 8, 0, 2))), "repeat a component, or are none"),
    ],
)
def test_a_reserve_for_what_was_not_asked_fails_the_room_naming_it(reserve: tuple, words: str) -> None:
    world = World(advance=False)
    handle, _ = opened(world)
    world.say(world.d, m.Reserve(*reserve))
    world.run(until=5.0)
    assert_failed(handle, words, PeerError)
    assert world.d.core.sessions, "the room, not the session"


def test_what_came_already_gets_no_lease() -> None:
    world = World(advance=False)
    _, sent = opened(world)
    world.chunk(sent, (0, 4))
    world.run()
    (chunk,) = sent.destinations[0].chunks.values()
    (refused,) = world.say(world.d, m.Reserve(1, 1, 0, chunk.nbytes, chunk.rects))
    assert (type(refused), refused.why) == (m.Refused, "covered")


OPEN: dict[str, object] = {
    "epoch": 1, "room": b"i1", "shares": (), "asked": (), "items": (), "rank": 0, "destinations": 1, "aux": True,
    "priority": 0, "deadline_s": 9.0,
}  # fmt: skip


def share(layers: tuple[int, int, int] = (0, 2, 1), first: int = 0, count: int = 2, component: str = "kv") -> dict:
    """An Open of one share."""
    return {"shares": ((component, "k", layers, first, count),)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 1}, "rank 1 of 1"),
        ({"destinations": 0}, "rank 0 of 0"),
        ({"destinations": 2}, "rank 0 of 2, Hello said 0 of 1"),
        ({"asked": (("swa", 0, 8),)}, "asks for 'swa' 0..8"),
        ({"asked": (("kv", 8, 4),)}, "asks for 'kv' 8..4"),
        ({"asked": (("kv", 0, 4), ("kv", 4, 8))}, "asks for 'kv' 0..4"),
        (share((5, 5, 1)), "which is nothing"),
        ({"shares": (("kv", "k", (0, 2, 1), 0, 2), ("kv", "k", (1, 2, 1), 1, 1))}, "of layer 1 twice"),
        ({"deadline_s": float("inf")}, "does not decode"),
        ({"deadline_s": float("nan")}, "does not decode"),
        (share(component="swa"), "of layer 0"),
        (share((0, 3, 1)), "of layer 2"),
        (share((0, 2, 0)), "which is nothing"),
        (share(count=3), "of layer 0"),
        (share(first=-1), "of layer 0"),
        (share(count=0), "which is nothing"),
        ({"items": (("kv", 0, b"\0\0\0"),)}, "3 bytes of items"),
        ({"items": (("swa", 0, b"\0\0\0\0"),)}, "items of 'swa'"),
        ({"items": (("kv", 0, b"\x10\0\0\0"),)}, "past its 16"),
        ({"items": (("kv", 0, b"\xff\xff\xff\xff"),)}, "past its 16"),
        ({"items": (("kv", 0, b"\1\0\0\0"),), "asked": (("kv", 0, 8),)}, "for 0..4 and asks for 0..8"),
        ({"advances": (m.Advance(0, 1, 0, 256, 0),)}, "Open with Advance"),
        ({"advances": (m.Advance(0, 0, 3840, 512, 0),)}, "Open with Advance"),
        ({"items": (("kv", 4, b"\1\0\0\0"),), "asked": (("kv", 0, 8),)}, "for 4..8 and asks for 0..8"),
    ],
)
def test_an_open_out_of_range_ends_the_session(change: dict[str, object], words: str) -> None:
    """Every number from a peer is checked before it can address anything (DESIGN 12)."""
    world = World()
    opened(world)
    fields = OPEN | {"epoch": 5} | change
    fields["items"] = tuple(m.Items(name, first, memoryview(data)) for name, first, data in fields["items"])
    world.say(world.p, m.Open(**fields))
    assert words in world.p.peer_warnings[-1]
    assert not world.p.core.sessions


@pytest.mark.parametrize(
    "message",
    [
        m.Lease(1, 0, 0, 1, 0, LEASE, 0),
        m.Lease(1, 0, 0, 0, 0, LEASE - 128, 0),
        m.Lease(1, 0, 0, 0, 3840, LEASE, 0),
        m.Watermark(1, 0),
        m.Recall(1, 0, 0, 9, 0, 0),
    ],
    ids=["lane", "too small", "past the end", "watermark lane", "recall lane"],
)
def test_a_lease_outside_its_lane_ends_the_session_and_writes_nothing(message: m.AnyMessage) -> None:
    world = World(advance=False)
    world.hold(is_message(m.Lease))
    handle, _ = world.serve(1)
    world.say(world.p, message)
    assert world.p.peer_warnings
    world.carry(world.p)
    world.free()
    world.run(until=5.0)
    assert not any(line.startswith("write") for line in world.log)
    assert handle.state is State.FAILED
    assert [node.core.counters.rooms_failed for node in (world.p, world.d)] == [1, 1]


def test_each_side_counts_its_room_once() -> None:
    world = World()
    world.serve(1)
    world.run()
    for node in (world.p, world.d):
        counted = node.core.counters
        assert (counted.rooms_opened, counted.rooms_succeeded, counted.rooms_failed) == (1, 1, 0)


def test_close_ok_with_something_missing_fails_the_room_naming_it() -> None:
    world = World()
    handle, sent = opened(world)
    world.chunk(sent, (0, 4))
    world.chunk(sent, (4, 8), layers=(0, 1))
    world.finish(sent)
    world.run(until=5.0)
    assert_failed(handle, "prefill rank 0 finished without 'kv' layer 1 from token 4", PeerError)
    assert sent.state is State.SUCCESS, "it sent all its engine gave"
    assert_flat(world)


def test_a_room_that_failed_before_it_was_opened_refuses_with_the_reason() -> None:
    """And a lost refusal is said again, not forgotten into waiting."""
    world = World()
    opened(world)
    lost = world.submit(2)
    world.abort(world.p, lost, "out of memory")
    world.drop(nth(0, is_message(m.CloseFailed)))
    handle = world.receive(2)
    world.run(until=world.now + 1.0)
    assert_failed(handle, "out of memory", Aborted)
    again = world.receive(2)
    world.run(until=world.now + 1.0)
    assert again.state is State.WAITING_FOR_INPUT, "told once; a new epoch is the room again"
    world.send(2)
    world.run(until=world.now + 1.0)
    world.check(again, 2)


@pytest.fixture
def three_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session's Opens for three rooms of one page each may wait."""
    monkeypatch.setattr(prefill, "_OPEN_NBYTES", 16)
    monkeypatch.setattr(prefill, "MAX_PARKED_NBYTES", 3 * (16 + 4))


@pytest.mark.usefixtures("three_parked")
def test_too_many_parked_rooms_are_refused() -> None:
    """I14. What was submitted makes place again; other decode ranks have places of their own."""
    world = World(path="direct")
    world.decode.append(other := world.make_decode(0, life=9))
    other.name = b"D1"
    handles = [world.receive(room, 4, [room]) for room in range(5)]
    world.run()
    assert [handle.state for handle in handles[:3]] == [State.WAITING_FOR_INPUT] * 3
    assert all("too many rooms wait" in str(handle.error) for handle in handles[3:])
    for room in range(3):
        world.send(room, 4)
    world.run()
    handles += [world.receive(room, 4, [room], room // 8) for room in range(5, 11)]
    world.run()
    assert [handle.state for handle in handles[5:]] == [State.WAITING_FOR_INPUT] * 6


def test_a_failed_write_is_not_given_back_as_if_it_was_never_begun() -> None:
    """Recall's rule: if the write began, say nothing; only Drained frees the lease (I2)."""
    world = World()
    world.hold(is_kind("write"))
    handle, sent = world.serve(1)
    world.drop(is_kind("frame"))
    node = world.p
    ((ticket, (chunk, *_)),) = node.core.chunks.flights.items()
    node.core.chunks.completed(ticket, TransportError("link down"))
    world.carry(node)
    world.run()
    assert chunk.phase is ChunkPhase.BROKEN
    said = [*world.say(node, m.Recall(1, 0, 0, 0, 0, 0)), *world.say(node, m.Lease(1, 0, 0, 0, 0, LEASE, 0))]
    assert not any(isinstance(message, m.Returned) for message in said)
    assert "link down" in str(sent.error)
    assert not handle.ended


@pytest.mark.parametrize(
    ("lane", "buffer", "words"),
    [(256, 4096, "fits no lane"), (4096, 256, "one row of 'kv' does not fit a send buffer of 256 bytes")],
)
def test_a_row_larger_than_what_carries_it_fails_in_words(lane: int, buffer: int, words: str) -> None:
    world = World(heads=64, layers=1, lane_nbytes=lane, buffer_nbytes=buffer)
    handle, sent = world.receive(1, 4, [0]), world.send(1, 4, [0])
    world.run(until=5.0)
    assert words in str(sent.error)
    assert handle.state is State.FAILED
    assert_flat(world)


def test_a_node_that_drains_ends_what_it_began_and_tells_the_others() -> None:
    """Who waits for a room that prefill will not begin need not wait for a deadline (I10)."""
    world = World()
    begun, sent = world.receive(1), world.submit(1)
    parked = world.receive(2)
    world.run(until=world.now)
    prefill = world.p
    prefill.core.drain()
    world.carry(prefill)
    late = world.receive(3)
    world.run(until=world.now)
    for handle in (parked, late):
        assert_failed(handle, "takes no new rooms")
    world.chunk(sent)
    world.finish(sent)
    world.run()
    world.check(begun, 1)
    assert world.now == 0.0
    assert_flat(world)


@pytest.mark.usefixtures("three_parked")
def test_destinations_turned_away_still_count() -> None:
    """A peer that never agrees to the end of its rooms gets no place for more of them."""
    world = World(send_wait_s=1.0)
    opened(world)
    prefill = world.p
    world.drop(lambda item: item.src is prefill and item.kind == "frame")
    for epoch in range(10, 40):
        world.say(prefill, m.Open(**(OPEN | {"epoch": epoch, "room": b"i2"})))
        world.now += 1.5
        prefill.core.endpoint.tick()
        prefill.core.endpoint.take_effects()
    assert not prefill.core.pending
    assert len(prefill.core.destinations) == 4, "three and the room that is open"


@both_paths
def test_an_ended_room_is_freed_without_the_garbage_collector(path: str) -> None:
    """Engines freeze or switch off the collector, and an ended room would keep their index arrays (I14)."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        world = World(prefill=2, decode=2, path=path)
        for number in range(4):
            handles = [world.receive(number, rank=rank) for rank in (0, 1)]
            for rank in (0, 1):
                world.send(number, rank=rank, step=4)
            if number % 2:
                world.run(until=world.now + 1.0)
            else:
                world.abort(world.d, handles[0], "changed its mind")
                world.run(until=world.now + 1.0)
        for node in world.decode:
            node.pages.clear()
        del handles, node
        gc.collect()
        kinds = (DecodeRoom, PrefillRoom, Writer, Destination, Chunk, SubmittedChunk)
        assert not [type(held).__name__ for held in gc.garbage if isinstance(held, kinds)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_a_writer_that_asks_for_leases_without_end_is_answered_later() -> None:
    world = World()
    handle, _ = opened(world)
    for chunk in range(5000):
        world.say(world.d, m.Reserve(handle.epoch, chunk, 0, 512, (Rect("kv", 0, 8, 0, 2),)))
    assert not handle.ended
    assert len(world.d.core.leases.held(world.d.session, handle.epoch)) == 4096


def test_a_tag_that_brings_nothing_new_moves_no_deadline() -> None:
    """Else a writer could keep a room open by saying the same cells again and again (I10)."""
    world = World(path="direct", transfer_s=5.0)
    handle, _ = opened(world)
    for chunk in range(40):
        tag = wire.Tag(world.d.session.id, handle.epoch, chunk, m.DIRECT, 0, (Rect("kv", 0, 4, 0, 2),))
        world.d.core.tag(wire.encode_tag(tag, ("kv",)))
        world.carry(world.d)
        world.run(until=world.now + 0.5)
    assert_failed(handle, "nothing new in 5.0 s")


def test_aux_beyond_the_limit_ends_the_session() -> None:
    world = World(max_aux_nbytes=16)
    handle, _ = opened(world)
    world.say(world.d, m.CloseOk(handle.epoch, (), bytes(17)))
    assert_failed(handle, "17 aux bytes")


def test_too_big_cannot_cut_a_chunk_into_dust(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdstage.protocol.prefill_chunks._MAX_PIECES", 64)
    world = World(n_pages=600, lane_nbytes=1 << 17, buffer_nbytes=1 << 17)
    world.hold(is_message(m.Lease))
    world.receive(1, 2400, list(range(600)))
    sent = world.submit(1)
    world.chunk(sent, (0, 2400), list(range(600)))
    world.run()
    (destination,) = world.p.core.destinations
    n_before = len(destination.chunks)
    for number in range(n_before):
        world.say(world.p, m.Refused(destination.epoch, number, 0, "too_big", 256))
    assert len(destination.chunks) == n_before
    assert not sent.ended


@pytest.mark.parametrize("carried", [True, False])
def test_a_destination_that_comes_anew_gets_no_pages_that_were_taken_back(carried: bool) -> None:
    """A router tries decode again, while the first rank's end is not known yet: its first chunks would be read from
    pages that hold another request by now.
    """
    world = World()
    first, sent = world.receive(1), world.submit(1)
    world.chunk(sent, (0, 4))
    world.run(until=0.1)
    sent.carried = carried
    world.drop(is_message(m.Abort))
    world.abort(world.d, first)
    again = world.receive(1, pages=world.pages(2))
    world.run(until=0.2)
    if not carried:
        world.chunk(sent, (4, 8))
        world.finish(sent)
    world.run()
    assert again.state is sent.state is (State.FAILED if carried else State.SUCCESS)

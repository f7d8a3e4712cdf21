"""DESIGN 7's message table, row by row: what is repeated and until what, and what a receiver answers in each state."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdstage import State
from pdstage.plan import Rect
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from tests.pair import World, assert_flat, is_kind, is_message, snapshot

LEASE = 512


def met(world: World) -> World:
    world.serve(0)
    return world


def staged(world: World) -> None:
    world.receive(1)
    world.send(1)


def stuck(world: World) -> None:
    """A failed room whose writer cannot answer Abort for good yet."""
    staged(world)
    world.run()
    world.abort(world.d, next(iter(world.d.core.by_key.values())), "why")


def given_up(world: World) -> None:
    world.receive(1)
    room = world.submit(1)
    world.run()
    world.abort(world.p, room, "why")


def contended(world: World) -> None:
    """A lease without data, and another room behind it."""
    world.receive(1)
    world.chunk(world.submit(1), ready=False)
    world.run()
    world.receive(2)
    world.send(2)


REPEATED: list[tuple[type, type | str, Callable[[World], None]]] = [
    (m.Open, m.Opened, lambda w: (w.receive(1), w.submit(1))),
    (m.Reserve, m.Lease, staged),
    (m.CloseOk, m.Closed, staged),
    (m.CloseFailed, m.Abort, given_up),
    (m.Abort, m.Drained, given_up),
    (m.Abort, "write", stuck),
    (m.Recall, m.Returned, contended),
]


@pytest.mark.parametrize(
    ("question", "answer", "begin"),
    REPEATED,
    ids=[f"{q.__name__}-{a if isinstance(a, str) else a.__name__}" for q, a, _ in REPEATED],
)
def test_the_side_that_waits_repeats_its_question(
    question: type, answer: type | str, begin: Callable[[World], None]
) -> None:
    """Every `retry_s` while the answer is lost or not due, and never again once it came."""
    world = met(World(lane_nbytes=LEASE, recall_after_s=0.5, retry_s=0.25))
    first = len(world.log)
    (world.hold if answer == "write" else world.drop)(
        is_kind(answer) if isinstance(answer, str) else is_message(answer)
    )
    begin(world)
    world.run(until=2.6)
    asked = sum(f" {question.__name__}(" in line for line in world.log[first:])
    assert 7 <= asked <= 12, "about four times a second"
    world.free()
    world.run(until=4.0)
    after = len(world.log)
    world.run(until=6.0)
    assert not any(f" {question.__name__}(" in line for line in world.log[after:])


UNKNOWN = [
    ("prefill", m.Ask(99, b"i99"), [m.Asking(99, False)]),
    ("prefill", m.Lease(99, 3, 1, 0, 512, 512, 0), [m.Returned(99, 3, 1, 0, 512)]),
    ("prefill", m.Recall(99, 3, 1, 0, 512, 0), [m.Returned(99, 3, 1, 0, 512)]),
    ("prefill", m.Refused(99, 3, 1, "gone", 0), []),
    ("prefill", m.Watermark(0, 0), []),
    ("prefill", m.Closed(99), []),
    ("prefill", m.Abort(99, "why", False), [m.Drained(99)]),
    ("prefill", m.Abort(99, "finished", True), [m.Drained(99)]),
    ("prefill", m.Heartbeat(), []),
    ("decode", m.Asking(99, True), []),
    ("decode", m.Opened(99, "refused", "why"), []),
    ("decode", m.Reserve(99, 3, 1, 512, ()), [m.Refused(99, 3, 1, "gone", 0)]),
    ("decode", m.Returned(99, 3, 1, 0, 512), []),
    ("decode", m.CloseOk(99, (), None), [m.Closed(99)]),
    ("decode", m.CloseFailed(99, "why"), [m.Abort(99, "the room is over", False)]),
    ("decode", m.Drained(99), []),
    ("decode", m.Heartbeat(), []),
]


@pytest.mark.parametrize(("side", "message", "answer"), UNKNOWN, ids=[f"{x[0]}-{type(x[1]).__name__}" for x in UNKNOWN])
def test_what_is_answered_about_an_unknown_epoch(side: str, message: m.AnyMessage, answer: list[m.AnyMessage]) -> None:
    world = met(World())
    (node,) = getattr(world, side)
    before = snapshot(node.core)
    for _ in range(2):  # as often as it is asked
        assert world.say(node, message) == answer
    assert snapshot(node.core) == before


def failed(world: World) -> tuple[int, State]:
    """A failed room that is not released: its writer is silent about it."""
    stuck(world)
    return 2, State.FAILED


def live(world: World) -> tuple[int, State]:
    world.receive(1)
    world.submit(1)
    world.run()
    return 2, State.WAITING_FOR_INPUT


@pytest.mark.parametrize(
    ("state", "message", "said"),
    [
        (live, lambda e: m.Opened(e, "accepted", ""), []),
        (live, lambda e: m.Reserve(e, 0, 0, LEASE, (("kv", 0, 8, 0, 2),)), [m.Lease]),
        (live, lambda e: m.CloseOk(e, (m.Written(0, m.DIRECT, 0),), None), []),
        (live, lambda e: m.CloseFailed(e, "why"), [m.Abort]),
        (live, m.Drained, [m.Abort]),
        (failed, lambda e: m.Opened(e, "accepted", ""), []),
        (failed, lambda e: m.Reserve(e, 0, 1, LEASE, (("kv", 0, 8, 0, 2),)), [m.Refused]),
        (failed, lambda e: m.CloseOk(e, (), None), [m.Closed]),
        (failed, lambda e: m.CloseFailed(e, "why"), [m.Abort]),
        (failed, m.Drained, []),
    ],
)
def test_decode_answers_in_each_state(
    state: Callable[[World], tuple[int, State]], message: Callable[[int], m.AnyMessage], said: list[type]
) -> None:
    world = met(World())
    world.hold(is_kind("write"))
    epoch, expected = state(world)
    core = world.d.core
    room = core.by_epoch[epoch]
    assert room.state is expected
    assert [type(x) for x in world.say(world.d, message(epoch))] == said
    if expected is State.FAILED:
        assert room.state is State.FAILED
        gone = isinstance(message(epoch), m.CloseOk | m.Drained)
        assert room.released is gone, "CloseOk and Drained prove the writer quiet; nothing else does"
        assert (core.leases.lanes[0].quarantined_nbytes == 0) is gone


def test_reserve_is_answered_by_its_attempt() -> None:
    """Same attempt: the same lease. Lower: dropped. Higher: the old one is released, and another granted (I15)."""
    world = met(World())
    epoch, _ = live(world)
    node = world.d

    def reserve(attempt: int) -> list[m.AnyMessage]:
        return world.say(node, m.Reserve(epoch, 0, attempt, LEASE, (("kv", 0, 8, 0, 2),)))

    (first,) = reserve(1)
    assert reserve(1) == [first]
    assert reserve(0) == []
    (second,) = reserve(2)
    assert (second.attempt, second.cursor) == (2, first.cursor + LEASE)
    assert len(node.core.leases.live()) == 1


def test_only_the_writer_that_holds_a_lease_can_return_it() -> None:
    world = World(prefill=2, instances=True, advance=False)
    world.hold(is_kind("gather"))
    handle = world.receive(1, prefill=0)
    other = world.receive(2, prefill=1)
    world.send(1, rank=0)
    world.run()
    core = world.d.core
    (lease,) = core.leases.live()
    stranger = next(session for session in core.sessions.values() if session is not lease.session)
    for message in (m.Returned(1, 0, 0, lease.lane, lease.cursor), m.Drained(1), m.CloseOk(1, (), None)):
        world.say(world.d, message, stranger)
    assert core.leases.live() == [lease]
    assert not handle.ended
    tag = wire.Tag(stranger.id, 1, 0, lease.lane, lease.cursor, lease.rects)
    stale = core.counters.tags_stale
    core.tag(wire.encode_tag(tag, ("kv",)))
    assert core.counters.tags_stale == stale + 1
    assert lease.phase == "granted"
    assert not other.ended


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 7}, {"epoch": 2}, {"chunk": 5}, {"cursor": 256}, {"lane": 0xFFFE}, {"lane": m.DIRECT, "cursor": 0},
        {"rects": ()}, {"rects": (Rect("kv", 0, 9, 0, 2),)}, {"session": m.SessionId(1, 1)},
    ],
    ids=lambda change: "-".join(f"{name}={value}" for name, value in change.items()),
)  # fmt: skip
@pytest.mark.parametrize("advance", [True, False], ids=["lent in advance", "asked for"])
def test_a_tag_counts_only_if_everything_in_it_is_right(change: dict[str, object], advance: bool) -> None:
    """I6: epoch, writer, chunk, lease and rectangle; else it is counted and dropped."""
    world = World(advance=advance)
    world.hold(is_kind("gather"))
    handle, other = world.receive(1), world.receive(2)
    sent = world.send(1)
    world.run()
    core = world.d.core
    lease = next(one for one in core.leases.live() if one.epoch == 1)
    tag = wire.Tag(lease.session.id, 1, 0, lease.lane, lease.cursor, (Rect("kv", 0, 8, 0, 2),))._replace(**change)
    core.tag(wire.encode_tag(tag, ("kv",)))
    assert core.counters.tags_stale == 1
    assert lease.phase == "granted"
    assert not any(room.writers[lease.session.id].arrived for room in (handle, other))
    world.free()
    world.run(until=2.0)
    world.check(handle, 1)
    core.abort(other, "only another live epoch")
    world.carry(world.d)
    world.run(until=3.0)
    assert sent.state is State.SUCCESS
    assert_flat(world)

"""The aux row: written straight into the row that Open named, or packed in Close; both for the columns both have."""

from __future__ import annotations

import msgspec
import pytest

from pdstage import Column, TransportError
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.decode_rooms import DecodeRoom
from pdstage.protocol.destinations import PrefillRoom
from pdstage.protocol.room import OwnRows
from pdstage.protocol.state import State, WriterPhase
from tests.pair import COLUMNS, Item, Memory, World, assert_failed, assert_flat, is_message, nth
from tests.rows import either_side

EXTRA = Column("hidden", "bfloat16", (7,))
FILL, BEFORE = 0xA5, 0x11
QUIET_S = 5.0


def is_row(item: Item) -> bool:
    """A frame, write, tag or completion of an aux row."""
    return bool(item.tag) and wire.decode_tag(item.tag, ("kv",)).lane == m.AUX


def finish(world: World, out: PrefillRoom) -> None:
    """With a row full of `FILL`."""
    world.finish(out, aux=world.given_row(world.p, 5, FILL))


def begin(world: World, room: int = 1, *, row: int | None = 3) -> tuple[DecodeRoom, PrefillRoom]:
    """One room with a row on both sides; what it holds at decode before is `BEFORE`."""
    world.row(world.d, row or 0)[:] = BEFORE
    handle, out = world.receive(room, row=row), world.submit(room)
    world.chunk(out)
    finish(world, out)
    return handle, out


def fail_row(world: World, *, settled: bool = True) -> None:
    """The write of a row, which is held, fails."""
    core = world.p.core
    (ticket,) = (ticket for ticket, (chunk, _) in core.chunks.flights.items() if chunk.row)
    core.chunks.completed(ticket, TransportError("the post failed"), settled=settled)
    world.carry(world.p)


def holds(world: World, handle: DecodeRoom) -> None:
    """Success, and each common column is there; whatever else the row holds is as it was."""
    world.check(handle, int(handle.key[1:]))
    common = {column.name for column in handle.shared.dst}
    row = world.row(world.d, 3)
    for column in world.columns["D"].placed:
        want = FILL if column.name in common else BEFORE
        assert (row[column.offset : column.offset + column.nbytes] == want).all(), column.name


def counts(world: World) -> tuple[int, int]:
    """Rows written at prefill, and rooms that fell back there and at decode."""
    prefill, decode = world.p.core.counters, world.d.core.counters
    assert prefill.aux_fallbacks == decode.aux_fallbacks
    return prefill.aux_rows, prefill.aux_fallbacks


@pytest.mark.parametrize("aux", ["packed", "rows"])
def test_a_column_of_another_shape_is_left_out_and_named_by_both(aux: str) -> None:
    world = World(aux=aux, dst_columns=(COLUMNS[0], COLUMNS[1]._replace(shape=(6,))))
    handle, _ = begin(world)
    world.run(QUIET_S)
    holds(world, handle)
    assert [column.name for column in handle.shared.dst] == ["token"]
    for node in world.nodes():
        (said,) = node.peer_warnings
        assert "'logprobs' float32[5] at prefill and float32[6] at decode" in said


@either_side
@pytest.mark.parametrize("other", ["is not there", "is bfloat16[8] there"])
def test_a_required_column_that_is_not_common_is_refused_at_hello(side: str, other: str) -> None:
    needed = (*COLUMNS, EXTRA._replace(required=True))
    without = COLUMNS if "not" in other else (*COLUMNS, EXTRA._replace(shape=(8,)))
    src, dst = (needed, without) if side == "prefill" else (without, needed)
    world = World(aux="rows", src_columns=src, dst_columns=dst)
    handle = world.receive(1, row=3)
    world.run()
    assert_failed(handle, f"'hidden', bfloat16[7] and required at {side}, {other}")
    assert not world.p.core.sessions


# What goes wrong on the way.


def row_under_way() -> tuple[World, DecodeRoom, PrefillRoom]:
    """A room of which all is there but the row, whose write is held."""
    world = World(aux="rows")
    world.hold(lambda item: item.kind == "write" and is_row(item))
    handle, out = begin(world)
    world.run()
    return world, handle, out


@pytest.mark.parametrize("partly", [False, True])
def test_a_failed_write_falls_back_to_close(partly: bool) -> None:
    """Its post is settled, so nothing of it can land on what the message brings."""
    world, handle, out = row_under_way()
    world.held.clear()
    if partly:
        world.row(world.d, 3)[:40] = 0x77
    fail_row(world)
    world.run(QUIET_S)
    row = world.row(world.d, 3)
    world.check(handle, 1)
    assert [c.name for c in handle.shared.dst if not (row[c.offset : c.offset + c.nbytes] == FILL).all()] == []
    assert out.state is State.SUCCESS
    assert counts(world) == (0, 1)
    for node in world.nodes():
        assert len(node.peer_warnings) == 1
        assert "control message" in node.peer_warnings[0]
    assert_flat(world)


def test_a_write_that_may_still_land_loses_the_session() -> None:
    """I2: what the message brought would be overwritten, and the row is the engine's by then."""
    world, handle, out = row_under_way()
    fail_row(world, settled=False)
    world.run(1.0)
    assert out.state is State.FAILED
    core = world.p.core
    assert (core.counters.aux_fallbacks, core.counters.sessions_lost) == (0, 1)
    world.run(world.config.max_silence_s * 3)
    assert handle.state is State.FAILED


@pytest.mark.parametrize(
    ("lacks", "words"), [("P", "at prefill"), ("D", "at decode"), ("", "bound without an aux row")]
)
def test_rows_out_of_reach_go_by_message(lacks: str, words: str) -> None:
    """Where a transport could not register them, or a room has none: said once, counted for each room."""

    class OutOfReach(World):
        def make_rows(self, side: str) -> tuple[Memory, OwnRows]:
            held, rows = super().make_rows(side)
            return held, rows._replace(span=None) if side == lacks else rows

    world = OutOfReach(aux="rows")
    for room in (1, 2):
        handle, _ = begin(world, room, row=3 if lacks else None)
        world.run(room * QUIET_S)
        assert handle.state is State.SUCCESS
        assert handle.aux == bytes([FILL]) * handle.shared.nbytes
    assert counts(world) == (0, 2)
    assert [len(node.peer_warnings) for node in world.nodes()] == [1, 1]
    assert words in world.p.peer_warnings[0]


# What a peer may not say.


NO_ROW = m.Open(9, b"i9", (), (), (), 0, 1, True, 0, 60.0, 8)


@pytest.mark.parametrize(
    ("aux", "side", "message", "words"),
    [
        ("packed", "prefill", NO_ROW, "aux row 8, which Hello did not expose"),
        ("rows", "prefill", NO_ROW, "aux row 8, which Hello did not expose"),
        ("rows", "decode", m.CloseOk(1, (), bytes(23), (), True), "packed in 23 bytes"),
    ],
)
def test_a_row_that_cannot_be_is_refused(aux: str, side: str, message: m.AnyMessage, words: str) -> None:
    world = World(aux=aux)
    world.receive(1)
    world.run()
    (node,) = getattr(world, side)
    world.say(node, message)
    assert words in node.peer_warnings[-1]
    assert not node.core.sessions


@pytest.mark.parametrize(("arrives", "aux"), [(True, b"xy"), (False, None)], ids=["bytes beside it", "none came"])
def test_a_row_of_which_close_says_something_else_is_none(arrives: bool, aux: bytes | None) -> None:
    """The engine's row would be filled with bytes of any length beside it; or prefill says that a staged chunk was it,
    and the engine's row still holds another request's.
    """
    world = World(aux="rows")
    handle, _ = begin(world)
    world.hold(is_message(m.CloseOk))
    if not arrives:
        world.drop(is_row)
    world.run()
    (said,) = [item.message for item in world.held] or [m.CloseOk(handle.epoch, (m.Written(0, m.AUX, 0),), None)]
    world.say(world.d, msgspec.structs.replace(said, aux=aux))
    assert handle.state is State.SUCCESS
    assert (handle.shared, handle.aux) == (None, aux)


@pytest.mark.parametrize("row", [None, 3])
def test_a_tag_of_a_row_counts_once_and_only_where_one_was_named(row: int | None) -> None:
    """I6, I7: it changes nothing else, and is counted."""
    world = World(aux="rows")
    handle = world.receive(1, row=row)
    world.run()
    core = world.d.core
    tag = wire.encode_tag(wire.Tag(world.d.session.id, handle.epoch, 0, m.AUX, 0, ()), ("kv",))
    for _ in range(2):
        core.tag(tag)
    writer = next(iter(handle.writers.values()))
    assert writer.row_arrived == (row is not None)
    assert core.counters.tags_stale == (2 if row is None else 1)
    assert writer.phase is not WriterPhase.QUIET
    assert handle.state is (State.WAITING_FOR_INPUT if row is None else State.TRANSFERRING)


def test_a_row_is_news_and_does_not_end_the_wait_for_the_rest() -> None:
    """I10: after it the room's data is waited for as after any chunk."""
    world = World(aux="rows", write_s=1000.0)
    world.hold(lambda item: item.kind == "write" and is_row(item))
    world.drop(nth(1, lambda item: item.kind == "write" and not is_row(item)))
    handle, out = world.receive(1, row=3), world.submit(1)
    world.chunk(out, (0, 4))
    world.chunk(out, (4, 8))
    finish(world, out)
    world.run(50.0)
    world.release_held()
    world.run(world.config.transfer_s + 49.0)
    assert not handle.ended
    world.run(world.config.transfer_s + 51.0)
    assert_failed(handle, "got nothing new")


@pytest.mark.parametrize(
    ("said", "change", "words"),
    [
        ("hello", lambda c: (*c, c[0]), "named twice"),
        ("hello", lambda c: (c[0]._replace(offset=1 << 20), c[1]), "outside its row"),
        ("hello", lambda c: (c[0], c[1]._replace(offset=c[0].offset)), "in another column"),
        ("welcome", lambda c: (*c, c[0]), "named twice"),
    ],
)
def test_columns_that_make_no_row_are_refused(said: str, change, words: str) -> None:
    world = World(aux="rows")
    (node,) = world.decode if said == "hello" else world.prefill
    told = getattr(node.core.handshake, said)
    setattr(node.core.handshake, said, msgspec.structs.replace(told, columns=change(told.columns)))
    handle = world.receive(1, row=3)
    world.run()
    assert_failed(handle, words)


def test_no_row_is_written_of_a_room_that_fails_while_a_destination_is_attached() -> None:
    """Its chunk fits no send buffer: the room has failed, and its row is the engine's, before the row's turn (I8)."""
    world = World(aux="rows", path="staged", buffer_nbytes=1)
    out = world.submit(1)
    world.chunk(out)
    finish(world, out)
    handle = world.receive(1, row=3)
    world.run()
    assert not any(line.startswith("write") for line in world.log)
    assert_failed(out, "does not fit a send buffer")
    assert handle.state is State.FAILED
    assert_flat(world)

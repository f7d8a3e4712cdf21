"""A room's name, and the room table: every (state, event), and that terminal states absorb (I1)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdstage import PdstageError, UsageError
from pdstage.protocol.room import Room, RoomId, room_id, room_key
from pdstage.protocol.state import ROOM, State
from pdstage.protocol.state import RoomEvent as Event

B, W, T, S, F = State.BOOTSTRAPPING, State.WAITING_FOR_INPUT, State.TRANSFERRING, State.SUCCESS, State.FAILED

# Written out, not read from the implementation: (state, event) -> next state, None where nothing changes.
TABLE = {
    (B, Event.CONNECTED): W, (B, Event.MOVED): None, (B, Event.COMPLETED): None, (B, Event.FAILED): F,
    (W, Event.CONNECTED): None, (W, Event.MOVED): T, (W, Event.COMPLETED): S, (W, Event.FAILED): F,
    (T, Event.CONNECTED): None, (T, Event.MOVED): None, (T, Event.COMPLETED): S, (T, Event.FAILED): F,
    (S, Event.CONNECTED): None, (S, Event.MOVED): None, (S, Event.COMPLETED): None, (S, Event.FAILED): None,
    (F, Event.CONNECTED): None, (F, Event.MOVED): None, (F, Event.COMPLETED): None, (F, Event.FAILED): None,
}  # fmt: skip


def test_the_table_is_whole() -> None:
    assert set(TABLE) == set(itertools.product(State, Event))
    assert {(state, event): ROOM.rows[state][event] for state, event in TABLE} == TABLE


def test_values_are_the_peers_kvpoll() -> None:
    assert [state.value for state in (F, B, W, T, S)] == [0, 1, 2, 3, 4]
    assert min(S, F) is F, "a minimum over ranks is the state of all"


@given(st.lists(st.sampled_from(Event), max_size=12))
def test_release_keeps_the_state_and_happens_once(events: list[Event]) -> None:
    room = Room(b"r")
    for event in events:
        room.on(event, PdstageError("x"))
    state = room.state
    assert not room.released
    for _ in range(2):
        room.release()
        assert (room.state, room.released, room.status) == (state, True, state | 0x80)
    assert room.ended is (state in {S, F})


@pytest.mark.parametrize("room", [0, -5, 1, "1", b"1", 2**63, "i1", b"s1", "", "ünï", b"", b"\xff\x00"])
def test_room_ids_survive_their_keys(room: RoomId) -> None:
    """So those of different types differ."""
    assert room_id(room_key(room)) == room
    assert type(room_id(room_key(room))) is type(room)


@pytest.mark.parametrize("key", [b"", b"x", b"i", b"i1.5", b"s\xff"])
def test_a_key_that_no_room_has_names_itself(key: bytes) -> None:
    """What a peer sends is any bytes, and an error about them must be sayable."""
    assert room_id(key) == key


@pytest.mark.parametrize("room", [True, None, 1.5, ("a",), "x" * 256, b"x" * 256, 10**300])
def test_what_is_no_room_id(room: object) -> None:
    with pytest.raises(UsageError, match="no room id"):
        room_key(room)  # type: ignore[arg-type]

"""What `poll_many` says of many rooms: arrays to be MIN-reduced over TP ranks."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from pdstage.errors import Aborted
from pdstage.manager.handle import MAX_ENDED, Handle, Roster
from pdstage.protocol.room import Room
from pdstage.protocol.state import RoomEvent, State

if TYPE_CHECKING:
    pass


NODE = SimpleNamespace(driver=None)


def make(n: int) -> tuple[Roster, list[Room], list[Handle]]:
    roster = Roster()
    rooms = [Room(b"%d" % i) for i in range(n)]
    handles = [Handle(NODE, room) for room in rooms]
    for room, handle in zip(rooms, handles, strict=True):
        roster.add(room, handle)
    return roster, rooms, handles


def succeed(room: Room) -> None:
    for event in (RoomEvent.CONNECTED, RoomEvent.MOVED, RoomEvent.COMPLETED):
        assert room.on(event)


def test_the_minimum_over_ranks_is_the_state_of_all() -> None:
    """An ended room is not yet released: a writer may not have said that it is done (I2). All ranks must free in the
    same step: released only where it is released on each.
    """
    answers = []
    for rank in range(2):
        roster, rooms, handles = make(4)
        succeed(rooms[0])
        rooms[0].release()
        succeed(rooms[1])
        if rank == 0:
            rooms[1].release()
            rooms[2].on(RoomEvent.FAILED, Aborted("one rank only"))
        for handle, room in zip(handles, rooms, strict=True):
            roster.changed(handle, room.status)
        answers.append(roster.statuses(handles))
    states, released = zip(*answers, strict=True)
    assert (states[0].dtype, released[0].dtype) == (np.int8, np.uint8)
    last = State.BOOTSTRAPPING
    assert [list(each) for each in states] == [
        [State.SUCCESS, State.SUCCESS, State.FAILED, last], [State.SUCCESS, State.SUCCESS, last, last],
    ]  # fmt: skip
    assert [list(each) for each in released] == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert list(np.minimum(*states)) == [State.SUCCESS, State.SUCCESS, State.FAILED, last]


def test_each_change_is_in_the_next_answer() -> None:
    roster, (room,), (handle,) = make(1)
    answers = []
    for step in (lambda: succeed(room), room.release, lambda: None):
        step()
        roster.changed(handle, room.status)
        states, released = roster.statuses([handle])
        answers.append((int(states[0]), int(released[0])))
    assert answers == [(State.SUCCESS, 0), (State.SUCCESS, 1), (State.SUCCESS, 1)]


def test_no_end_is_lost_while_the_driver_adds_others() -> None:
    """`completions` runs in the engine's thread, rooms end in the driver's: each is given once (found by a benchmark
    that waited for ever).
    """
    n = MAX_ENDED - 1
    roster, _, handles = make(n)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        driver = threading.Thread(target=lambda: [roster.changed(handle, State.FAILED | 0x80) for handle in handles])
        driver.start()
        taken = 0
        while driver.is_alive():
            taken += len(roster.take_ended())
        taken += len(roster.take_ended())
    finally:
        sys.setswitchinterval(interval)
    assert taken == n


_KEPT_WAITING_S = 0.1

"""What `poll_many` says of many rooms: arrays to be MIN-reduced over TP ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import numpy as np

from pdstage import Aborted
from pdstage.manager.handle import MAX_ENDED, Handle, Roster
from pdstage.manager.observer import RoomEnded, RoomOpened, RoomReleased
from pdstage.metadata import MetadataBuffers, usual_columns
from pdstage.protocol.room import Room
from pdstage.protocol.state import RoomEvent, State
from tests.manager.engine import Rank, drive
from tests.manager.test_observer import Recorder


def make(n: int) -> tuple[Roster, list[Room], list[Handle]]:
    roster = Roster()
    rooms = [Room(b"%d" % i) for i in range(n)]
    handles = [Handle(None, room) for room in rooms]  # type: ignore[arg-type]
    for room, handle in zip(rooms, handles, strict=True):
        roster.by_room[room] = handle
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
        assert not any(roster.statuses(handles)[1]), "and each change is in the next answer"
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


class Interleaved:
    """Runs `act` in another thread before the `at`-th line of every call that `wrap` makes, or not at all; until its
    end, or for as long as it is kept waiting.
    """

    def __init__(self, act: Callable[[], None], at: int) -> None:
        self._other, self._left = threading.Thread(target=act), at
        self.acted = False

    def wrap(self, function):
        def traced(*args):
            before = sys.gettrace()
            sys.settrace(self._trace)
            try:
                return function(*args)
            finally:
                sys.settrace(before)

        return traced

    def _trace(self, frame, event, arg):
        if event == "line" and not self.acted:
            self._left -= 1
            if self._left == 0:
                self.acted = True
                self._other.start()
                self._other.join(_KEPT_WAITING_S)
        return self._trace


def test_a_room_aborted_while_its_handle_is_brought_up_to_date(site, monkeypatch) -> None:
    """Between any two lines of that: the end is neither lost nor told twice, and the row comes back (a room that hung
    after its end was found by the chaos test).
    """
    seen, rows = Recorder(), MetadataBuffers(usual_columns(8), 2)
    site.prefill(Rank(), metadata=MetadataBuffers(usual_columns(8), 2))
    d = site.decode(Rank(), metadata=rows, observers=(seen,))
    on_changed, at = d._on_changed, 0
    while True:
        at += 1
        d.directory.forget()  # so that nothing happens to the room before the next turn
        receiver, row = d.receive(at, site.address), rows.allocate()
        raced = Interleaved(receiver.abort, at)
        monkeypatch.setattr(d, "_on_changed", raced.wrap(on_changed))
        d._lend(receiver, row)
        drive(site.nodes, lambda: raced.acted or receiver.state is State.WAITING_FOR_INPUT)  # noqa: B023
        if not raced.acted:
            break
        site.ends(receiver)
        rows.free(row)
        assert receiver.state is State.FAILED
        assert "aborted by the engine" in str(receiver.error)
        assert [ended.room.key for ended in d.completions()] == [receiver.room.key]
        assert [type(event) for _, event in seen.events] == [RoomOpened, RoomEnded, RoomReleased]
        seen.events.clear()
    assert at > 10


def test_the_answers_of_two_threads_that_poll_do_not_mix() -> None:
    """Wherever the second polls between two lines of the first."""
    (roster, _, handles), at, acted = make(3), 0, True
    while acted:
        at, roster._n_changes = at + 1, at
        raced = Interleaved(lambda: roster.statuses(handles[:1]), at)
        assert len(raced.wrap(roster.statuses)(handles)[0]) == 3
        acted = raced.acted
    assert at > 4

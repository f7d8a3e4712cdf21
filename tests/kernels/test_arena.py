"""Tables on a device: made and dropped without a call that allocates, frees or waits, never overwritten while in use.

`Device` stands in for a GPU's runtime: its copies and events happen when `run` says so, and it notes every call.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from unittest import mock

import numpy as np
import pytest

from pdstage.kernels.arena import Arena

FOREIGN, OTHER = 0x1000, 0x2000
SLAB = 8 << 10


class Device:
    def __init__(self):
        self.calls = []
        self.n_current = 0
        self.memory = {}
        self.captured = set()
        self._own, self._work = set(), {}
        self._events, self._numbers = {}, itertools.count(1)

    @contextlib.contextmanager
    def current(self):
        self.n_current += 1
        try:
            yield
        finally:
            self.n_current -= 1

    def note(self, *call):
        assert self.n_current, f"{call} outside of `current`"
        self.calls.append(call)

    def allocate(self, nbytes):
        self.calls.append(("allocate", nbytes))
        at = 1 << 30 if not self.memory else max(self.memory) + (1 << 24)
        self.memory[at] = np.full(nbytes, 0xEE, np.uint8)
        return at

    def pinned(self, nbytes):
        self.calls.append(("pinned", nbytes))
        return np.full(nbytes, 0xDD, np.uint8)

    def new_stream(self):
        self._own.add(next(self._numbers))
        return max(self._own)

    def owns(self, stream):
        return stream in self._own

    def event(self):
        self._events[number := next(self._numbers)] = True
        return number

    def upload(self, ptr, src, stream):
        self.note("upload", stream)
        self.put(stream, lambda: self.at(ptr, src.size).__setitem__(slice(None), src))

    def record(self, event, stream):
        self.note("record", stream)
        self._events[event] = False
        self.put(stream, lambda: self._events.__setitem__(event, True))

    def wait(self, event, stream):
        self.note("wait", stream)

    def done(self, event):
        self.note("done", event)
        if self.captured:  # a spin that never ends would say nothing
            self.run()
        return self._events[event]

    def capturing(self, stream):
        return stream in self.captured

    # What tests use.

    def at(self, ptr, n):
        base = max(at for at in self.memory if at <= ptr)
        return self.memory[base][ptr - base :][:n]

    def put(self, stream, work):
        self._work.setdefault(stream, []).append(work)

    def run(self, *streams):
        """All that is in these streams, or in all of them."""
        for stream in streams or list(self._work):
            for work in self._work.pop(stream, []):
                work()

    def launch(self, table, stream):
        """A kernel that reads the table when it runs: what it found is in the list given back."""
        found = []
        with self.current():
            table.before(stream)
            self.put(stream, lambda: found.append(bytes(self.at(table_ptr, 4))))
            table_ptr = table.ptr
            self.calls.append(("launch", stream))
            table.after(stream)
        return found

    def of(self, name):
        return [call for call in self.calls if call[0] == name]


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def arena(device):
    made = Arena(device, SLAB)
    device.calls.clear()
    return made


def table(number, nbytes=64):
    return np.full(nbytes, number, np.uint8)


def test_a_plan_is_made_launched_and_dropped_without_allocating_or_waiting(device, arena):
    mine = device.new_stream()
    for number in range(50):
        held = arena.put(table(number))
        found = device.launch(held, mine)
        device.run()
        assert found == [bytes([number] * 4)]
        del held
        arena.reserve()
    assert not device.of("allocate") + device.of("pinned")
    assert {call[0] for call in device.calls} <= {"upload", "record", "done", "wait", "launch"}


def test_a_launch_waits_for_the_upload_on_the_device_until_that_is_known_to_be_done(device, arena):
    held, mine = arena.put(table(1)), device.new_stream()
    device.launch(held, mine)

    assert device.calls.index(("wait", mine)) < device.calls.index(("launch", mine))
    device.run()
    device.calls.clear()
    device.launch(held, mine)
    device.launch(held, mine)
    assert [call[0] for call in device.calls] == ["done", "launch", "launch"], "once it was done it is not asked again"


@pytest.mark.parametrize("whose", ["the runtime's", "a caller's"])
def test_a_dropped_table_makes_no_call_and_is_not_overwritten_before_its_kernels_have_run(device, arena, whose):
    """A caller's stream may be gone by then."""
    stream = device.new_stream() if whose == "the runtime's" else FOREIGN
    held = arena.put(table(7))
    device.run()
    found, at = device.launch(held, stream), held.ptr
    device.calls.clear()
    del held
    gc.collect()
    assert device.calls == []
    others = []
    for _ in range(3):
        others.append(arena.put(table(9)))
        device.run(arena._stream)
    assert at not in [one.ptr for one in others]
    device.run()
    assert found == [b"\7" * 4]
    assert arena.put(table(9)).ptr == at, "used again once the kernel has run"


def test_somebody_elses_stream_is_not_touched_after_its_launch(device, arena):
    held = arena.put(table(1))
    device.run()
    for stream in (FOREIGN, OTHER, FOREIGN):
        device.launch(held, stream)
        assert device.calls[-1] == ("record", stream)
    device.calls.clear()
    del held
    arena.put(table(2))
    assert {call[1] for call in device.of("record")} == {arena._stream}


def test_what_a_graph_was_recorded_with_is_kept(device, arena):
    """It may be launched at any time; and no event of ours is put into the recording."""
    held = arena.put(table(5))
    device.captured = {FOREIGN}
    device.launch(held, FOREIGN)
    assert ("wait", FOREIGN) not in device.calls, "a graph cannot wait for what is not in it"
    assert ("record", FOREIGN) not in device.calls
    device.captured = set()
    at = held.ptr
    del held
    ptrs = []
    for _ in range(20):
        ptrs.append(arena.put(table(9)).ptr)
        device.run()
    assert at not in ptrs
    assert bytes(device.at(at, 4)) == b"\5" * 4


def test_room_is_made_before_plans_are_and_else_when_they_need_it(device, arena):
    held = [arena.put(table(n)) for n in range(SLAB >> 10)]
    assert not device.of("allocate")
    arena.reserve()
    assert device.of("allocate") == [("allocate", SLAB)]
    arena.reserve()
    held += [arena.put(table(n)) for n in range(SLAB >> 10)]
    assert len(device.of("allocate")) == 1, "half a slab and more was free"
    held.append(arena.put(table(1)))
    held.append(arena.put(table(1, 3 * SLAB)))
    assert [nbytes for _, nbytes in device.of("allocate")] == [SLAB, SLAB, 4 * SLAB]
    device.run()
    places = sorted((one.ptr, one.ptr + 1024) for one in held[:-1])
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))


def test_room_that_cannot_be_made_is_for_the_plan_to_miss(device, arena, monkeypatch):
    """Nobody's session ends for it."""
    held = [arena.put(table(n)) for n in range(SLAB >> 10)]
    monkeypatch.setattr(device, "allocate", mock.Mock(side_effect=RuntimeError("cuMemAlloc failed with 2")))
    arena.reserve()
    with pytest.raises(RuntimeError, match="failed with 2"):
        arena.put(table(1))
    device.run()
    held.pop()
    arena.reserve()
    device.run()
    assert arena.put(table(2)).ptr, "what is free again serves"


def test_streams_without_end_leave_few_events(device, arena):
    held = arena.put(table(1))
    for stream in range(0x3000, 0x3400):
        device.launch(held, stream)
        device.run()
    assert len(held._place.events) <= 64

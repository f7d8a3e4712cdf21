"""Staging memory, and copies whose end is reported and never waited for.

`Device` stands in for a GPU's runtime, which cannot be here: its copies are made at once, its events end when told.
"""

from __future__ import annotations

import itertools
import math
from unittest import mock

import numpy as np
import pytest

from pdstage import Pool, Region, UsageError
from pdstage.kernels.driver import DriverError
from pdstage.plan import TOKEN_MAJOR, Rect, Share
from pdstage.plan.tables import Index
from pdstage.stager import ALIGNMENT, Memory, Move, PageLock, Stager
from tests.pools import Logical, Stored, hold

TOKENS = 6
RECTS = (Rect("kv", 0, TOKENS, 0, 1),)
OWNED = (Share("kv", "r0", (0, 1, 1), 0, 1),)


class Device:
    def __init__(self):
        self.over: set[int] = set()
        self.recorded: list[int] = []
        self.events = itertools.count(1)
        self.n_pinned = self.n_reserved = 0

    def reserve(self):
        self.n_reserved += 1

    def new_stream(self):
        return 77

    def pinned(self, nbytes):
        self.n_pinned += 1
        return np.full(nbytes, 0xAA, np.uint8)

    def event(self):
        return next(self.events)

    def record(self, event, stream):
        assert stream == 77
        self.recorded.append(event)
        self.over.discard(event)

    def done(self, event):
        return event in self.over


@pytest.fixture
def pool():
    held = hold([Stored(Logical(width=16), n_items=4, rows_per_item=2)])
    return Pool.of(held.layout, keep=held)


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def stager(pool, device):
    return Stager(pool, runtime=device)


@pytest.fixture
def dst():
    """Staging memory, for as long as the test runs."""
    staging = np.zeros(256, np.uint8)
    yield Region(staging.ctypes.data, staging.nbytes)


def items(*pages):
    return {"kv": Index.of(np.array(pages))}


def move(*pages, order=TOKEN_MAJOR, checksum=False):
    return Move(OWNED, RECTS, {"kv": (0, TOKENS)}, order, items(*pages), checksum)


@pytest.mark.parametrize("checksum", [False, True])
def test_a_devices_copies_end_with_their_events_in_order(stager, device, dst, checksum):
    for ticket in (5, 6):
        stager.gather(ticket, move(0, 1, 2, checksum=checksum), dst)
    assert stager.poll() == [], "launched is not done"
    first, second = device.recorded
    device.over = {second}
    assert stager.poll() == [], "one stream: the second cannot be over before the first"
    device.over = {first, second}
    ended = stager.poll()
    assert [copied.ticket for copied in ended] == [5, 6]
    assert {bool(copied.checksum) for copied in ended} == {checksum}
    assert stager.poll() == []
    stager.scatter(7, move(0, 1, 2), dst)
    assert len(set(device.recorded)) == 2, "events serve again"
    assert stager.poll() == [], "an event that serves again is not over because it once was"


def test_a_copy_refused_at_its_second_part_ends_after_its_first(device, dst):
    """I2, I8: until then a kernel of the first may still read the pages, or write them."""
    held = [hold([Stored(Logical(width=16), n_items=n, rows_per_item=2)]) for n in (4, 3)]
    parts = [Pool.of(one.layout, keep=one) for one in held]
    stager, launched = Stager(parts[0], runtime=device), []

    def both(stream, sum_ptr):
        for part in parts:
            selected = [(view.key, 0, view.shards) for view in part.layout.views()]
            part.plan(selected).gather(dst.base, dst.nbytes, items(0, 3, 1), {"kv": (0, TOKENS)}, stream=stream)
            launched.append(part)

    assert stager._begin(1, both, checksum=False) is None
    assert launched == parts[:1]
    assert stager.poll() == [], "its first part runs"
    device.over = set(device.recorded)
    (copied,) = stager.poll()
    assert isinstance(copied.error, UsageError) and "3" in str(copied.error)


@pytest.mark.parametrize("n", [1, 3])
def test_parts_are_aligned_equal_and_inside(n):
    memory = Memory(10_000)
    parts = memory.parts(n)
    assert len(parts) == n
    for part, after in itertools.pairwise([*parts, Region(memory.region.base + memory.region.nbytes, 0)]):
        assert part.base % ALIGNMENT == 0 == part.nbytes % ALIGNMENT
        assert part.nbytes == parts[0].nbytes and part.base + part.nbytes <= after.base


def test_parts_are_no_shorter_than_they_may_be():
    with pytest.raises(UsageError, match="do not make 17 parts.* at least 4352"):
        Memory(2048).parts(17)


class Allocator:
    """What `Memory` asks of a device's runtime."""

    def __init__(self):
        self.calls, self.locked = [], {}

    def allocate(self, nbytes):
        self.calls.append(("allocate", nbytes))
        return len(self.calls) << 32

    def page_lock(self, ptr, nbytes):
        if ptr in self.locked:
            return False
        self.locked[ptr] = nbytes
        return True

    def page_unlock(self, ptr):
        del self.locked[ptr]


def test_a_gpus_staging_memory_is_its_drivers_and_is_not_freed_but_kept_for_the_next():
    """A peer may have it open still (CUDA IPC), and torch's pool may be of a kind that none can open."""
    runtime = Allocator()
    first = Memory(1 << 20, "cuda:1", runtime=runtime)
    assert first.region == Region(1 << 32, 1 << 20, "cuda", 1)
    second = Memory(1 << 20, "cuda:1", runtime=runtime)
    assert second.region.base != first.region.base
    first.release()
    first.release()
    assert Memory(1 << 20, "cuda:1", runtime=runtime).region == first.region
    assert Memory(2 << 20, "cuda:1", runtime=runtime).region.base not in (first.region.base, second.region.base)
    assert [name for name, _ in runtime.calls] == ["allocate"] * 3
    assert not runtime.locked


def test_host_memory_of_a_gpus_pool_is_page_locked_until_its_release():
    runtime = Allocator()
    memory = Memory(8192, "cuda:0", runtime=runtime, staging_on="host")
    assert runtime.locked == {memory.region.base: 8192}
    memory.release()
    assert not runtime.locked


def test_a_gpus_pages_in_host_memory_stay_page_locked_while_one_of_its_nodes_lives():
    """An engine that is prefill and decode has two nodes over one pool."""
    runtime, pages = Allocator(), [Region(1 << 20, 4096), Region(2 << 20, 4096)]
    runtime.page_lock(2 << 20, 4096)
    first, second = (PageLock("the pool", pages, runtime) for _ in range(2))
    first.release()
    first.release()
    assert set(runtime.locked) == {1 << 20, 2 << 20}
    second.release()
    assert set(runtime.locked) == {2 << 20}, "the engine had locked it, so it stays so"
    PageLock("the pool", pages, runtime).release()
    assert set(runtime.locked) == {2 << 20}


def test_pages_that_cannot_be_page_locked_are_named_and_the_others_unlocked():
    runtime = Allocator()
    lock, failing = runtime.page_lock, mock.Mock(side_effect=RuntimeError("cuMemHostRegister failed with 2"))
    runtime.page_lock = lambda ptr, nbytes: (lock if ptr == 1 << 20 else failing)(ptr, nbytes)
    with pytest.raises(UsageError, match="8192 bytes of the pool cannot be page-locked .*failed with 2"):
        PageLock("the pool", [Region(1 << 20, 4096), Region(2 << 20, 8192)], runtime)
    assert not runtime.locked


def test_memory_that_cannot_be_had_is_refused_in_words(monkeypatch):
    with pytest.raises(UsageError, match="this machine has"):
        Memory(1 << 60)
    runtime = Allocator()
    runtime.allocate = runtime.page_lock = mock.Mock(side_effect=RuntimeError("cuMemAlloc failed with 2"))
    for where in ("pool", "host"):
        with pytest.raises(UsageError, match="staging memory (on cuda:0 cannot be had|cannot be page-locked) .*with 2"):
            Memory(4096, "cuda:0", runtime=runtime, staging_on=where)
    monkeypatch.setattr("pdstage.stager._host_memory", mock.Mock(side_effect=OSError(12, "Cannot allocate memory")))
    with pytest.raises(UsageError, match="Cannot allocate memory"):
        Memory(4096)


def test_what_is_refused_before_its_launch_ends_with_its_error(stager, device, dst):
    for wrong in (move(0, 9, 2), move(0, 1, 2, order="sideways")):
        stager.gather(1, wrong, dst)
        device.over = set(device.recorded)
        (copied,) = stager.poll()
        assert isinstance(copied.error, UsageError)


def test_a_copy_for_which_the_device_has_no_memory_fails_alone(stager, device, dst, monkeypatch):
    """Nothing is wrong with the device: torch may have grown until nothing was left."""
    with monkeypatch.context() as patch:
        patch.setattr("pdstage.stager._copy_all", mock.Mock(side_effect=DriverError("cuMemAlloc", 2)))
        stager.gather(1, move(0, 1, 2), dst)
    with monkeypatch.context() as patch:
        patch.setattr(device, "pinned", mock.Mock(side_effect=DriverError("cuMemHostAlloc", 2)))
        patch.setattr(stager._stream, "_spare", [])
        stager.gather(2, move(0, 1, 2), dst)
    stager.gather(3, move(0, 1, 2), dst)
    device.over = set(device.recorded)
    ended = {copied.ticket: str(copied.error) for copied in stager.poll()}
    assert "cuMemAlloc failed with 2" in ended[1]
    assert "cuMemHostAlloc failed with 2" in ended[2]
    assert ended[3] == "None"


def test_a_rate_that_is_not_had_ends_no_copy_of_the_node_before(pool, stager, device, dst, monkeypatch):
    monkeypatch.setattr("pdstage.stager._RATE_WAIT_S", 0.0)
    stager.gather(1, move(0, 1, 2), dst)
    device.over = set(device.recorded)
    assert [copied.ticket for copied in stager.poll()] == [1]
    stager.give_back()
    again = Stager(pool, runtime=device)
    assert again._stream.seconds(lambda stream: None) == math.inf
    device.over = set(device.recorded)
    assert again.poll() == []

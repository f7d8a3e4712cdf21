"""Tables on a device: made and dropped without a call that allocates, frees or waits, never overwritten while in use.

The double's streams are held: their work runs when `run` says so.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
from unittest import mock

import numpy as np
import pytest

from pdstage.kernels.arena import Arena
from pdstage.kernels.cuda_runtime import CudaRuntime

SLAB = 8 << 10


@pytest.fixture
def runtime(gpu):
    made = CudaRuntime(1)
    gpu["held"] = 1
    yield made
    run(gpu)


@pytest.fixture
def arena(gpu, runtime):
    made = Arena(runtime, SLAB)
    gc.collect()  # what another file's tests left
    gpu.forget_calls()
    return made


def run(gpu, *streams):
    """All that is in these streams, or in all of them."""
    with gpu.on(1):
        for stream in streams:
            gpu.driver.call("cuStreamSynchronize", ctypes.c_void_p(stream))
        if not streams:
            gpu.driver.call("cuCtxSynchronize")


def foreign(gpu):
    """A stream of somebody else."""
    with gpu.on(1):
        return gpu.driver.new_stream()


def launch(gpu, table, stream):
    """A kernel that reads the table when it runs: what it found is in the memory given back."""
    found = gpu.allocate(4, device=1)
    with gpu.on(1):
        table.before(stream)
        gpu.driver.copy(found.address, table.ptr, 4, stream)
        table.after(stream)
    return found


def table(number, nbytes=64):
    return np.full(nbytes, number, np.uint8)


def fours(number):
    return [number] * 4


def test_a_plan_is_made_launched_and_dropped_without_allocating_or_waiting(gpu, runtime, arena):
    mine, n_waits = runtime.new_stream(), gpu["n_waits"]
    for number in range(50):
        held = arena.put(table(number))
        found = launch(gpu, held, mine)
        run(gpu, mine)
        assert found.view.tolist() == fours(number)
        del held
        arena.reserve()
    assert not [name for name in ("cuMemAlloc", "cuMemHostAlloc", "cuMemFree", "cuStreamDestroy") if gpu.calls(name)]
    assert gpu["n_waits"] - n_waits == 50, "those of `run`"


def test_a_launch_waits_for_the_upload_on_the_device_until_that_is_known_to_be_done(gpu, runtime, arena):
    held, mine = arena.put(table(1)), runtime.new_stream()
    found = launch(gpu, held, mine)
    run(gpu, mine)
    assert found.view.tolist() == fours(1)
    gpu.forget_calls()
    launch(gpu, held, mine)
    launch(gpu, held, mine)
    assert gpu.calls("cuEventQuery") == 1, "once it was done it is not asked again"
    assert not gpu.calls("cuStreamWaitEvent")


@pytest.mark.parametrize("whose", ["the runtime's", "a caller's"])
def test_a_dropped_table_makes_no_call_and_is_not_overwritten_before_its_kernels_have_run(gpu, runtime, arena, whose):
    stream = runtime.new_stream() if whose == "the runtime's" else foreign(gpu)
    held = arena.put(table(7))
    run(gpu)
    found, at = launch(gpu, held, stream), held.ptr
    gpu.forget_calls()
    del held
    gc.collect()
    assert not gpu.calls("cuCtxGetCurrent")
    assert not gpu.calls("cuEventQuery")
    others = []
    for _ in range(3):
        others.append(arena.put(table(9)))
        run(gpu, arena._stream)
    assert at not in [one.ptr for one in others]
    run(gpu)
    assert found.view.tolist() == fours(7)
    assert arena.put(table(9)).ptr == at, "used again once the kernel has run"


def test_somebody_elses_stream_is_not_touched_after_its_launch(gpu, arena):
    """It may be gone by then."""
    held, one, other = arena.put(table(1)), foreign(gpu), foreign(gpu)
    run(gpu)
    for stream in (one, other, one):
        launch(gpu, held, stream)
    run(gpu)
    gpu.driver.free_stream(one)
    gpu.driver.free_stream(other)
    at = held.ptr
    del held
    arena.put(table(2))
    run(gpu)
    assert arena.put(table(3)).ptr == at


def test_what_a_graph_was_recorded_with_is_kept(gpu, runtime, arena):
    """It may be launched at any time; and no event of ours is put into the recording."""
    held, stream, graph = arena.put(table(5)), foreign(gpu), ctypes.c_void_p()
    gpu.driver.call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), 0)
    gpu.forget_calls()
    with mock.patch.object(runtime, "done", side_effect=[False, False, True, True]):
        launch(gpu, held, stream)
    assert not gpu.calls("cuStreamWaitEvent"), "a graph cannot wait for what is not in it"
    assert not gpu.calls("cuEventRecord")
    gpu.driver.call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
    run(gpu)
    at = held.ptr
    del held
    ptrs = []
    for _ in range(20):
        ptrs.append(arena.put(table(9)).ptr)
        run(gpu)
    assert at not in ptrs
    assert ctypes.string_at(at, 4) == b"\5" * 4


def test_room_is_made_before_plans_are_and_else_when_they_need_it(gpu, runtime, arena):
    held = [arena.put(table(n)) for n in range(SLAB >> 10)]
    with mock.patch.object(runtime, "allocate", wraps=runtime.allocate) as allocate:
        arena.reserve()
        arena.reserve()
        held += [arena.put(table(n)) for n in range(SLAB >> 10)]
        allocate.assert_called_once_with(SLAB)  # half a slab and more was free
        held += [arena.put(table(1)), arena.put(table(1, 3 * SLAB))]
    assert [call.args for call in allocate.mock_calls] == [(SLAB,), (SLAB,), (4 * SLAB,)]
    places = sorted((one.ptr, one.ptr + 1024) for one in held[:-1])
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))


def test_room_that_cannot_be_made_is_for_the_plan_to_miss(gpu, arena):
    """Nobody's session ends for it."""
    held = [arena.put(table(n)) for n in range(SLAB >> 10)]
    gpu["memory"] = 0
    arena.reserve()
    with pytest.raises(RuntimeError, match="failed with 2"):
        arena.put(table(1))
    run(gpu)
    held.pop()
    arena.reserve()
    run(gpu)
    assert arena.put(table(2)).ptr, "what is free again serves"


def test_streams_without_end_leave_few_events(gpu, arena):
    held = arena.put(table(1))
    for _ in range(200):
        stream = foreign(gpu)
        launch(gpu, held, stream)
        run(gpu, stream)
    assert len(held._place.events) <= 64

"""One device through its driver, on the double: whose context is current, capture modes, streams and events."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from pdstage import UsageError
from pdstage.kernels import driver
from pdstage.kernels.cuda_runtime import CudaRuntime
from pdstage.plan.spans import Spans


@pytest.fixture
def runtime(gpu):
    return CudaRuntime(1)


def now(gpu):
    """The calling thread's device and capture mode."""
    mode = gpu.driver.capture_mode(driver.RELAXED)
    gpu.driver.capture_mode(mode)
    device = ctypes.c_int(-1)
    gpu.driver.call("cuCtxGetDevice", ctypes.byref(device))
    return device.value, mode


def test_the_context_and_the_mode_before_are_there_again_even_if_it_raises(gpu):
    gpu.driver.capture_mode(1)
    driver.thread.relaxed = False
    with pytest.raises(ValueError, match="a turn"), gpu.on(1):
        assert now(gpu) == (1, driver.RELAXED)
        raise ValueError("a turn")
    assert now(gpu) == (0, 1)
    gpu.driver.capture_mode(driver.RELAXED)
    driver.thread.relaxed = True


def test_an_inner_one_makes_no_call_for_what_is_so_already(gpu):
    with gpu.on(1):
        gpu.forget_calls()
        inner = gpu.on(1)
        gpu.forget_calls()
        with inner:
            assert now(gpu) == (1, driver.RELAXED)
        assert not gpu.calls("cuCtxSetCurrent")
        with gpu.on(0):
            assert now(gpu) == (0, driver.RELAXED)
        assert now(gpu) == (1, driver.RELAXED)


def test_a_new_thread_has_a_mode_of_its_own_and_no_context_before_or_after(gpu):
    """UCX and NIXL look for a context in the thread. And going back to device 0 would make one there, on a GPU that is
    another rank's.
    """
    gpu.reset()
    seen = []

    def look():
        seen.append(gpu.driver.context())
        with gpu.on(1):
            seen.append(now(gpu))
        seen.append(gpu.driver.context())

    gpu["contexts"] = 0
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [0, (1, driver.RELAXED), 0]


def test_a_mode_that_cannot_be_exchanged_is_left_as_it_is(gpu):
    """On a device that failed, which the next call says."""
    on_device = gpu.on(1)
    driver.thread.relaxed = False
    gpu["broken"] = 700
    with on_device:
        assert not driver.thread.relaxed
    gpu["broken"] = 0
    driver.thread.relaxed = True


def test_events_streams_and_memory_are_made_on_the_runtimes_device(gpu, runtime):
    """Stream 0 is another one on each device: an event of device 1 is recorded there, whatever is current."""
    event, stream = runtime.event(), runtime.new_stream()
    assert gpu.driver.attribute(driver.ORDINAL, runtime.allocate(8)) == 1
    for each in (stream, 0):
        runtime.record(event, each)
        assert not runtime.done(event)
        assert runtime.done(event)
    assert [runtime.owns(one) for one in (stream, 0, 7)] == [True, False, False]
    assert now(gpu) == (0, driver.RELAXED)


@pytest.mark.parametrize("status", [700, 900])
def test_an_event_of_a_failed_device_raises(gpu, runtime, status):
    """An illegal address: whoever polls would otherwise poll for ever. And 900, that a recording forbids the question:
    in mode relaxed none does, and outside of it the question has broken that recording.
    """
    event = runtime.event()
    gpu.fail("cuEventQuery", 1, status)
    with pytest.raises(driver.DriverError, match=f"cuEventQuery failed with {status}"):
        runtime.done(event)


def test_a_recording_is_seen_and_relaxed_calls_leave_it_whole(gpu, runtime):
    stream, event = runtime.new_stream(), runtime.event()
    handle, graph = ctypes.c_void_p(stream), ctypes.c_void_p()
    gpu.driver.call("cuStreamBeginCapture_v2", handle, 0)
    assert runtime.capturing(stream)
    assert runtime.done(event)
    runtime.allocate(8)
    gpu.driver.call("cuStreamEndCapture", handle, ctypes.byref(graph))
    assert not runtime.capturing(stream)


def test_what_is_no_stream_is_refused(runtime):
    with pytest.raises(UsageError, match="'stream' is not a stream"):
        runtime.stream("stream")


@pytest.mark.parametrize("old", [False, True], ids=["13.0", "12.8"])
def test_a_batch_is_what_the_header_says(gpu, old):
    library = driver.Cuda(gpu.path)
    if old:
        library._batch = library._slow.cuMemcpyBatchAsync
        library._fault = (ctypes.byref(ctypes.c_size_t()),)
    source, target = (gpu.allocate(64) for _ in range(2))
    source.view[:] = np.arange(64)
    at, nbytes = np.array([40, 3, 20]), np.array([8, 2, 16])
    spans = Spans(source.address + at, target.address + at, nbytes)
    stream = library.new_stream()
    assert library.copy_batch(spans, stream) == 0
    assert library.copy_batch(spans, 0) != 0, "a batch needs a stream"
    event = library.new_event()
    library.record(event, stream)
    while not library.done(event):
        pass
    want = np.zeros(64, np.uint8)
    for begin, n in zip(at, nbytes, strict=True):
        want[begin : begin + n] = source.view[begin : begin + n]
    np.testing.assert_array_equal(target.view, want)


@pytest.mark.parametrize(
    ("supported", "options", "ordering", "needed"),
    [(1, 1, 0, True), (1, 1, 100, False), (1, 1, 200, False), (1, 2, 0, False), (0, 1, 0, False)],
)
def test_a_flush_is_needed_where_the_device_does_not_order_a_nics_writes(gpu, supported, options, ordering, needed):
    gpu["rdma"], gpu["rdma_flush_options"], gpu["rdma_ordering"] = supported, options, ordering
    assert gpu.driver.flushes(0) is needed
    assert not gpu.driver.flushes(7), "a device that is not there"
    gpu.driver.flush()
    assert gpu["flushed"] == 100, "to the owner, of the current context"

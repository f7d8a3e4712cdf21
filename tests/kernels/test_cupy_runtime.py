"""One device through CuPy, with a double in CuPy's place: whose device is current, capture modes, and events."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from pdstage.kernels import driver
from pdstage.kernels.cupy_runtime import CupyRuntime, Current


class Cuda:
    """The calls of `cupy.cuda.runtime` and of the driver that are made here, in a thread whose device is `device`.

    `calls` are those that need a device and a capture mode: what each found.
    """

    class Failed(Exception):
        pass

    def __init__(self, device, in_use):
        self.device = device
        self.mode = 0
        self.used = {device, *in_use} if in_use else set()
        self.status = self.n_set = 0
        self.calls = []

    def in_use(self, device):
        return device in self.used

    def allocate(self, nbytes):
        assert self.mode == driver.RELAXED
        return 1000 + self.device

    def capture_mode(self, mode):
        before, self.mode = self.mode, mode
        return before

    def getDevice(self):  # noqa: N802  (CuPy's names)
        return self.device

    def setDevice(self, device):  # noqa: N802
        self.device = device
        self.n_set += 1
        self.used.add(device)  # as CUDA does from 12 on

    def eventQuery(self, event):  # noqa: N802
        self.calls.append((self.device, self.mode))
        return self.status

    def eventRecord(self, event, stream):  # noqa: N802
        self.calls.append((self.device, self.mode))

    def check_status(self, status):
        if status:
            raise self.Failed(status)


@pytest.fixture
def cuda():
    """A thread on device 0 of a process that uses 0 and 1."""
    return Cuda(0, {1})


def runtime_on(cuda, device):
    """A runtime whose objects say on which device they were made."""
    made = CupyRuntime.__new__(CupyRuntime)
    made._cuda, made._library, made.device, made._held, made._own = cuda, cuda, device, [], set()
    made._event = lambda **_: SimpleNamespace(on=cuda.device, ptr=7)
    made._stream = lambda **_: SimpleNamespace(ptr=2000 + cuda.device)
    return made


def test_the_device_and_the_mode_before_are_there_again_even_if_it_raises(cuda):
    cuda.mode = 1
    with pytest.raises(Cuda.Failed), Current(cuda, 1, cuda):
        assert (cuda.device, cuda.mode) == (1, driver.RELAXED)
        raise Cuda.Failed
    assert (cuda.device, cuda.mode) == (0, 1)


def test_an_inner_one_leaves_the_mode_to_the_outer(cuda):
    """As a launch in a node's turn: it makes no call for what is so already."""
    with Current(cuda, 1, cuda):
        n_set = cuda.n_set
        with Current(cuda, 1, cuda):
            assert (cuda.device, cuda.mode) == (1, driver.RELAXED)
        assert cuda.n_set == n_set
        with Current(cuda, 0, cuda):
            assert (cuda.device, cuda.mode) == (0, driver.RELAXED)
        assert (cuda.device, cuda.mode) == (1, driver.RELAXED)
    assert cuda.mode == 0


def test_a_device_that_is_current_by_number_alone_is_set_all_the_same(cuda):
    """As device 0 is in a new thread, which has no context: UCX and NIXL look for one."""
    with Current(cuda, 0, cuda):
        assert cuda.n_set == 1


def test_threads_have_modes_of_their_own(cuda):
    with Current(cuda, 1, cuda):
        other, seen = Cuda(0, {1}), []

        def look():
            with Current(other, 1, other):
                seen.append(other.mode)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [driver.RELAXED]


def test_a_mode_that_cannot_be_exchanged_is_left_as_it_is(cuda, monkeypatch):
    """On a device that failed, which the next call says."""
    asked = []
    monkeypatch.setattr(cuda, "capture_mode", lambda mode: asked.append(mode) or -1)
    with Current(cuda, 1, cuda):
        pass
    assert asked == [driver.RELAXED]


def test_going_back_makes_no_context(cuda):
    """A new thread of a rank on device 3: device 0 is another rank's."""
    cuda.used = {3}
    with Current(cuda, 3, cuda):
        pass
    assert cuda.used == {3}


def test_events_streams_and_memory_are_made_on_the_runtimes_device(cuda):
    runtime = runtime_on(cuda, 1)
    assert (runtime.event().on, runtime.new_stream(), runtime.allocate(8)) == (1, 2001, 1001)
    assert cuda.device == 0
    assert [runtime.owns(stream) for stream in (2001, 0, 7)] == [True, False, False]


def test_events_are_recorded_and_asked_on_the_runtimes_device(cuda):
    """Stream 0 is another one on each device; and a new thread's first call makes a context where it happens to be."""
    runtime = runtime_on(cuda, 1)
    runtime.record(SimpleNamespace(ptr=7), 0)
    runtime.done(SimpleNamespace(ptr=7))
    assert cuda.calls == [(1, driver.RELAXED)] * 2
    assert cuda.device == 0


@pytest.mark.parametrize(("status", "answer"), [(0, True), (600, False)])
def test_an_event_is_done_or_not_yet(cuda, status, answer):
    cuda.status = status
    assert runtime_on(cuda, 0).done(SimpleNamespace(ptr=7)) is answer


@pytest.mark.parametrize("status", [700, 900])
def test_an_event_of_a_failed_device_raises(cuda, status):
    """An illegal address: whoever polls would otherwise poll for ever. And 900, that a recording forbids the question:
    in mode relaxed none does, and outside of it the question has broken that recording.
    """
    cuda.status = status
    with pytest.raises(Cuda.Failed):
        runtime_on(cuda, 0).done(SimpleNamespace(ptr=7))

"""One device through CuPy, with a double in CuPy's place: whose device is current, and what an event answers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pdstage.kernels import cupy_runtime
from pdstage.kernels.cupy_runtime import CupyRuntime, Current


class Cuda:
    """The calls of `cupy.cuda.runtime` that are made here, in a thread whose device is `device`."""

    class Failed(Exception):
        pass

    def __init__(self, device, in_use):
        self.device = device
        self.in_use = {device, *in_use} if in_use else set()
        self.status = 0
        self.calls = []

    def getDevice(self):  # noqa: N802  (CuPy's names)
        return self.device

    def setDevice(self, device):  # noqa: N802
        self.device = device
        self.in_use.add(device)  # as CUDA does from 12 on

    def eventQuery(self, event):  # noqa: N802
        self.calls.append(self.device)
        return self.status

    def eventRecord(self, event, stream):  # noqa: N802
        self.calls.append(self.device)

    def check_status(self, status):
        if status:
            raise self.Failed(status)


@pytest.fixture
def cuda(monkeypatch):
    """A thread on device 0 of a process that uses 0 and 1."""
    held = Cuda(0, {1})
    monkeypatch.setattr(cupy_runtime, "_in_use", lambda device: device in held.in_use)
    return held


def runtime_on(cuda, device):
    """A runtime whose objects say on which device they were made."""
    made = CupyRuntime.__new__(CupyRuntime)
    made._cuda, made.device, made._held = cuda, device, []
    made._event = lambda **_: SimpleNamespace(on=cuda.device, ptr=7)
    made._memory = SimpleNamespace(Memory=lambda nbytes: SimpleNamespace(ptr=1000 + cuda.device))
    made._stream = lambda **_: SimpleNamespace(ptr=2000 + cuda.device)
    return made


def test_the_device_before_is_current_again(cuda):
    with Current(cuda, 1):
        assert cuda.device == 1
    assert cuda.device == 0


def test_going_back_makes_no_context(cuda):
    """A new thread of a rank on device 3: device 0 is another rank's."""
    cuda.in_use = {3}
    with Current(cuda, 3):
        pass
    assert cuda.in_use == {3}


def test_events_streams_and_memory_are_made_on_the_runtimes_device(cuda):
    runtime = runtime_on(cuda, 1)
    assert (runtime.event().on, runtime.new_stream(), runtime.allocate(8)) == (1, 2001, 1001)
    assert cuda.device == 0


def test_events_are_recorded_and_asked_on_the_runtimes_device(cuda):
    """Stream 0 is another one on each device; and a new thread's first call makes a context where it happens to be."""
    runtime = runtime_on(cuda, 1)
    runtime.record(SimpleNamespace(ptr=7), 0)
    runtime.done(SimpleNamespace(ptr=7))
    assert cuda.calls == [1, 1]
    assert cuda.device == 0


@pytest.mark.parametrize(("status", "answer"), [(0, True), (600, False), (900, False)])
def test_an_event_is_done_or_not_yet(cuda, status, answer):
    cuda.status = status
    assert runtime_on(cuda, 0).done(SimpleNamespace(ptr=7)) is answer


def test_an_event_of_a_failed_device_raises(cuda):
    cuda.status = 700  # an illegal address: whoever polls would otherwise poll for ever
    with pytest.raises(Cuda.Failed):
        runtime_on(cuda, 0).done(SimpleNamespace(ptr=7))

"""NVTX ranges around a device's work. The device is a double here that records them: no GPU is asked."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from pdstage import State, UsageError
from pdstage.kernels.torch_runtime import TorchRuntime
from tests.manager.engine import Rank, drive


class Device:
    """What the stager asks of a runtime, over host memory: every copy is over once launched."""

    def __init__(self) -> None:
        self.log = []
        self.open = []

    current = contextlib.nullcontext
    flushes = False

    def reserve(self):
        pass

    def new_stream(self):
        return 0

    def event(self):
        return object()

    def pinned(self, nbytes):
        return np.zeros(nbytes, np.uint8)

    def record(self, event, stream):
        self.log.append(f"launched in {self.open[-1]}" if self.open else "launched")

    def done(self, event):
        return True

    def push_range(self, name):
        self.open.append(name)
        self.log.append(name)

    def pop_range(self):
        self.open.pop()


def moved(site, monkeypatch, value):
    """Both devices' logs of one room of one chunk."""
    if value is not None:
        monkeypatch.setenv("PDSTAGE_NVTX", value)
    devices, ranks = [Device(), Device()], [Rank(), Rank()]
    for rank, device in zip(ranks, devices, strict=True):
        monkeypatch.setattr(rank.pool, "runtime", lambda device=device: device)
    p, d = site.prefill(ranks[0], path="staged"), site.decode(ranks[1], path="staged")
    devices[0].log.clear()  # what a node measures at its start
    receiver, sender = d.receive("r", site.address), p.send("r")
    receiver.bind(ranks[1].allocate(8), 8)
    sender.chunk(ranks[0].allocate(8), (0, 8))
    sender.finish()
    drive([p, d], lambda: receiver.released and sender.released)
    assert receiver.state is State.SUCCESS
    assert not devices[0].open and not devices[1].open
    return [device.log for device in devices]


def test_launches_and_posts_lie_in_ranges_named_by_room_and_chunk(site, monkeypatch):
    src, dst = moved(site, monkeypatch, "1")
    assert src == [
        "pdstage gather r #0", "launched in pdstage gather r #0", "pdstage write r #0",
    ]  # fmt: skip
    assert dst == [
        "pdstage scatter r #0", "launched in pdstage scatter r #0",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [None, "", "0"])
def test_unasked_there_are_none(site, monkeypatch, value):
    assert moved(site, monkeypatch, value) == [["launched"], ["launched"]]


def test_a_pool_in_host_memory_has_none(site, monkeypatch):
    monkeypatch.setenv("PDSTAGE_NVTX", "1")
    assert site.prefill(Rank()).ranges is None


def test_another_value_is_refused(site, monkeypatch):
    monkeypatch.setenv("PDSTAGE_NVTX", "yes")
    with pytest.raises(UsageError, match="PDSTAGE_NVTX='yes'"):
        site.prefill(Rank())


def test_cupys_library_takes_them():
    """The library itself, which does nothing where no profiler listens; it needs no device."""
    pytest.importorskip("cupy")
    from pdstage.kernels.cuda_runtime import CudaRuntime  # noqa: PLC0415

    runtime = CudaRuntime.__new__(CudaRuntime)
    runtime.push_range("pdstage test")
    runtime.pop_range()


def test_torchs_library_is_asked():
    class Nvtx:
        def __init__(self):
            self.said = []
            self.range_push = self.said.append

        def range_pop(self):
            self.said.append("pop")

    runtime = TorchRuntime.__new__(TorchRuntime)
    runtime._torch = type("Torch", (), {"cuda": type("Cuda", (), {"nvtx": Nvtx()})})
    runtime.push_range("a")
    runtime.pop_range()
    assert runtime._torch.cuda.nvtx.said == ["a", "pop"]

"""The runtime that lists of items go through where torch is what there is: streams, events and uploads."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pdstage.errors import UsageError
from pdstage.kernels.torch_runtime import TorchRuntime

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.fixture
def runtime():
    return TorchRuntime("cuda:0")


def test_a_stream_is_what_torch_cupy_or_an_integer_says(runtime):
    stream = torch.cuda.Stream(0)
    like_cupy = type("Stream", (), {"ptr": stream.cuda_stream})()
    assert {runtime.stream(one) for one in (stream, like_cupy, stream.cuda_stream)} == {stream.cuda_stream}
    with torch.cuda.stream(stream):
        assert runtime.stream(None) == stream.cuda_stream
    assert runtime.stream(None) == runtime.stream(1) == runtime.stream(0) == 0
    with pytest.raises(UsageError, match="a str is no stream"):
        runtime.stream("fast")


def test_an_upload_is_in_its_stream_and_done_when_its_event_says(runtime):
    stream = torch.cuda.Stream(0)
    handle = runtime.stream(stream)
    held, ptr, event = runtime.pinned(4096), runtime.allocate(4096), runtime.event()
    assert runtime.done(event), "never recorded"
    held[:] = np.arange(4096) % 251
    runtime.upload(ptr + 1024, held[:2048], handle)
    runtime.record(event, handle)
    stream.synchronize()
    assert runtime.done(event)
    there = {"shape": (2048,), "typestr": "|u1", "data": (ptr + 1024, False), "version": 3}
    tensor = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=there), device="cuda:0")
    np.testing.assert_array_equal(tensor.cpu().numpy(), held[:2048])


def test_capturing_is_of_the_stream_that_is_asked_about(runtime):
    stream, other = torch.cuda.Stream(0), torch.cuda.Stream(0)
    graph, counter = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda:0")
    assert not runtime.capturing(runtime.stream(stream))
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        counter += 1
        assert runtime.capturing(runtime.stream(stream))
        assert not runtime.capturing(runtime.stream(other))
    assert not runtime.capturing(runtime.stream(stream))

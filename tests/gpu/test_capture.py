"""While a thread records a graph, in the mode that forbids the others most, a node's thread goes on with its work.

And it has its device's context from its first call on.
"""

from __future__ import annotations

import importlib.util
import threading

import pytest

torch = pytest.importorskip("torch")

from gpu.plain import ITEMS, Plain  # noqa: E402  (needs torch)

from pdstage.kernels import driver  # noqa: E402

pytestmark = pytest.mark.gpu

RUNTIMES = ["torch", "cupy"]


@pytest.fixture(params=RUNTIMES)
def runtime(request):
    if request.param == "torch":
        from pdstage.kernels.torch_runtime import TorchRuntime  # noqa: PLC0415

        return TorchRuntime("cuda:0")
    if not importlib.util.find_spec("cupy"):
        pytest.skip("cupy is not installed")
    from pdstage.kernels.cuda_runtime import held_runtime  # noqa: PLC0415

    return held_runtime("cuda:0")[0]


def in_a_thread(work):
    """Runs it in a new thread, and raises what it raised."""
    raised = []

    def run():
        try:
            work()
        except Exception as error:  # noqa: BLE001  (for the main thread to raise)
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    for error in raised:
        raise error


def recorded(work):
    """A graph of one kernel, recorded while `work` runs in another thread; it must replay."""
    out, graph = torch.zeros(1, device="cuda:0"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        out += 1
        in_a_thread(work)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert out.item() == 3


def test_events_are_asked_for_and_memory_is_allocated_while_another_thread_records(runtime):
    stream, event = runtime.new_stream(), runtime.event()

    def turn():
        with runtime.current():
            runtime.record(event, stream)
            while not runtime.done(event):
                pass
            runtime.allocate(1 << 20)
            runtime.pinned(4096)

    recorded(turn)


def test_an_engines_event_is_asked_in_a_turn_while_another_thread_records(runtime):
    event = torch.cuda.Event()
    event.record()
    torch.cuda.synchronize()

    def turn():
        with runtime.current():
            assert event.query()

    recorded(turn)


@pytest.mark.parametrize("on_device", [True, False], ids=["list-on-device", "list-on-host"])
def test_plans_are_made_run_and_dropped_while_another_thread_records(variant, on_device):
    """With nothing around them: an engine's own calls."""
    plain = Plain(variant)
    out, expected, side = plain.staging(len(ITEMS)), plain.expected(ITEMS), torch.cuda.Stream()
    index = plain.list(ITEMS, on_device=on_device)

    def gather():
        other = plain.again()
        other.gather(*plain.at(out, index), stream=side.cuda_stream)
        del other

    recorded(gather)
    side.synchronize()
    assert torch.equal(out, expected)


def test_a_new_thread_has_the_devices_context_inside_and_none_after(runtime):
    def turn():
        library = driver.cuda()
        assert library.context() == 0
        with runtime.current():
            assert library.context() == library.primary(0)
        assert library.context() in (0, library.primary(0))

    if torch.version.hip:
        pytest.skip("HIP binds no contexts")
    in_a_thread(turn)

"""Nodes at work while another thread records a CUDA graph in the mode that forbids other threads most of CUDA."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")
pytest.importorskip("zmq")
pytest.importorskip("cupy")

from gpu.ranks import GpuRank  # noqa: E402  (needs torch)

from pdstage import State  # noqa: E402
from pdstage.control.bootstrap import BootstrapServer  # noqa: E402
from tests.manager.engine import (  # noqa: E402
    N_ROOMS,
    TOKENS,
    decode_node,
    prefill_node,
    receive_all,
    send_all,
    write_all,
)

pytestmark = pytest.mark.gpu
WAIT_S = 60.0


def captured(held):
    """A graph of a few kernels recorded in global mode, and what its replay must leave."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="global"):
        for _ in range(50):
            held += 1
    return graph


def test_rooms_go_on_while_another_thread_records_graphs():
    """Every graph is whole, and so is every room: a turn neither spoils a recording nor takes it for a failure."""
    source, target, held = GpuRank("cuda:0"), GpuRank("cuda:0", page=8, hnd=True), torch.zeros(1024, device="cuda:0")
    options = {"path": "staged", "progress": "thread"}
    with (
        BootstrapServer("127.0.0.1:0") as server,
        prefill_node(source, server.address, **options) as prefill,
        decode_node(target, **options) as decode,
    ):
        written = write_all(source)  # here: what a thread of the test did to the device would spoil a recording too
        receivers, pages = receive_all(decode, target, server.address)
        ended, wrong = threading.Event(), []

        def wait():
            try:
                senders = send_all(prefill, written)
                for receiver in receivers:
                    receiver.wait(WAIT_S)
                for one in (*senders, *receivers):
                    one.wait_released(WAIT_S)
            except Exception as error:  # noqa: BLE001  (for the main thread to show)
                wrong.append(error)
            finally:
                ended.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        n_graphs = 0
        while not ended.is_set() or not n_graphs:
            held.zero_()
            torch.cuda.synchronize()
            captured(held).replay()
            torch.cuda.synchronize()
            assert bool((held == 50).all())
            n_graphs += 1
        waiter.join()
        assert not wrong
        assert [int(receiver.state) for receiver in receivers] == [int(State.SUCCESS)] * N_ROOMS
        assert all(target.holds(room, TOKENS, pages[room]) for room in range(N_ROOMS))

"""Rooms from one GPU to another of the same host, on the double: one pass into the lease, or two, and equal bytes."""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest

from pdstage import Layout, Pool, State, TransportError
from pdstage.control.bootstrap import BootstrapServer
from pdstage.kernels.virtual_memory import DESCRIPTOR, FABRIC
from pdstage.manager.calibration import Calibration
from pdstage.plan.cost import CostModel
from pdstage.tools.results import save
from pdstage.transport.local import LocalTransport
from tests import cuda_double, processes
from tests.manager.engine import (
    IMPATIENT,
    N_ROOMS,
    QUICK,
    TOKENS,
    Rank,
    all_arrive,
    decode_node,
    drive,
    prefill_node,
    send_all,
    serve_all,
    unheard,
    write_all,
)
from tests.rows import both_paths

pytestmark = pytest.mark.skipif(bool(cuda_double.missing()), reason=cuda_double.missing())


DEVICE = "cuda:0"
STAGING_NBYTES = 1 << 16


class DeviceRank(Rank):
    """A rank whose pages lie in the double's device memory; `types`: in expandable segments with such handles.

    `k_on_host`: K stays in host memory.
    """

    def __init__(self, types=None, *, k_on_host=False, **shape):
        super().__init__(**shape)
        tensors = self.v if k_on_host else self.tensors
        nbytes, gpu = sum(one.nbytes for one in tensors), cuda_double.double()
        held = gpu.allocate(nbytes) if types is None else gpu.expandable([4096] * -(-nbytes // 4096), types)
        at, moved = 0, []
        for one in tensors:
            moved.append(held.view[at : at + one.nbytes].reshape(one.shape))
            at += one.nbytes
        self.k, self.v = self.k if k_on_host else moved[: self.layers], moved[-self.layers :]
        layout = self.layout_of()
        inside = [held.address <= region.base < held.address + nbytes for region in layout.regions]
        assert inside.count(True) == 1 and inside.count(False) == (self.layers if k_on_host else 0)
        regions = [replace(one, kind="cuda") if at else one for one, at in zip(layout.regions, inside, strict=True)]
        self.pool = Pool.of(Layout(tuple(regions), layout.components), DEVICE, keep=held)


def serve_decode(pipe, address, path="staged", types=None, k_on_host=False, config=QUICK, **where):
    """Receives rooms and says for each how it ended, whether it holds what it must, and what its transport copied.

    `where` says where its staging memory lies; on the device if nothing is said. `types` and `k_on_host`
    are its pool's.
    """
    with cuda_double.use():
        rank = DeviceRank(types, page=8, hnd=True, k_on_host=k_on_host)
        options = {"transport": "local", "path": path, "config": config, "staging_nbytes": STAGING_NBYTES}
        with decode_node(rank, **options | where) as node:
            serve_all(pipe, node, rank, address)


class TwoPasses(LocalTransport):
    """Maps nothing for its callers: what is gathered is written by a copy."""

    def mapped(self, peer, address, nbytes):
        del peer, address, nbytes


@pytest.fixture
def gpu():
    gc.collect()  # the errors of a test before hold its frames, and with them what it mapped
    with cuda_double.use() as gpu:
        gpu.reset()
        yield gpu
        assert not gpu.broken()


@contextmanager
def decoding(address, **given):
    """A decode rank in a process of its own; it ends with the block."""
    process, ours = processes.child(partial(serve_decode, **given), address)
    try:
        yield ours, process
        if process.is_alive():
            ours.send("end")
            process.join(60)
    finally:
        process.kill()
        process.join()


@pytest.fixture
def address():
    with BootstrapServer("127.0.0.1:0") as server:
        yield server.address


def test_a_devices_copies_cost_what_they_were_measured_to(gpu, address, monkeypatch, tmp_path):
    """Not what the host's do; a calibration file has the last word."""
    monkeypatch.setattr("pdstage.stager._RATE_WAIT_S", 60.0)  # however busy this machine is
    rank, options = DeviceRank(0), {"directory": address, "transport": "local"}
    with prefill_node(rank, staging_nbytes=STAGING_NBYTES, **options) as node:
        made = node.cost_of(node.transport.traits)
        known = CostModel.linear(1e9, 1e-6, 1e-5)
        assert 0 < made.gather_bytes_per_s == made.scatter_bytes_per_s != known.gather_bytes_per_s
    file = tmp_path / "calibration.json"
    made = Calibration(version=1, made_at="", prefill_host="", decode_host="", transports={"local": known})
    save(made, file)
    with prefill_node(rank, staging_nbytes=STAGING_NBYTES, calibration=file, **options) as node:
        assert node.cost_of(node.transport.traits) == known


@pytest.mark.parametrize("runs", [True, False])
def test_a_device_that_is_busy_as_a_node_starts(gpu, address, monkeypatch, caplog, runs):
    """Its copies are not measured, and the node starts. What was launched is a copy like any: closed before that has
    run, nothing is given back.
    """
    monkeypatch.setattr("pdstage.stager._RATE_WAIT_S", 0.01)
    gpu["held"] = 1
    node = prefill_node(DeviceRank(0), staging_nbytes=STAGING_NBYTES, directory=address, transport="local")
    cost = node.cost_of(node.transport.traits)
    assert cost.gather_bytes_per_s == CostModel.linear(1.0, 1.0, 1.0).gather_bytes_per_s
    assert node.stager.launched
    if runs:
        gpu["held"] = 0
        drive([node], lambda: not node.stager.launched)
    assert node.close(0.1) == runs
    assert ("closed while the device may still use this node's memory" in caplog.text) != runs


@pytest.mark.parametrize("transport", [LocalTransport, TwoPasses])
@both_paths
def test_rooms_between_two_processes(gpu, address, path, transport):
    """A tag that left before its kernel or its copy were over would be seen: the pages are looked at then."""
    rank = DeviceRank(n_pages=128)
    ran, options = gpu["n_kernels"], {"transport": transport(), "path": path, "staging_nbytes": STAGING_NBYTES}
    with prefill_node(rank, address, **options) as node, decoding(address, path=path) as (decode, _):
        all_arrive(decode, node, rank)
        stats, one_pass = node.stats(), transport is LocalTransport
        assert stats["sessions_over_local"] == 1
        assert gpu["n_kernels"] - ran >= N_ROOMS if path == "staged" or one_pass else gpu["n_kernels"] == ran
        n_copies = gpu.copies_of(node.memory.region.base if path == "staged" else rank.pool.keep.address)
        assert n_copies == 0 if one_pass else n_copies >= N_ROOMS
        assert (stats["chunks_direct"] > 0, stats["chunks_staged"] > 0) == (path == "direct", path == "staged")


@pytest.mark.parametrize("k_on_host", [False, True])
def test_rooms_with_staging_memory_of_the_nodes_own(gpu, address, k_on_host):
    """In page-locked host memory: no byte of it passes CUDA IPC. Where both sides' K lies in host memory, rooms land on
    the device, as its driver allocates it, and a kernel scatters K to the host.
    """
    rank, before = DeviceRank(n_pages=128, k_on_host=k_on_host), gpu["n_copies"]
    kind, own = ("cuda", {}) if k_on_host else ("cpu", {"staging_on": "host"})
    with (
        prefill_node(rank, address, transport="local", path="staged", staging_nbytes=STAGING_NBYTES, **own) as node,
        decoding(address, k_on_host=k_on_host, **own) as (decode, _),
    ):
        assert node.memory.region.kind == kind
        assert gpu["n_locked"] == (len(rank.pool.on_host) if k_on_host else 1)
        all_arrive(decode, node, rank)
        (session,) = node.core.sessions.values()
        assert {lane.kind for lane in session.lanes} == {kind}
        assert gpu["n_open"] == k_on_host
        assert k_on_host or gpu["n_copies"] == before
    assert not gpu["n_locked"]


@pytest.mark.parametrize(("types", "path"), [(DESCRIPTOR, "direct"), (FABRIC, "direct"), (0, "auto")])
def test_a_pool_of_expandable_segments_is_written_in_place_or_staged_and_that_is_said(
    gpu, address, types, path, caplog
):
    """Without a kind of handle that others open: in staging memory's way, and with a warning that says what to do."""
    rank = DeviceRank(n_pages=128)
    with (
        caplog.at_level(logging.INFO),
        prefill_node(rank, address, transport="local", path=path, staging_nbytes=STAGING_NBYTES) as node,
        decoding(address, path="auto", types=types) as (decode, _),
    ):
        all_arrive(decode, node, rank)
        stats = node.stats()
        assert (stats["chunks_direct"] > 0, stats["chunks_staged"] > 0) == (bool(types), not types)
        (session,) = node.core.sessions.values()
        assert session.in_place is bool(types)
        said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
        assert len([one for one in said if "all of its chunks are staged" in one]) == (0 if types else 1)
        assert types or all("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False" in one for one in said)


def test_a_copy_into_pages_whose_tag_cannot_be_sent_fails_its_room(gpu, address, monkeypatch):
    rank, refused = DeviceRank(n_pages=128), mock.Mock(side_effect=TransportError("no tag leaves", remedy="wait"))
    with (
        prefill_node(rank, address, transport="local", path="direct") as node,
        decoding(address, path="direct") as (decode, _),
    ):
        monkeypatch.setattr(node.transport, "notify", refused)
        senders = send_all(node, write_all(rank))
        drive([node], lambda: all(sender.released for sender in senders) and decode.poll())
        assert {state for state, _ in decode.recv()} == {State.FAILED}
        assert all("no tag leaves" in str(sender.error) for sender in senders)


@pytest.mark.parametrize(
    ("path", "fenced"), [("staged", False), pytest.param("direct", False, marks=pytest.mark.full), ("direct", True)]
)
def test_a_killed_decode_gives_the_source_back_once_what_writes_there_is_over(gpu, address, path, fenced):
    """I8: neither the peer's death nor an operator's word of it ends a gather or copy that reads this node's pages."""
    rank = DeviceRank(n_pages=128)
    options = {"transport": "local", "path": path, "config": IMPATIENT}
    with (
        prefill_node(rank, address, staging_nbytes=STAGING_NBYTES, **options) as node,
        decoding(address, config=IMPATIENT, path=path) as (_, process),
    ):
        try:
            pages = rank.allocate(TOKENS)
            rank.write(0, TOKENS, pages)
            sender = node.send(0)
            gpu["held"] = 1
            sender.chunk(pages, (0, TOKENS))
            under_way = "placed" if path == "staged" else "copies"
            drive([node], lambda: getattr(node.data_path, under_way))
            process.kill()
            process.join()
            unheard(node)
            drive([node], lambda: sender.state is State.FAILED)
            if fenced:
                assert [node.fence(endpoint) for endpoint in node.unfenced()] == [1]
            for _ in range(50):
                node.sessions._dead_check_at = 0.0
                node.turn()
            assert not sender.released
            assert path == "staged" or node.unfenced()
            assert gpu["n_open"] == 1, "a kernel writes there"
            gpu["held"] = 0
            drive([node], lambda: sender.released)
            node.sessions._dead_check_at = 0.0
            drive([node], lambda: not node.unfenced())
            assert not getattr(node.data_path, under_way)
        finally:
            gpu["held"] = 0

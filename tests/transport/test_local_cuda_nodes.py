"""Rooms from one GPU to another of the same host, on the double: one pass into the lease, or two, and equal bytes."""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
from transport.device_rank import STAGING_NBYTES, DeviceRank, serve_decode

from pdstage import State, TransportError
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
    TOKENS,
    all_arrive,
    drive,
    prefill_node,
    send_all,
    unheard,
    write_all,
)
from tests.rows import both_paths

pytestmark = pytest.mark.skipif(bool(cuda_double.missing()), reason=cuda_double.missing())


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


@pytest.mark.parametrize(
    ("where", "kind"), [({"staging_on": "host"}, "cpu"), ({}, "cuda"), ({"k_on_host": True}, "cuda")]
)
def test_rooms_with_staging_memory_of_the_nodes_own(gpu, address, where, kind):
    """On the device, as its driver allocates it; or in page-locked host memory, of which no byte passes CUDA IPC. Where
    both sides' K lies in host memory, rooms land on the device, and a kernel scatters K to the host.
    """
    k_on_host = where.get("k_on_host", False)
    rank, before = DeviceRank(n_pages=128, k_on_host=k_on_host), gpu["n_copies"]
    own = {"staging_nbytes": STAGING_NBYTES} | {name: value for name, value in where.items() if name == "staging_on"}
    given = own | where if not k_on_host else where
    with (
        prefill_node(rank, address, transport="local", path="staged", **own) as node,
        decoding(address, **given) as (decode, _),
    ):
        assert node.memory.region.kind == kind
        assert gpu["n_locked"] == (len(rank.pool.on_host) if k_on_host else kind == "cpu")
        all_arrive(decode, node, rank)
        (session,) = node.core.sessions.values()
        assert {lane.kind for lane in session.lanes} == {kind}
        assert gpu["n_open"] == (kind == "cuda")
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

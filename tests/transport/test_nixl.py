"""What only the NIXL transport offers: network devices, telemetry, devices of its descriptors."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
import sys

import numpy as np
import pytest
from transport.conftest import VARIANTS, Pair
from transport.endpoint import NBYTES, Endpoint, Log, Remote, altered, delivers, described, meet

from tests import cuda_double
from tests.cables import hosts, ip, two_hosts

pytest.importorskip("nixl._api", exc_type=ImportError)

from pdstage.errors import PeerError, TransportError, UsageError
from pdstage.kernels.virtual_memory import DESCRIPTOR, FABRIC
from pdstage.layout import Region
from pdstage.transport import PostFailed, _fabric, _rails, open_transport
from pdstage.transport._nixl_agent import descriptors, is_known
from pdstage.transport.base import Ranges
from pdstage.transport.nixl import _Description

__all__ = ["two_hosts"]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")
OVER_TCP = {"UCX_TLS": "tcp,self"}


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.fixture
def host(tmp_path, monkeypatch) -> None:
    """The sysfs of a host with two RDMA devices, one of them with two ports."""
    for name, ports in (("mlx5_0", 1), ("mlx5_1", 2)):
        for port in range(1, ports + 1):
            state = tmp_path / "class/infiniband" / name / "ports" / str(port) / "state"
            state.parent.mkdir(parents=True)
            state.write_text("4: ACTIVE\n")
    monkeypatch.setattr(_rails, "SYS", tmp_path)


def test_a_cpu_build_of_torch_is_not_imported_to_learn_that_it_has_no_cuda():
    if not importlib.metadata.version("torch").endswith("+cpu"):
        pytest.skip("torch is built for a GPU")
    code = "import pdstage.transport.nixl, nixl, sys; print(nixl.__name__, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["nixl", "False"]


def test_devices_get_the_names_that_ucx_knows(host):
    assert _fabric.device_ports(["mlx5_0", "lo"]) == ["mlx5_0:1", "lo"]
    assert _fabric.device_ports(["mlx5_1"]) == ["mlx5_1:1", "mlx5_1:2"]
    assert _fabric.device_ports(["mlx5_1:2"]) == ["mlx5_1:2"]


@pytest.mark.parametrize("devices", [["mlx5_7"], ["mlx5_0:2"], ["lo:1"], ["lo", ""], "lo"])
def test_what_is_not_here_is_refused_by_name(host, devices):
    with pytest.raises(UsageError, match="device.*lo") as refused:
        open_transport("nixl", devices=devices)
    assert refused.value.fields == {"field": "devices"}


def test_rdma_ports_stay_where_the_network_is_chosen(host, tmp_path, monkeypatch):
    """Those that are active and that this process may open."""
    monkeypatch.setattr(_rails, "_DEV", tmp_path / "dev")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    for i, name in enumerate(("mlx5_0", "mlx5_1")):
        (tmp_path / f"class/infiniband_verbs/uverbs{i}").mkdir(parents=True)
        (tmp_path / f"class/infiniband_verbs/uverbs{i}/ibdev").write_text(f"{name}\n")
        for port in (tmp_path / "class/infiniband" / name / "ports").iterdir():
            (port / "state").write_text("4: ACTIVE\n" if port.name == "1" else "1: DOWN\n")
    assert _fabric.devices_at("127.0.0.1") == ["lo"]
    (tmp_path / "dev/infiniband/uverbs1").write_bytes(b"")
    assert _fabric.devices_at("127.0.0.1") == ["lo", "mlx5_1:1"]
    assert _fabric.devices_at("::1") == ["lo", "mlx5_1:1"]
    assert _fabric.devices_at("192.0.2.254") == [], "nobody's: what UCX finds"


def test_the_environment_is_as_before_and_the_option_goes_over_it(monkeypatch):
    """Row: library error."""
    monkeypatch.setenv("UCX_NET_DEVICES", "nowhere")
    with pytest.raises(TransportError, match=r"NIXL does not start: nixlBackendError\(NIXL_ERR_"):
        open_transport("nixl")
    open_transport("nixl", devices=["lo"]).close()
    assert os.environ["UCX_NET_DEVICES"] == "nowhere"


@pytest.mark.parametrize(("said", "seconds"), [({}, 60), ({"UCX_TCP_USER_TIMEOUT": "7s"}, 7)])
def test_a_write_over_tcp_that_nobody_acknowledges_is_given_up(said, seconds):
    """Else a host that vanished keeps the memory of a post in use for Linux' quarter of an hour."""
    a, b = Remote("nixl", OVER_TCP | said), Endpoint("nixl")
    meet(a, b)
    delivers(a, b)
    assert a.user_timeouts_s() == {seconds}
    a.shut()
    b.close()


@pytest.mark.parametrize("options", [{}, {"telemetry": True}])
def test_figures_of_a_post_where_they_were_asked_for(options):
    a, b = Endpoint("nixl", **options), Endpoint("nixl")
    meet(a, b)
    n, log = 4096, Log(a, b)
    a.fill(0, data := np.random.default_rng(0).bytes(n * 64))
    a.post("b", [(64 * i, b.base + 128 * i, 64) for i in range(n)], b"many")
    log.until(lambda: log.done(a) and log.tags(b) == [b"many"])
    assert np.frombuffer(b.read(0, n * 128), np.uint8).reshape(n, 128)[:, :64].tobytes() == data
    figures = log.ended(a)[0].figures
    if options:
        assert (figures.n_descriptors, figures.nbytes) == (n, n * 64)
        assert figures.write_s >= figures.post_s >= 0
    else:
        assert figures is None
    a.close()
    b.close()


def test_each_descriptor_names_the_device_its_memory_is_on():
    """One post may read several GPUs' memory; where the regions are of several, a single span is no exception."""
    two = Ranges("these", [Region(1 << 40, 4096, "cuda", 0), Region(1 << 41, 4096, "cuda", 3)])

    def rows_of(held: Ranges, at: object, nbytes: object) -> object:
        return descriptors(at, nbytes, held.find(at, nbytes))

    rows = rows_of(two, ints(1 << 41, 1 << 40, (1 << 41) + 64), ints(64, 32, 16))
    assert [rows[i] for i in range(3)] == [(1 << 41, 64, 3), (1 << 40, 32, 0), ((1 << 41) + 64, 16, 3)]
    only = rows_of(two, ints((1 << 41) + 8), ints(8))
    assert only[0] == ((1 << 41) + 8, 8, 3)
    with pytest.raises(UsageError, match="post each kind by itself"):
        rows_of(two.with_regions([Region(1 << 20, 4096)]), ints(1 << 20, 1 << 40), ints(8, 8))


def test_short_lived_peers_over_tcp_leave_no_descriptors(stock):
    """I14: each is a connection whose other end goes away without a word; every second is disconnected before that."""
    variant = VARIANTS["nixl-tcp"]
    a, b = stock.remote(variant, "a"), stock.remote(variant, "b")
    n_fds = []
    for life in range(40):
        b.renew()
        meet(a, b)
        delivers(a, b)
        if life % 2:
            a.disconnect("b")
            a.forget("b")
        n_fds.append(a.n_fds())
    assert n_fds[-1] <= n_fds[1] + 1, n_fds
    a.close()


def test_the_agent_of_a_dead_peer_goes_with_its_last_post(stock):
    """I14: not with `disconnect`, which would hide how the posts to a peer that is only stopped end."""
    variant = VARIANTS["nixl-tcp"]
    a, b = stock.remote(variant, "a"), Remote(variant.transport, variant.environment)
    Pair(variant, a, b).connect().deliver(b"while it lives")
    b.stop()
    tickets = [a.post("b", [(0, b.base, NBYTES)], b"") for _ in range(4)]
    a.disconnect("b")
    assert a.n_agents() == 1
    b.kill()
    log = Log(a)
    log.until(lambda: len(log.ended(a)) == len(tickets))
    assert a.n_agents() == 0
    assert isinstance(log.ended(a)[-1], PostFailed)
    assert not log.ended(a)[-1].settled, "what it has sent may lie in the peer's sockets, and land when that polls"
    a.close()


@as_root
@pytest.mark.parametrize(
    ("n_devices", "options", "n_used"),
    [
        pytest.param(1, {}, 1, marks=pytest.mark.full),
        (2, {}, 2),
        (2, {"rails": 1}, 1),
        (3, {}, 2),  # MAX_RMA_RAILS as NIXL sets it
        (3, {"rails": 3}, 3),
    ],
)
def test_a_large_write_uses_the_devices_it_was_given(n_devices, options, n_used):
    """As many of them as `rails` says, each for an equal share."""
    with hosts(3) as spaces:
        ends = [
            Remote("nixl", OVER_TCP, netns=space, devices=[f"{side}{i}" for i in range(n_devices)], **options)
            for side, space in zip("ab", spaces, strict=True)
        ]
        a, b = ends
        try:
            meet(a, b)
            a.fill(0, data := np.random.default_rng(0).bytes(NBYTES))
            tickets = [a.post("b", [(0, b.base, NBYTES)], b"") for _ in range(4)]
            log = Log(a, b)
            log.until(lambda: sorted(log.done(a)) == tickets)
            assert b.read(0, NBYTES) == data
            sent = [a.n_sent(f"a{i}") > NBYTES for i in range(3)]
            assert sum(sent) == n_used
            assert not any(sent[n_devices:])
        finally:
            for end in ends:
                end.shut()


@as_root
@pytest.mark.parametrize(
    ("options", "said", "others"),
    [
        ({"host": "10.77.0.1"}, {}, {"10.77.0.1"}),
        ({"host": "fd77::1"}, {}, {"10.77.1.1"}),  # of an interface with both UCX takes the IPv4 address
        ({"host": "127.0.0.5"}, {}, set()),
        ({"host": "10.77.9.9"}, {}, {"10.77.0.1", "10.77.1.1"}),
        ({}, {}, {"10.77.0.1", "10.77.1.1"}),
        ({"host": "10.77.0.1", "devices": ["a1"]}, {}, {"10.77.1.1"}),
        ({"host": "10.77.0.1"}, {"UCX_NET_DEVICES": "a1"}, {"10.77.1.1"}),
    ],
    ids=["IPv4", "IPv6", "loopback", "of nobody", "without", "devices", "environment"],
)
def test_ucx_listens_on_the_control_planes_network_alone(two_hosts, options, said, others):
    """Unless somebody chose devices, or no interface holds that address."""
    ip("-n", two_hosts[0], "addr", "add", "fd77::1/64", "dev", "a1", "nodad")
    a = Remote("nixl", OVER_TCP | said, netns=two_hosts[0], **options)
    try:
        assert a.listening() == others | ({"127.0.0.1"} if "a1" not in str((options, said)) else set())
    finally:
        a.shut()


def test_altered_metadata_is_refused_before_nixl_reads_it(caplog):
    """Of 200 altered blobs 4 ended the process: a peer took a node down. UCX ends the process at an address of a
    version that it does not know. The layout of a later NIXL is left to that.
    """
    with contextlib.closing(Endpoint("nixl")) as stranger, contextlib.closing(Endpoint("nixl")) as a:
        told = described(stranger, _Description)
        with pytest.raises(PeerError, match="refuses the metadata of peer 'it'"):
            a.connect("it", altered(stranger, _Description, metadata=told.metadata[:-1]))
    metadata, life = told.metadata, told.life
    said = [metadata[:at] for at in range(0, len(metadata), 7)] + [metadata + more for more in (b"|", metadata)]
    said += [metadata.replace(b"pdstage.", wrong, 1) for wrong in (b"pdstagf.", b"\xff" * 8)]
    assert not any(is_known(one, life) for one in said)
    sizes = [at for at in range(len(metadata) - 8) if 0 < int.from_bytes(metadata[at : at + 8], "little") < 1 << 16]
    wrong = [metadata[:at] + n.to_bytes(8, "little") + metadata[at + 8 :] for at in sizes for n in (1 << 16, 1 << 63)]
    assert sum(is_known(one, life) for one in wrong) < 0.2 * len(wrong), "some are of memory, which may be of any size"
    first = metadata.index(b"c", metadata.index(b"UCX")) + 9
    for version, known in ((1, True), (2, False), (15, False)):
        changed = metadata[first] & 0xF0 | version
        assert is_known(metadata[:first] + bytes([changed]) + metadata[first + 1 :], life) == known
    caplog.set_level("INFO")
    assert not is_known(b"nixlSerDes2|...", "pdstage.x")
    assert "is not checked" in caplog.text


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (lambda gpu: gpu.allocate(4096), False),
        (lambda gpu: gpu.allocate(4096, how=cuda_double.POOL), True),
        (lambda gpu: gpu.expandable([4096], FABRIC | DESCRIPTOR), False),
        (lambda gpu: gpu.expandable([4096], DESCRIPTOR), True),
    ],
    ids=["cudaMalloc", "cudaMallocAsync", "with fabric handles", "without"],
)
def test_gpu_memory_that_ucx_moves_without_nvlink_is_warned_of_once(memory, said, monkeypatch, caplog):
    with cuda_double.use() as gpu, contextlib.closing(open_transport("nixl")) as transport:
        held = memory(gpu)
        monkeypatch.setattr(transport._memory, "register", lambda _: None)
        for address in (held.address, held.address + 64):
            transport._register([Region(held.address, 64, "cuda"), Region(address, 64)])
    records = [one.getMessage() for one in caplog.records if "NVLink" in one.getMessage()]
    assert len(records) == said
    assert all("expandable_segments:False" in one for one in records)


def test_a_death_is_proved_only_once_the_sockets_are_read(monkeypatch):
    """What the dead wrote waits there, and lands when this process polls."""
    a, b = Endpoint("nixl"), Remote("nixl", OVER_TCP)
    a.identify("b", b.describe())
    b.kill()
    polled = []
    monkeypatch.setattr("pdstage.transport.nixl.hold_bytes_of_the_dead", lambda: not polled)
    Log(a).until(lambda: a.transport.met.all_gone("b"))
    assert not a.proved_dead("b")
    plain = a.transport._progress
    monkeypatch.setattr(a.transport, "_progress", lambda: (polled.append(1), plain()))
    assert a.proved_dead("b")
    a.close()

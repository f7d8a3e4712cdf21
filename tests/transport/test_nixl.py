"""What only the NIXL transport offers: network devices, telemetry, devices of its descriptors."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os

import numpy as np
import pytest
from transport.conftest import VARIANTS, as_root
from transport.endpoint import NBYTES, Endpoint, Log, Remote, altered, delivers, described, ended, meet, sends

from tests import processes
from tests.cables import ip, two_hosts

pytest.importorskip("nixl._api", exc_type=ImportError)

from pdstage import PeerError, Region, TransportError, UsageError
from pdstage.transport import PostFailed, open_transport
from pdstage.transport._nixl_agent import descriptors, is_known
from pdstage.transport.base import Ranges
from pdstage.transport.nixl import _Description

__all__ = ["two_hosts"]
OVER_TCP = {"UCX_TLS": "tcp,self"}


def test_a_cpu_build_of_torch_is_not_imported_to_learn_that_it_has_no_cuda():
    if not importlib.metadata.version("torch").endswith("+cpu"):
        pytest.skip("torch is built for a GPU")
    code = "import pdstage.transport.nixl, nixl, sys; print(nixl.__name__, 'torch' in sys.modules)"
    done = processes.python("-c", code, check=True)
    assert done.stdout.split() == ["nixl", "False"]


def test_the_environment_is_as_before_and_the_option_goes_over_it(monkeypatch):
    """Row: library error."""
    monkeypatch.setenv("UCX_NET_DEVICES", "nowhere")
    with pytest.raises(TransportError, match=r"NIXL does not start: nixlBackendError\(NIXL_ERR_"):
        open_transport("nixl")
    open_transport("nixl", devices=["lo"]).close()
    assert os.environ["UCX_NET_DEVICES"] == "nowhere"


def test_each_descriptor_names_the_device_its_memory_is_on():
    """One post may read several GPUs' memory; where the regions are of several, a single span is no exception."""
    near, far = 1 << 40, 1 << 41
    held = Ranges("these", [Region(1 << 20, 4096), Region(near, 4096, "cuda", 0), Region(far, 4096, "cuda", 3)])

    def rows_of(*spans):
        at, nbytes = np.array(spans, np.int64).T.copy()
        rows = descriptors(at, nbytes, held.find(at, nbytes))
        return [rows[i] for i in range(len(spans))]

    assert rows_of((far, 64), (near, 32), (far + 64, 16)) == [(far, 64, 3), (near, 32, 0), (far + 64, 16, 3)]
    assert rows_of((far + 8, 8)) == [(far + 8, 8, 3)]
    with pytest.raises(UsageError, match="post each kind by itself"):
        rows_of((1 << 20, 8), (near, 8))


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


@pytest.mark.parametrize("mortal", [VARIANTS["nixl-tcp"]], indirect=True)
def test_the_agent_of_a_dead_peer_goes_with_its_last_post(mortal):
    """I14: not with `disconnect`, which would hide how the posts to a peer that is only stopped end."""
    a, b = mortal.a, mortal.b
    mortal.deliver(b"while it lives")
    b.stop()
    tickets = [sends(a, b, NBYTES, b"") for _ in range(4)]
    a.disconnect("b")
    assert a.n_agents() == 1
    b.kill()
    last = ended(a, *tickets)[-1]
    assert a.n_agents() == 0
    assert isinstance(last, PostFailed)
    assert not last.settled, "what it has sent may lie in the peer's sockets, and land when that polls"


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
    with Remote("nixl", OVER_TCP | said, netns=two_hosts[0], **options) as a:
        assert a.listening() == others | ({"127.0.0.1"} if "a1" not in str((options, said)) else set())


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


def test_a_death_is_proved_only_once_the_sockets_are_read(monkeypatch):
    """What the dead wrote waits there, and lands when this process polls."""
    a, b, here = Endpoint("nixl"), Remote("nixl", OVER_TCP), Endpoint("nixl")
    a.identify("b", b.describe())
    a.identify("here", here.describe())
    assert a.transport.met.gone_at("here") is None  # of this process, and not closed
    b.kill()
    polled = []
    monkeypatch.setattr("pdstage.transport.nixl.hold_bytes_of_the_dead", lambda _: not polled)
    Log(a).until(lambda: a.transport.met.gone_at("b"))
    assert not a.proved_dead("b")
    plain = a.transport._progress
    monkeypatch.setattr(a.transport, "_progress", lambda: polled.append(plain()))
    assert a.proved_dead("b")
    a.close()
    here.close()

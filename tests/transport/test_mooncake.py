"""What is Mooncake's own: protocols, libraries, return codes, and peers that come back."""

from __future__ import annotations

import importlib
import socket
import sys
from pathlib import Path

import pytest
from transport.endpoint import NBYTES, Endpoint, Remote, altered, delivers, described, ended, meet, sends, until_dead

from pdstage import PeerError, TransportError, UsageError
from pdstage.transport import Done, PostFailed, available, open_transport
from pdstage.transport._peer import Identity
from tests.wiretap import Wiretap

if available()["mooncake"]:
    pytest.skip(available()["mooncake"], allow_module_level=True)

from pdstage.transport import _transfer_engine, mooncake


@pytest.fixture
def peers():
    """Makes endpoints in processes of their own; kills them at the end."""
    made = []

    def make():
        made.append(Remote("mooncake"))
        return made[-1]

    yield make
    for remote in made:
        remote.kill()


@pytest.fixture
def a():
    endpoint = Endpoint("mooncake")
    yield endpoint
    endpoint.close()


# Options, and what must be installed.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"protocol": "carrier"}, "'carrier'.*tcp, rdma, nvlink, nvlink_intra"),
        *(({"protocol": name}, f"built without protocol '{name}'") for name in ("nvlink", "nvlink_intra")),
        ({"protocol": "rdma"}, "no device"),
        ({"host": "a b"}, "host 'a b'"),
        ({}, "MC_TCP_PROTO"),
    ],
)
def test_what_is_not_to_be_had_is_refused(monkeypatch, tmp_path, options, said):
    """Row of mooncake: protocol not to be had."""
    monkeypatch.setattr(_transfer_engine, "_NICS", tmp_path)
    if getattr(_transfer_engine.library, _transfer_engine._BUILT_WITH.get(options.get("protocol"), ""), False):
        pytest.skip("this build has it")
    if not options:
        monkeypatch.setenv("MC_TCP_PROTO", "1")
    with pytest.raises(UsageError, match=said):
        open_transport("mooncake", **options)


def test_a_start_that_fails_names_the_code(monkeypatch, tmp_path):
    """Row of mooncake: library error. The library looks for itself, and finds no device."""
    if list(Path("/sys/class").glob("infiniband/*")):
        pytest.skip("this host has RDMA devices")
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(_transfer_engine, "_NICS", tmp_path)
    with pytest.raises(TransportError, match="does not start with protocol 'rdma': Mooncake says -1"):
        open_transport("mooncake", protocol="rdma")


def test_a_missing_library_names_its_package(monkeypatch):
    """Row of mooncake: library missing. The wheel needs three libraries of the system, which pip cannot install."""

    def missing(name):
        raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory", name=name)

    monkeypatch.delitem(sys.modules, "pdstage.transport.mooncake")
    monkeypatch.delitem(sys.modules, "pdstage.transport._transfer_engine")
    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", lambda n, *a: missing(n) if n == "mooncake.engine" else real(n, *a))
    with pytest.raises(UsageError, match=r"libibverbs.*apt-get install -y libibverbs1 libnuma1 libcurl4"):
        open_transport("mooncake")


def test_both_sides_must_speak_one_protocol(a):
    """Row of mooncake: two protocols."""
    for wrong in ({"protocol": "rdma"}, {"host": "no host"}):
        with pytest.raises(PeerError, match="one protocol and an address"):
            a.connect("b", altered(a, mooncake._Description, life="another", **wrong))


# Peers.


def test_a_peer_that_comes_back_on_the_same_port_is_written_where_it_is_now(a, peers):
    """Row of mooncake: post to a restarted peer.

    What the library knows of a name it never forgets; each life gets another.
    """
    with Wiretap(0) as door:  # a fixed port before a peer's own, which changes with its life
        for _ in range(3):
            b = peers()
            door.target = described(b, mooncake._Description).port
            a.connect("b", altered(b, mooncake._Description, host="127.0.0.1", port=door.port))
            a.prepare("b", [b.region()])
            delivers(a, b, tag=b"")
            b.kill()
            with pytest.raises(TransportError, match="'b' has ended"):
                sends(a, b, 5, b"")


@pytest.mark.full
def test_short_lived_peers_leave_a_bounded_number_of_connections(a, peers, monkeypatch):
    """I14: what the library keeps of them goes with an engine that wrote to some of them; the one that peers write to
    stays.
    """
    monkeypatch.setattr(mooncake, "MAX_LEFT", 4)
    told, n_sockets, engines = a.describe(), [], set()
    for _ in range(24):
        b = peers()
        meet(a, b)
        delivers(a, b, tag=b"")
        a.disconnect("b")
        b.kill()
        b.shut()
        until_dead(a)
        a.forget("b")
        n_sockets.append(a.n_fds("socket"))
        engines.add(a.transport._sending)
    assert max(n_sockets[12:]) <= max(n_sockets[:12]) + 8, n_sockets
    assert a.describe() == told
    assert len(engines) == 6
    assert sum(engine.raw is not None for engine in engines) == 2


def test_a_stopped_peer_keeps_no_other_waiting(a, peers):
    """Row of mooncake: post to a stopped peer.

    It is asked whether it is there by a thread of its own: posts to it wait, and nothing else does.
    """
    stopped, b = peers(), peers()
    meet(a, stopped, "stopped")
    meet(a, b)
    stopped.stop()
    first = a.post("stopped", [(0, stopped.base, 8)], b"")
    second = sends(a, b, 8, b"")
    assert ended(a, second) == [Done(second)]
    stopped.resume()
    assert ended(a, first) == [Done(first)]


def test_a_failed_peer_that_goes_on_is_written_again(a, peers, monkeypatch):
    """Row of mooncake: a failed peer that goes on.

    Its transfer fails by the library's deadline, unsettled; the next post asks whether it is there first.
    """
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")
    b = peers()
    meet(a, b)
    delivers(a, b, tag=b"")
    b.stop()
    (failed,) = ended(a, sends(a, b, NBYTES, b""))
    assert isinstance(failed, PostFailed)
    assert not failed.settled
    b.resume()
    delivers(a, b, b"again", b"")


def test_what_was_not_begun_when_its_peer_was_disconnected_is_never_sent(a, peers):
    """Row of mooncake: disconnected in flight."""
    b = peers()
    meet(a, b)
    b.stop()
    n = 4 * _transfer_engine.WINDOW
    ticket = a.post("b", [(0, b.base + i, 1) for i in range(n)], b"")
    a.disconnect("b")
    b.resume()
    (failed,) = ended(a, ticket)
    assert isinstance(failed, PostFailed)
    assert failed.settled
    assert "disconnected before all was sent" in str(failed.error)


def test_a_host_where_nobody_answers_is_named_with_the_code(a):
    """Row of mooncake: post to a killed peer.

    As of a peer on another host, whose process cannot be seen to have ended.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    where = {"host": "127.0.0.1", "port": port, "life": "gone", "identity": Identity("another", {}, 1, 0)}
    a.connect("b", altered(a, mooncake._Description, **where))
    a.prepare("b", [a.region()])
    (failed,) = ended(a, a.post("b", [(0, a.base, 8)], b""))
    assert isinstance(failed, PostFailed)
    assert failed.settled
    assert "does not answer a probe: Mooncake says -102" in str(failed.error)
    assert not a.proved_dead("b")

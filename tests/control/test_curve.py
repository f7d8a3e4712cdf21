"""Control sockets and the directory with keys: who gets in, who is told what, and what a listener on the wire sees."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from pdstage.control.address import Address
from pdstage.control.bootstrap import Advert, BootstrapClient, BootstrapServer, Conflict, Incomplete
from pdstage.control.keys import Keys
from pdstage.control.zmq import ControlSocket
from pdstage.errors import PeerError, TransportError, UsageError
from pdstage.layout.topology import Topology
from tests.wiretap import Wiretap, listeners

DEADLINE_S = 240.0
MARKER = b"the quick brown fox jumps over the lazy dog"


def fresh(allow: Path | None = None) -> Keys:
    return Keys(secrets.token_bytes(32), allow)


def allow_list(path: Path, *keys: Keys) -> Path:
    path.write_text("".join(f"{one.public.hex()}\n" for one in keys))
    path.chmod(0o600)
    return path


@pytest.fixture
def make(either_port) -> Iterator[Callable[..., ControlSocket]]:
    with contextlib.ExitStack() as stack:

        def node(keys: Keys | None, **options: object) -> ControlSocket:
            identity = options.pop("identity", b"n" + secrets.token_bytes(8))
            return stack.enter_context(ControlSocket(identity=identity, keys=keys, **options))

        yield node


def pump(nodes: list[ControlSocket], done: Callable[[], bool]) -> None:
    """Lets every node wait and answer for itself until `done`."""
    until = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < until, "it did not come to pass"
        for node in nodes:
            node.wait(0.001)


def exchange(a: ControlSocket, b: ControlSocket, endpoint: str = "") -> None:
    """A question and its answer, as two nodes that live in two processes."""
    route = a.connect(endpoint or b.endpoint)
    assert a.send(route, [b"question", MARKER])
    got: list[tuple[bytes, list[bytes]]] = []
    pump([a, b], lambda: bool(got.extend(b.recv()) or got))
    assert got[0][1] == [b"question", MARKER]
    assert b.send(got[0][0], [b"answer"])
    answers: list[tuple[bytes, list[bytes]]] = []
    pump([a, b], lambda: bool(answers.extend(a.recv()) or answers))
    assert answers == [(route, [b"answer"])]


def refusals(node: ControlSocket, others: list[ControlSocket]) -> list[tuple[bytes, PeerError]]:
    taken: list[tuple[bytes, PeerError]] = []
    pump([node, *others], lambda: bool(taken.extend(node.take_refusals()) or taken))
    return taken


def test_one_key_file_for_all(make) -> None:
    keys = fresh()
    a, b, c = (make(keys) for _ in range(3))
    assert keys.public.hex() in b.endpoint
    exchange(a, b)
    exchange(b, a)
    exchange(c, a, f"tcp://{Address.parse(a.endpoint, 'tcp')}")  # without its key an address means one's own
    assert not a.counters.refused + b.counters.refused + c.counters.refused


def test_a_pair_for_each_and_a_list(make, tmp_path: Path) -> None:
    pairs = [fresh() for _ in range(2)]
    listed = allow_list(tmp_path / "allow", *pairs)
    a, b = (make(Keys(pair.secret, listed)) for pair in pairs)
    assert a.endpoint.partition("@")[0] != b.endpoint.partition("@")[0]
    exchange(a, b)
    exchange(b, a)


def test_rotation_one_node_at_a_time(make, tmp_path: Path) -> None:
    """Old and new key both listed: every step of the way every node reaches every other."""
    old, new = fresh(), fresh()
    listed = allow_list(tmp_path / "allow", old, new)
    nodes = [make(Keys(old.secret, listed)) for _ in range(3)]
    for i in range(3):
        nodes[i].close()
        nodes[i] = make(Keys(new.secret, listed))
        for a in nodes:
            for b in nodes:
                if a is not b:
                    exchange(a, b)
        for node in nodes:
            for route in list(node._routes.values()):
                node.disconnect(route)
    allow_list(tmp_path / "allow", new)
    with pytest.raises(UsageError, match=f"{old.public.hex()} of 127.0.0.1:1 is not let in"):
        nodes[0].connect(f"tcp://{old.public.hex()}@127.0.0.1:1")


def test_connect_refuses_what_cannot_work(make) -> None:
    plain, keyed, other = make(None), make(fresh()), make(fresh())
    with pytest.raises(UsageError, match="is encrypted, and this node has no keys; pass keys="):
        plain.connect(keyed.endpoint)
    with pytest.raises(UsageError, match="is not let in here; add it to this node's allow list"):
        other.connect(keyed.endpoint)


def test_a_key_that_is_not_let_in_is_named_on_both_sides(make, tmp_path: Path, caplog) -> None:
    server_keys = fresh()
    server = make(server_keys)
    stranger_keys = fresh(allow_list(tmp_path / "theirs", server_keys))
    stranger = make(stranger_keys)
    route = stranger.connect(server.endpoint)
    stranger.send(route, [MARKER])
    (refused,) = refusals(stranger, [server])
    assert refused[0] == route
    assert f"add {stranger_keys.public.hex()} to its allow list" in str(refused[1])
    (seen,) = refusals(server, [stranger])
    assert seen[0] == b""
    assert f"from 127.0.0.1: its key {stranger_keys.public.hex()} is not let in" in str(seen[1])
    assert str(seen[1]) in caplog.text
    assert server.recv() == []
    assert server.counters.refused == 1
    assert server.counters.received == 0
    assert not stranger.send(route, [b"again"]), "the route is gone"


def test_the_list_lets_in_and_shuts_out_without_a_restart(make, tmp_path: Path) -> None:
    server_keys, comer_keys = fresh(), fresh()
    listed = allow_list(tmp_path / "allow")
    server = make(Keys(server_keys.secret, listed))
    comer = make(Keys(comer_keys.secret, allow_list(tmp_path / "theirs", server_keys)))
    comer.connect(server.endpoint)
    refusals(comer, [server])
    allow_list(tmp_path / "allow", comer_keys)
    exchange(comer, server)
    allow_list(tmp_path / "allow")
    again = make(Keys(comer_keys.secret, tmp_path / "theirs"))
    again.connect(server.endpoint)
    assert "refuses this node's key" in str(refusals(again, [server])[0][1])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_that_is_not_who_it_should_be(make, tmp_path: Path, host: str) -> None:
    """A key its owner published, and another process at the address: it learns nothing."""
    impostor, expected = make(fresh()), fresh()
    client = make(fresh(allow_list(tmp_path / "allow", expected)))
    route = client.connect(f"tcp://{expected.public.hex()}@{host}:{Address.parse(impostor.endpoint, 'tcp').port}")
    client.send(route, [MARKER])
    (refused,) = refusals(client, [impostor])
    assert refused[0] == route
    assert f"does not prove that it holds the key {expected.public.hex()}" in str(refused[1])
    assert impostor.recv() == []


def test_a_peer_restarted_under_another_key_is_reached_by_its_new_address(make, tmp_path: Path) -> None:
    old, new, own = fresh(), fresh(), fresh()
    both = allow_list(tmp_path / "allow", old, new, own)
    client, server = make(Keys(own.secret, both)), make(Keys(old.secret, both))
    exchange(client, server)
    where = f"tcp://{Address.parse(server.endpoint, 'tcp')}"
    server.close()
    server = make(Keys(new.secret, both), bind=where)
    exchange(client, server)


@pytest.mark.parametrize("mechanism", ["null", "plain"])
def test_a_client_without_keys_is_refused_and_named(make, caplog, mechanism: str) -> None:
    server = make(fresh())
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        if mechanism == "plain":
            dealer.plain_username, dealer.plain_password = b"admin", b"admin"
        dealer.connect(f"tcp://{Address.parse(server.endpoint, 'tcp')}")
        dealer.send(MARKER)
        (seen,) = refusals(server, [])
        assert seen[0] == b""
        assert "refused a connection from" in str(seen[1])
        assert "give it the cluster's key file" in str(seen[1])
        assert str(seen[1]) in caplog.text
        assert server.recv() == []
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "greeting",
    [
        b"\x01\x00\x04\x00hell",  # ZMTP 1.0, which knows no security
        b"\xff" + bytes(8) + b"\x7f\x01\x00\x04\x00hell",  # 2.0
        b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31),
        os.urandom(256),
    ],
)
def test_older_protocols_and_garbage_get_nothing_in(make, greeting: bytes) -> None:
    keys = fresh()
    server = make(keys)
    address = Address.parse(server.endpoint, "tcp")
    with socket.create_connection((address.host, address.port), timeout=DEADLINE_S) as stranger:
        stranger.sendall(greeting)
        exchange(make(keys), server)
    assert server.counters.received == 1


def test_a_complaint_is_made_once_and_every_refusal_counted(make, caplog, tmp_path: Path) -> None:
    server_keys = fresh()
    server = make(server_keys)
    stranger = make(fresh(allow_list(tmp_path / "allow", server_keys)))
    with caplog.at_level(logging.WARNING, logger="pdstage"):
        for n in range(1, 6):
            stranger.connect(server.endpoint)
            refusals(stranger, [server])
            pump([server, stranger], lambda n=n: bool(server.take_refusals() or server.counters.refused >= n))
    assert server.counters.refused == 5
    assert caplog.text.count("refused a connection from 127.0.0.1") == 1
    assert caplog.text.count("refuses this node's key") == 1


def test_nobody_gets_in_where_the_handler_is_gone(make) -> None:
    """The domain is enforced: libzmq's legacy way lets every key in that knows the server's."""
    keys = fresh()
    server, client = make(keys), make(keys)
    server._guard.socket.unbind("inproc://zeromq.zap.01")
    client.send(client.connect(server.endpoint), [MARKER])
    told, monitor = 0, server._inflow._monitor
    while told not in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_SUCCEEDED):
        assert monitor.poll(DEADLINE_S * 1000), "it did not come to pass"
        told = int.from_bytes(monitor.recv_multipart()[0][:2], sys.byteorder)
    assert told == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    assert server.recv() == []


@pytest.mark.parametrize("keyed", [True, False])
def test_what_a_wiretap_sees(make, keyed: bool) -> None:
    """Without keys it reads along, so the tap works; with them it sees nothing of what is said."""
    keys = fresh() if keyed else None
    a, b = make(keys), make(keys)
    with Wiretap(Address.parse(b.endpoint, "tcp").port) as tap:
        exchange(a, b, b.endpoint.rpartition(":")[0] + f":{tap.port}")
        assert (MARKER not in tap.seen) == keyed
        assert (b"answer" not in tap.seen) == keyed
        assert len(tap.seen) > len(MARKER)


def test_many_nodes_in_one_process(make) -> None:
    keys = fresh()
    nodes = [make(keys) for _ in range(12)]
    for node in nodes[1:]:
        exchange(node, nodes[0])


def test_it_leaves_nothing_behind(no_leaks) -> None:
    keys = fresh()
    for _ in range(3):
        a, b = ControlSocket(identity=b"a", keys=keys), ControlSocket(identity=b"b", keys=keys)
        exchange(a, b)
        a.close()
        b.close()


def test_an_unbound_socket_listens_nowhere(make) -> None:
    keys = fresh()
    server = make(keys)
    before = listeners()
    client = make(keys, bind=None)
    assert client.endpoint == ""
    exchange(client, server)
    assert listeners() == before


def test_a_connection_made_again_at_once_is_heard(make) -> None:
    """Were it known there under the name of the one before, libzmq's handover might leave it open but deaf."""
    a, b = make(None), make(None)
    names = set()
    for i in range(50):
        route = a.connect(b.endpoint)
        a.send(route, [b"%d" % i])
        got: list[tuple[bytes, list[bytes]]] = []
        pump([b], lambda got=got, i=i: bool(got.extend(b.recv()) or [b"%d" % i] in [f for _, f in got]))
        names.add(got[-1][0])
        b.send(got[-1][0], [b"%d" % i])
        heard: list[tuple[bytes, list[bytes]]] = []
        pump([a], lambda heard=heard: bool(heard.extend(a.recv()) or heard))
        assert heard == [(route, [b"%d" % i])]
        a.disconnect(route)
    assert len(names) == 50


# The directory.


def advert(rank: int = 0, endpoint: str = "tcp://127.0.0.1:9000") -> Advert:
    return Advert(instance="p", topology=Topology(tp_size=2, tp_rank=rank), endpoint=endpoint, incarnation=1, layout="")


@pytest.fixture
def cluster() -> Iterator[tuple[Keys, BootstrapServer]]:
    keys = fresh()
    with BootstrapServer(keys=keys) as server:
        yield keys, server


def test_the_directory_serves_its_cluster(cluster) -> None:
    keys, server = cluster
    host, port = server.address.partition("@")[2].split(":")
    assert server.address.startswith(keys.public.hex())
    for address in (server.address, f"{host}:{port}"):
        client = BootstrapClient(address, DEADLINE_S, keys=keys)
        client.publish(advert(0))
        with pytest.raises(Incomplete, match="ranks 1"):
            client.lookup()
        client.publish(advert(1))
        assert [one.topology.tp_rank for one in client.lookup()] == [0, 1]
        assert b'"tp_rank":1' in client.instances()
        with pytest.raises(Conflict):
            client.publish(
                Advert(**{**{f: getattr(advert(), f) for f in advert().__struct_fields__}, "topology": Topology()})
            )
        client.withdraw(advert(1))


def test_a_stranger_can_neither_read_nor_publish(cluster, tmp_path: Path) -> None:
    keys, server = cluster
    BootstrapClient(server.address, DEADLINE_S, keys=keys).publish(advert())
    stranger = fresh(allow_list(tmp_path / "allow", keys))
    for call in ("lookup", "instances", "publish"):
        client = BootstrapClient(server.address, DEADLINE_S, keys=stranger)
        with pytest.raises(PeerError, match="refuses this node's key"):
            getattr(client, call)(*([advert(1)] if call == "publish" else []))
    with pytest.raises((PeerError, TransportError), match="pass keys= "):  # told by its greeting, or by its hanging up
        BootstrapClient(server.address.partition("@")[2], DEADLINE_S).publish(advert(1))
    with pytest.raises(UsageError, match="is encrypted, and this node has no keys"):
        BootstrapClient(server.address)
    with pytest.raises(UsageError, match="is not let in here"):
        BootstrapClient(server.address, keys=fresh())
    with pytest.raises(PeerError, match="does not prove that it holds the key"):
        BootstrapClient(server.address.partition("@")[2], DEADLINE_S, keys=fresh()).lookup()
    held = server.directory.instances()["p"]
    assert [one.topology.tp_rank for one, _ in held] == [0]


def test_a_directory_whose_key_was_rotated_is_found_at_its_old_address(tmp_path: Path) -> None:
    old, new, foreign = fresh(), fresh(), fresh()
    listed = allow_list(tmp_path / "allow", old, new)
    with BootstrapServer(keys=Keys(old.secret, listed)) as server:
        clients = [
            BootstrapClient(address, DEADLINE_S, keys=Keys(old.secret, listed))
            for address in (server.address, server.address.partition("@")[2])
        ]
        clients[0].publish(advert())
    where = server.address.partition("@")[2]
    with BootstrapServer(where, keys=Keys(new.secret, listed)):
        for client in clients:
            client.publish(advert())
    with BootstrapServer(where, keys=foreign):
        for client in clients:
            with pytest.raises(PeerError, match=f"does not prove that it holds the key {old.public.hex()}"):
                client.publish(advert())


def test_a_directory_without_keys_is_not_believed() -> None:
    with BootstrapServer() as server:
        client = BootstrapClient(server.address, 0.2, keys=fresh())
        with pytest.raises((TransportError, PeerError), match="keys"):
            client.lookup()


def test_a_malformed_request_of_a_member_is_refused_in_words(make, cluster) -> None:
    keys, server = cluster
    node = make(keys)
    route = node.connect(f"tcp://{server.address}")
    for frames, said in (
        ([b"GET"], b"a request of 1 frames"),
        ([b"GET", b"/etc/passwd", b""], b"there is no resource at '/etc/passwd'"),
        ([b"PUT", b"/v1/adverts", b"{}"], b"does not decode"),
        ([b"PUT", b"/v1/adverts", bytes(65537)], b"an advert of 65537 bytes"),
        ([b"\xff\xfe", b"\xff[", b"\x00"], b"error"),
    ):
        node.send(route, frames)
        got: list[tuple[bytes, list[bytes]]] = []
        pump([node], lambda got=got: bool(got.extend(node.recv()) or got))
        assert said in got[0][1][1], frames


def test_the_directory_on_the_wire(cluster) -> None:
    keys, server = cluster
    with Wiretap(int(server.address.rpartition(":")[2])) as tap:
        client = BootstrapClient(f"127.0.0.1:{tap.port}", DEADLINE_S, keys=keys)
        client.publish(advert(endpoint="tcp://10.11.12.13:4567"))
        with pytest.raises(Incomplete):
            client.lookup()
        assert b"10.11.12.13" not in tap.seen
        assert b"tp_size" not in tap.seen
    with BootstrapServer() as plain, Wiretap(int(plain.address.rpartition(":")[2])) as tap:
        BootstrapClient(f"127.0.0.1:{tap.port}", DEADLINE_S).publish(advert(endpoint="tcp://10.11.12.13:4567"))
        assert b"10.11.12.13" in tap.seen


def test_keys_open_the_way_beyond_loopback() -> None:
    keys = fresh()
    with BootstrapServer("0.0.0.0:0", keys=keys, advertise="127.0.0.1") as server, pytest.raises(Incomplete):
        BootstrapClient(server.address, DEADLINE_S, keys=keys).lookup()
    with ControlSocket("tcp://0.0.0.0:0", identity=b"n", keys=keys) as node:
        assert "0.0.0.0" not in node.endpoint
    for refused in (lambda: BootstrapServer("0.0.0.0:0"), lambda: ControlSocket("tcp://*:0", identity=b"n")):
        with pytest.raises(UsageError, match="pdstage keys FILE.*keys=FILE"):
            refused()


def test_a_closed_directory_leaves_nothing(no_leaks) -> None:
    keys = fresh()
    server = BootstrapServer(keys=keys).start()
    with pytest.raises(Incomplete):
        BootstrapClient(server.address, DEADLINE_S, keys=keys).lookup()
    server.close()
    BootstrapServer(keys=keys).close()

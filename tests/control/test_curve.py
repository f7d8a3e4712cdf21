"""Control sockets and the directory with keys: who gets in, who is told what, and what a listener on the wire sees."""

from __future__ import annotations

import re
import secrets
import sys

import pytest
import zmq

from pdstage import Keys, PeerError, TransportError, UsageError
from pdstage.control.address import Address
from pdstage.control.bootstrap import BootstrapClient, BootstrapServer, Incomplete
from pdstage.control.zmq import ControlSocket
from tests.control.sockets import DEADLINE_S, receive, until
from tests.control.test_directory import advert
from tests.wiretap import Wiretap, listeners

MARKER = b"the quick brown fox jumps over the lazy dog"


def fresh(allow=None):
    return Keys(secrets.token_bytes(32), allow)


def allow_list(path, *keys):
    path.write_text("".join(f"{one.public.hex()}\n" for one in keys))
    path.chmod(0o600)
    return path


def exchange(a, b, endpoint=""):
    """A question and its answer, as two nodes that live in two processes."""
    route = a.connect(endpoint or b.endpoint)
    assert a.send(route, [b"question", MARKER])
    ((back, frames),) = receive(b, 1, a)
    assert frames == [b"question", MARKER]
    assert b.send(back, [b"answer"])
    assert receive(a, 1, b) == [(route, [b"answer"])]


def refusal(node, *others):
    """The next one that a node is told of: its route, and why. Nobody receives anything meanwhile."""
    taken = []
    assert until(lambda _: taken.extend(node.take_refusals()) or taken, node, *others) == []
    return taken[0][0], str(taken[0][1])


def test_a_key_that_is_not_let_in_is_named_on_both_sides(make, tmp_path, caplog):
    server_keys = fresh(allow_list(tmp_path / "allow"))
    server = make(keys=server_keys)
    stranger_keys = fresh(allow_list(tmp_path / "theirs", server_keys))
    stranger = make(keys=stranger_keys)
    for n in (1, 2):
        route = stranger.connect(server.endpoint)
        stranger.send(route, [MARKER])
        refused, why = refusal(stranger, server)
        assert refused == route
        assert f"add {stranger_keys.public.hex()} to its allow list" in why
        refused, why = refusal(server, stranger)
        assert refused == b""
        assert f"from 127.0.0.1: its key {stranger_keys.public.hex()} is not let in" in why
        assert (server.counters.refused, server.counters.received) == (n, 0)
        assert not stranger.send(route, [b"again"]), "the route is gone"
    assert caplog.text.count(why) == caplog.text.count("refuses this node's key") == 1, "said once"
    allow_list(tmp_path / "allow", stranger_keys)
    exchange(stranger, server)  # without a restart
    allow_list(tmp_path / "allow")
    again = make(keys=stranger_keys)
    again.connect(server.endpoint)
    assert "refuses this node's key" in refusal(again, server)[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_that_is_not_who_it_should_be(make, tmp_path, host):
    """A key its owner published, and another process at the address: it learns nothing."""
    impostor, expected = make(keys=fresh()), fresh()
    client = make(keys=fresh(allow_list(tmp_path / "allow", expected)))
    route = client.connect(f"tcp://{expected.public.hex()}@{host}:{Address.parse(impostor.endpoint, 'tcp').port}")
    client.send(route, [MARKER])
    refused, why = refusal(client, impostor)
    assert refused == route
    assert f"does not prove that it holds the key {expected.public.hex()}" in why


def test_a_peer_restarted_under_another_key_is_reached_by_its_new_address(make, tmp_path):
    old, new, own = fresh(), fresh(), fresh()
    all_three = allow_list(tmp_path / "allow", old, new, own)
    client, server, alike = (make(keys=Keys(one.secret, all_three)) for one in (own, old, own))
    exchange(client, alike, f"tcp://{Address.parse(alike.endpoint, 'tcp')}")  # without its key: one's own
    assert not alike.counters.refused
    exchange(client, server)
    where = f"tcp://{Address.parse(server.endpoint, 'tcp')}"
    server.close()
    exchange(client, make(keys=Keys(new.secret, all_three), bind=where))
    allow_list(tmp_path / "allow", new, own)
    with pytest.raises(UsageError, match=f"{old.public.hex()} of 127.0.0.1:1 is not let in"):
        client.connect(f"tcp://{old.public.hex()}@127.0.0.1:1")


@pytest.mark.parametrize("mechanism", ["null", "plain"])
def test_a_client_without_keys_is_refused_and_named(make, caplog, mechanism):
    server = make(keys=fresh())
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if mechanism == "plain":
            dealer.plain_username, dealer.plain_password = b"admin", b"admin"
        dealer.connect(f"tcp://{Address.parse(server.endpoint, 'tcp')}")
        dealer.send(MARKER)
        refused, why = refusal(server)
    assert refused == b""
    assert re.search("refused a connection: it (does not encrypt|broke off)", why)
    assert "give it the cluster's key file" in why
    assert why in caplog.text


def test_nobody_gets_in_where_the_handler_is_gone(make):
    """The domain is enforced: libzmq's legacy way lets every key in that knows the server's."""
    keys = fresh()
    server, client = make(keys=keys), make(keys=keys)
    server._guard.sockets[0].unbind("inproc://zeromq.zap.01")
    client.send(client.connect(server.endpoint), [MARKER])
    told, monitor = 0, server._guard.sockets[1]
    while told not in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_SUCCEEDED):
        assert monitor.poll(DEADLINE_S * 1000), "it did not come to pass"
        told = int.from_bytes(monitor.recv_multipart()[0][:2], sys.byteorder)
    assert told == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    assert server.recv() == []


@pytest.mark.parametrize("keyed", [True, False])
def test_what_a_wiretap_sees(make, keyed):
    """Without keys it reads along, so the tap works; with them it sees nothing of what is said."""
    keys = fresh() if keyed else None
    a, b = make(keys=keys), make(keys=keys)
    with Wiretap(Address.parse(b.endpoint, "tcp").port) as tap:
        exchange(a, b, b.endpoint.rpartition(":")[0] + f":{tap.port}")
        assert (MARKER not in tap.seen) == keyed
        assert (b"answer" not in tap.seen) == keyed
        assert len(tap.seen) > len(MARKER)
    with BootstrapServer(keys=keys) as server, Wiretap(int(server.address.rpartition(":")[2])) as tap:
        BootstrapClient(f"127.0.0.1:{tap.port}", DEADLINE_S, keys=keys).publish(advert())
        assert (b"tp_size" not in tap.seen) == keyed
        assert (advert().endpoint.encode() not in tap.seen) == keyed


def test_an_unbound_socket_listens_nowhere(make):
    keys = fresh()
    server = make(keys=keys)
    before = listeners()
    client = make(keys=keys, bind=None)
    assert client.endpoint == ""
    exchange(client, server)
    assert listeners() == before


def test_a_connection_made_again_at_once_is_heard(make):
    """Were it known there under the name of the one before, libzmq's handover might leave it open but deaf."""
    a, b = make(), make()
    names, routes = set(), set()
    for i in range(50):
        route = a.connect(b.endpoint)
        a.send(route, [b"%d" % i])
        back, _ = until(lambda got, i=i: [b"%d" % i] in [frames for _, frames in got], b)[-1]
        names.add(back)
        routes.add(route)
        b.send(back, [b"%d" % i])
        assert receive(a) == [(route, [b"%d" % i])]
        a.disconnect(route)
        a.disconnect(route)
    assert len(names) == len(routes) == 50
    assert not a.send(route, [b"gone"]), "it is lost, and that is no error"
    assert a.counters.unroutable == 1


# The directory.


@pytest.fixture
def cluster():
    keys = fresh()
    with BootstrapServer(keys=keys) as server:
        yield keys, server


def test_a_stranger_can_neither_read_nor_publish(cluster, tmp_path):
    keys, server = cluster
    BootstrapClient(server.address, DEADLINE_S, keys=keys).publish(advert())
    stranger = BootstrapClient(server.address, DEADLINE_S, keys=fresh(allow_list(tmp_path / "allow", keys)))
    for call in (stranger.lookup, stranger.instances, lambda: stranger.publish(advert(1, tp=2))):
        with pytest.raises(PeerError, match="refuses this node's key"):
            call()
    with pytest.raises((PeerError, TransportError), match="pass keys="):  # told by its greeting, or by its hanging up
        BootstrapClient(server.address.partition("@")[2], DEADLINE_S).publish(advert(1, tp=2))
    with pytest.raises(UsageError, match="is encrypted, and this node has no keys; pass keys="):
        BootstrapClient(server.address)
    with pytest.raises(UsageError, match="is not let in here; add it to this node's allow list"):
        BootstrapClient(server.address, keys=fresh())
    assert [one.topology.tp_rank for one, _ in server.directory.instances()["p0"]] == [0]


def test_a_directory_whose_key_was_rotated_is_found_at_its_old_address(tmp_path):
    old, new, foreign = fresh(), fresh(), fresh()
    listed = allow_list(tmp_path / "allow", old, new)
    with BootstrapServer(keys=Keys(old.secret, listed)) as server:
        where = server.address.partition("@")[2]
        clients = [
            BootstrapClient(address, DEADLINE_S, keys=Keys(old.secret, listed)) for address in (server.address, where)
        ]
        clients[0].publish(advert())
    with BootstrapServer(where, keys=Keys(new.secret, listed)):
        for client in clients:
            client.publish(advert())
    with BootstrapServer(where, keys=foreign):
        for client in clients:
            with pytest.raises(PeerError, match=f"does not prove that it holds the key {old.public.hex()}"):
                client.publish(advert())


def test_a_directory_without_keys_is_not_believed():
    with BootstrapServer() as server:
        client = BootstrapClient(server.address, 0.2, keys=fresh())
        with pytest.raises((TransportError, PeerError), match="keys"):
            client.lookup()


def test_a_malformed_request_of_a_member_is_refused_in_words(make, cluster):
    keys, server = cluster
    node = make(keys=keys)
    route = node.connect(f"tcp://{server.address}")
    for frames, said in (
        ([b"GET"], b"a request of 1 frames"),
        ([b"GET", b"/etc/passwd", b""], b"there is no resource at '/etc/passwd'"),
        ([b"PUT", b"/v1/ask", bytes(65537)], b"the request is too long"),
        ([b"\xff\xfe", b"\xff[", b"\x00"], b"error"),
    ):
        node.send(route, frames)
        assert said in receive(node)[0][1][1], frames


def test_keys_open_the_way_beyond_loopback():
    keys = fresh()
    with BootstrapServer("0.0.0.0:0", keys=keys, advertise="127.0.0.1") as server, pytest.raises(Incomplete):
        BootstrapClient(server.address, DEADLINE_S, keys=keys).lookup()
    with ControlSocket("tcp://0.0.0.0:0", identity=b"n", keys=keys) as node:
        assert "0.0.0.0" not in node.endpoint

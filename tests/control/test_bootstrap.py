"""The bootstrap directory over real sockets: what clients see, what strangers can do, and what is left behind."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import msgspec
import pytest

from pdstage import Keys, PeerError, TransportError, UsageError
from pdstage.control.bootstrap import BootstrapClient, BootstrapServer, Incomplete
from tests.control.test_directory import advert

DEADLINE_S = 240.0


@pytest.fixture
def server():
    with BootstrapServer() as running:
        yield running


@pytest.fixture
def client(server):
    return BootstrapClient(server.address, DEADLINE_S)


def stranger_to(server):
    return socket.create_connection(server.address.split(":"), timeout=DEADLINE_S)


def raw(server, request):
    """What the server says to `request`, after which nothing comes, until it closes."""
    with stranger_to(server) as stranger:
        stranger.sendall(request)
        stranger.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while part := stranger.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
        return answer


def read(server, path):
    with urlopen(f"http://{server.address}{path}", timeout=DEADLINE_S) as answer:
        return json.load(answer)


def test_it_says_that_it_runs_and_where_it_is(server, client):
    with pytest.raises(Incomplete) as refused:
        client.lookup()
    assert refused.value.fields["address"] == server.address
    assert read(server, "/health") == {"status": "ok"}


def test_routers_of_vllm_learn_the_engines_names_and_the_numbers_of_replicas(server, client):
    """Whichever replicas are there, and in whatever order."""
    for rank in (0, 1):
        client.publish(advert(rank, tp=2))
    client.publish(advert(instance="p1"))
    held = read(server, "/query")
    assert [(number, one["engine_id"]) for number, one in held.items()] == [("0", "p0"), ("1", "p1")]
    assert held["0"]["worker_addr"] == {"0": {"0": "tcp://127.0.0.1:9000"}, "1": {"0": "tcp://127.0.0.1:9001"}}
    for one in (advert(0, tp=2), advert(1, tp=2), advert(instance="p1")):
        client.withdraw(one)
    for number in (10, 2, 0):
        client.publish(msgspec.structs.replace(advert(instance=f"p_dp{number}"), replica=number))
    held = read(server, "/query")
    assert {number: one["engine_id"] for number, one in held.items()} == {f"{n}": f"p_dp{n}" for n in (0, 2, 10)}


def test_nobody_there_is_named_with_a_remedy():
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
    client = BootstrapClient(address)
    for call in (client.lookup, lambda: client.publish(advert()), lambda: client.withdraw(advert())):
        with pytest.raises(TransportError, match=f"no bootstrap server answers at {address}.*pdstage bootstrap"):
            call()


def test_a_server_that_says_nothing_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(TransportError, match=address):
            BootstrapClient(address, timeout_s=0.05).lookup()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 5\r\n\r\noops!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b'HTTP/1.1 200 OK\r\nContent-Length: 34\r\n\r\n{"adverts":[{"instance":"\xff\xff\xff\xff"}]}',
    ],
)
def test_something_else_there_is_said(answer):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve():
            connection, _ = other.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(PeerError, match="not a bootstrap server"):
            BootstrapClient(f"127.0.0.1:{other.getsockname()[1]}", DEADLINE_S).lookup()
        thread.join()


HEAD = b"PUT /v1/ask HTTP/1.1\r\nHost: x\r\n"
ASKED = b'{"type":"publish","ttl_s":1,"advert":%b}' % msgspec.json.encode(advert())
NO_PLACE = ASKED.replace(b'"tp_rank":0', b'"tp_rank":9')


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (HEAD + b"Content-Length: 2\r\n\r\n{}", b"does not decode"),
        (HEAD + b'Content-Length: 9\r\n\r\n{"\xff":1}  ', b"does not decode"),
        (HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(NO_PLACE), NO_PLACE), b"tp_rank=9"),
        (HEAD + b"\r\n", b"does not decode"),
        (HEAD + b"Content-Length: 99999999999\r\n\r\n" + bytes(65537), b"the request is too long"),
        (b"GET /etc/passwd HTTP/1.1\r\n\r\n", b"there is no resource at '/etc/passwd'"),
        (b"POST /v1/ask HTTP/1.1\r\n\r\n", b"501"),
        (b"GET http://[ HTTP/1.1\r\n\r\n", b"there is no resource at"),
        (HEAD + b"Content-Length: 1000\r\n\r\n{", b"does not decode"),
    ],
)
def test_garbage_is_refused_in_words(server, client, request_, said):
    answer = raw(server, request_)
    assert said in answer
    version, status, *_ = answer.split()
    assert (version, status in (b"400", b"404", b"501")) == (b"HTTP/1.0", True), "no connection is kept"
    assert raw(server, b"") == b""
    client.publish(advert())
    assert client.lookup()


def test_strangers_that_say_nothing_keep_nobody_out(server, client):
    with contextlib.ExitStack() as held:
        for _ in range(200):
            held.enter_context(stranger_to(server))
        client.publish(advert())
        assert client.lookup()


def test_a_connection_that_says_nothing_has_an_end(server, monkeypatch):
    monkeypatch.setattr("pdstage.control.directory_http.Handler.timeout", 0.01)
    with stranger_to(server) as stranger, contextlib.suppress(ConnectionResetError, BrokenPipeError):
        stranger.sendall(b"GET /heal")
        assert stranger.recv(1) == b"", "dropped"


def test_a_server_ends_though_somebody_goes_on_sending():
    """A byte now and then is no silence, and may go on for days."""
    server, over = BootstrapServer().start(), threading.Event()
    with stranger_to(server) as stranger, ThreadPoolExecutor() as threads:

        def send() -> None:
            with contextlib.suppress(OSError):
                while not over.wait(0.01):
                    stranger.sendall(b"x")

        threads.submit(send)
        try:
            threads.submit(server.close).result(DEADLINE_S)
        finally:
            over.set()


@pytest.mark.parametrize("keys", [None, Keys(bytes(range(32)), None)], ids=["plain", "keys"])
def test_a_server_leaves_nothing_used_or_not(no_leaks, keys):
    server = BootstrapServer(keys=keys)
    for _ in range(2):
        server.close()
    with pytest.raises(UsageError, match="closed before"):
        server.start()
    with BootstrapServer(keys=keys) as server, pytest.raises(Incomplete):
        BootstrapClient(server.address, DEADLINE_S, keys=keys).lookup()


def test_a_taken_port_and_an_open_host_are_named(server):
    with pytest.raises(TransportError, match=f"cannot listen on {server.address}"):
        BootstrapServer(server.address)
    with pytest.raises(UsageError, match="insecure=True"):
        BootstrapServer("0.0.0.0:0")
    BootstrapServer("0.0.0.0:0", insecure=True, advertise="10.1.2.3").close()

"""The control socket over loopback: both directions, restarts, strangers, and waking up."""

from __future__ import annotations

import errno
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from pdstage import Keys, TransportError, UsageError
from pdstage.control import port
from pdstage.control.address import Address
from pdstage.control.zmq import MAX_FRAME_NBYTES, MAX_FRAMES, MAX_MESSAGE_NBYTES, ControlSocket, messages_of, route_of
from tests.control.sockets import DEADLINE_S, raw_dealer, receive, still_works, until
from tests.processes import python

KEYS = Keys(bytes(range(32)), None)


@pytest.fixture
def linked(make):
    """Two, and the first one's route to the other."""
    a, b = make(b"a"), make(b"b")
    return a, b, a.connect(b.endpoint)


def ask(node, peer, route):
    """Asks again and again, as the cores do, until `peer` hears it; by what route it answers."""

    def heard(got):
        node.send(route, [b"who"])
        return [b"who"] in [frames for _, frames in got]

    return until(heard, peer)[-1][0]


def test_both_connect_to_each_other_and_answer_on_the_route_a_message_came_from(make):
    a, b = make(b"node-a"), make(b"node-b")
    to_b, to_a = a.connect(b.endpoint), b.connect(a.endpoint)
    assert a.connect(b.endpoint) == to_b != make().connect(b.endpoint), "no route can be guessed from the endpoint"
    assert a.send(to_b, [b"hello", b"", b"\x00frame"])
    assert b.send(to_a, [b"from b"])
    assert receive(b) == [(route_of(b"node-a"), [b"hello", b"", b"\x00frame"])]
    assert receive(a) == [(route_of(b"node-b"), [b"from b"])]
    assert a.send(route_of(b"node-b"), [b"answer of a"])
    assert b.send(route_of(b"node-a"), [b"answer of b"])
    assert receive(b) == [(to_a, [b"answer of a"])]
    assert receive(a) == [(to_b, [b"answer of b"])]


def test_messages_keep_their_order_and_frames_and_one_recv_is_bounded(linked):
    a, b, route = linked
    sent = [[b"%d" % i, os.urandom(i % 300)] for i in range(3000)]
    for frames in sent:
        assert a.send(route, frames)
    got = []
    while len(got) < len(sent):
        assert b.wait(DEADLINE_S).messages
        taken = b.recv()
        assert len(taken) <= 1024
        got += [frames for _, frames in taken]
    assert got == sent
    assert a.counters.sent == b.counters.received == len(sent)


def test_a_peer_that_stopped_reading_is_loss_and_bounded(make, linked):
    a, b, route = linked
    payload = [bytes(32 << 10)]
    n_tries = 200_000
    lost_at = next((i for i in range(n_tries) if not a.send(route, payload)), n_tries)
    assert lost_at < n_tries, "an unread peer must fill up"
    assert a.counters.full == 1
    assert receive(b)[0][1] == payload
    assert make(b"c").send(a.connect(b.endpoint), payload) is False, "other sockets do not know this one's routes"


@pytest.mark.parametrize("how", ["disconnect", "renew", "renewed before"])
def test_a_connection_ends_while_its_message_is_looked_at(make, how):
    """libzmq takes a message's first frame to see whether there is one. If its connection ended then, libzmq ended the
    process (src/fq.cpp, `!_more`), or gave the next peer's frames as the rest of it.
    """
    for _ in range(5):
        a, b, c = make(), make(), make()
        route, other = a.connect(b.endpoint), a.connect(c.endpoint)
        if how == "renewed before":
            a.renew(route)
        back, back_other = (ask(a, node, at) for node, at in ((b, route), (c, other)))
        assert b.send(back, [b"one", b"two", b"three"])
        assert a.wait(DEADLINE_S).messages
        a.disconnect(route) if how == "disconnect" else a.renew(route)
        assert c.send(back_other, [b"four", b"five"])
        assert receive(a, 2) == [(route, [b"one", b"two", b"three"]), (other, [b"four", b"five"])]
        assert c.send(ask(a, c, other), [b"again"])
        assert receive(a)[0][1] == [b"again"]
        assert a.counters.malformed == 0


def test_what_was_never_connected_is_not_let_go_of(make):
    node = make()
    assert node._port.disconnect("tcp://127.0.0.1:1") == errno.ENOENT
    route = node.connect("tcp://127.0.0.1:1")
    node._socket.disconnect("tcp://127.0.0.1:1")  # behind its back
    with pytest.raises(TransportError, match="tcp://127.0.0.1:1 is not let go of"):
        node.disconnect(route)


def test_garbage_from_a_raw_dealer_is_delivered_as_frames_or_dropped(make):
    node = make(b"node")
    with raw_dealer(node.endpoint, b"stranger") as dealer:
        dealer.send_multipart([b"\xff" * 9, b"", b"\x00"])
        dealer.send_multipart([b"x"] * (MAX_FRAMES + 1))
        dealer.send(b"")
        assert receive(node, 2) == [(b"stranger", [b"\xff" * 9, b"", b"\x00"]), (b"stranger", [b""])]
    assert node.counters.malformed == 1
    still_works(node, make())


def test_a_stranger_cannot_take_over_a_route(linked):
    a, b, route = linked
    a.send(route, [b"x"])
    receive(b)
    b.send(route_of(b"a"), [b"x"])
    receive(a)
    with raw_dealer(a.endpoint, route_of(b"b")) as dealer:
        dealer.send(b"I am b")
        assert receive(a) == [(route_of(b"b"), [b"I am b"])], "it comes under the name it claims, not under the route"
        a.send(route, [b"secret"])
        assert receive(b) == [(route_of(b"a"), [b"secret"])]


def test_a_connection_whose_name_a_stranger_took_is_made_anew(linked):
    """libzmq hands the name over and says nothing to its owner, whose connection stays up and leads nowhere."""
    a, b, route = linked
    a.send(route, [b"x"])
    assert receive(b) == [(route_of(b"a"), [b"x"])]
    with raw_dealer(b.endpoint, route_of(b"a")) as stranger:
        stranger.send(b"I am a")
        assert receive(b) == [(route_of(b"a"), [b"I am a"])]
    for n in range(3):  # again and again, should it be taken each time
        a.renew(route)
        a.send(route, [b"%d" % n])
        ((known_as, frames),) = receive(b)
        assert frames == [b"%d" % n]
        assert known_as.startswith(route_of(b"a") + b"#")
        assert b.send(known_as, [b"answer"])
        assert receive(a) == [(route, [b"answer"])], "it is one route here, whatever it is called there"
        assert b.endpoint_of(known_as) == b"a".hex()
    a.disconnect(route)
    a.renew(route)
    assert not a.send(route, [b"given up"])


def test_an_oversize_frame_costs_the_sender_its_connection_only(make):
    node = make(b"node")
    with raw_dealer(node.endpoint, b"big") as dealer:
        dealer.send(bytes(MAX_FRAME_NBYTES))
        assert len(receive(node)[0][1][0]) == MAX_FRAME_NBYTES, "the cap itself is allowed"
        dealer.send(bytes(MAX_FRAME_NBYTES + 1))
        still_works(node, make())
    assert node.counters.received == 2


def test_half_open_connections_are_found_by_the_kernel(make):
    """Not by ZMTP heartbeats: with input held back at the high water mark, as while a node's engine is stopped, a peer
    that dies then makes libzmq's heartbeat timer abort the whole process (`!_io_error`, libzmq issue 4364).
    """
    held = make()._socket
    assert held.getsockopt(zmq.HEARTBEAT_IVL) == 0
    assert held.getsockopt(zmq.TCP_KEEPALIVE) == 1
    assert 0 < held.getsockopt(zmq.TCP_MAXRT) <= 15_000


def test_what_peers_do_not_take_is_refused_at_the_sender(make):
    node = make(b"me")
    route = node.connect(node.endpoint)
    for frames in ([], [bytes(MAX_FRAME_NBYTES + 1)], [b"x"] * (MAX_FRAMES + 1)):
        with pytest.raises(UsageError, match="control message of"):
            node.send(route, frames)
    with pytest.raises(TypeError):
        node.send(route, [b"good", "text"])
    assert node.send(route, [b"x" * 100])
    assert receive(node) == [(route_of(b"me"), [b"x" * 100])], "nothing was sent of the others"


@pytest.mark.parametrize(
    ("keys", "garbage"),
    [
        (None, b"GET / HTTP/1.1\r\n\r\n"),
        (None, b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"),
        (KEYS, b"\x01\x00\x04\x00hell"),  # ZMTP 1.0, which knows no security
        (KEYS, b"\xff" + bytes(8) + b"\x7f\x01\x00\x04\x00hell"),  # 2.0
        (KEYS, b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)),
    ],
)
def test_older_protocols_and_garbage_get_nothing_in(make, keys, garbage):
    node = make(b"node", keys=keys)
    address = Address.parse(node.endpoint, "tcp")
    with socket.create_connection((address.host, address.port), timeout=DEADLINE_S) as stranger:
        stranger.sendall(garbage)
        still_works(node, make(keys=keys))
    assert node.counters.received == 1


def test_wait_ends_on_a_message_a_wake_up_and_a_descriptor(make):
    a, b = make(b"a"), make(b"b")
    assert b.wait(0) == (False, False, ())
    a.send(a.connect(b.endpoint), [b"x"])
    assert b.wait(DEADLINE_S) == (True, False, ())
    assert b.wait(0).messages, "a message not taken is still there"
    b.recv()
    reading, writing = socket.socketpair()
    with reading, writing:
        writing.send(b"x")
        assert b.wait(DEADLINE_S, [reading.fileno()]) == (False, False, (reading.fileno(),))
        reading.recv(1)
        assert b.wait(0, [reading.fileno()]) == (False, False, ())
    for _ in range(2):
        b.wake()
        b.wake()
        assert b.wait(DEADLINE_S) == (False, True, ()), "once"
        assert b.wait(0) == (False, False, ())


def test_wake_from_many_threads_covers_every_item(make):
    """The driver's use: put something where it looks, then wake. No item may stay behind without a wake-up."""
    node, items, n_threads, n_each = make(), [], 4, 2000
    taken = 0

    def produce():
        for i in range(n_each):
            items.append(i)
            node.wake()

    with ThreadPoolExecutor(n_threads) as threads:
        for _ in range(n_threads):
            threads.submit(produce)
        while taken < n_threads * n_each:
            assert node.wait(DEADLINE_S).woken, "an item was left behind without a wake-up"
            while items:
                items.pop()
                taken += 1


def test_a_library_that_cannot_be_seen_leaves_pyzmq(monkeypatch):
    """As with pyzmq's cffi backend, or a libzmq linked in privately: all else is as ever."""
    for backend in ("no.such.module", "zmq.backend", "_struct"):
        monkeypatch.setattr(port, "_BACKEND", backend)
        with ControlSocket(identity=b"plain") as node:
            assert isinstance(node._port, port.ControlPort)
            assert node.send(node.connect(node.endpoint), [b"note"])
            assert receive(node) == [(route_of(b"plain"), [b"note"])]


def test_sends_and_connects_of_another_thread_hide_no_arrival(make):
    """libzmq announces an arrival once: a send may take that word in while another thread waits for it."""
    node, echo, n = make(b"node"), make(b"echo"), 3000

    def serve():
        left = n
        while left and echo.wait(DEADLINE_S).messages:
            for route, frames in echo.recv():
                left -= echo.send(route, frames)

    def wait():
        got = 0
        while got < n:
            assert any(node.wait(DEADLINE_S)), "an arrival was not announced"
            got += len(node.recv())
        return got

    with ThreadPoolExecutor() as threads:
        threads.submit(serve)
        waiting = threads.submit(wait)
        route = node.connect(echo.endpoint)
        for i in range(n):
            assert node.send(route, [b"%d" % i])
            if i % 100 == 0:
                node.connect(make().endpoint)
        assert waiting.result() == n


@pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "keys"])
def test_a_frame_of_the_largest_size_arrives(make, keys):
    """Encrypted it is longer, and the limit allows for that. A call takes a bounded number of bytes."""
    a, b = make(keys=keys), make(keys=keys)
    route = a.connect(b.endpoint)
    for _ in range(2):
        assert a.send(route, [bytes(MAX_FRAME_NBYTES)])
    got = []
    while len(got) < 2:
        assert b.wait(DEADLINE_S).messages
        taken = b.recv()
        assert len(taken) <= 1
        got += taken
    assert {len(frames[0]) for _, frames in got} == {MAX_FRAME_NBYTES}


@pytest.mark.parametrize(
    ("sizes", "messages"),
    [
        ([], []),
        ([1] * (MAX_FRAMES + 1), [MAX_FRAMES, 1]),
        ([1, MAX_MESSAGE_NBYTES, 1, 1], [1, 1, 2]),
        ([MAX_MESSAGE_NBYTES // 2] * 5, [2, 2, 1]),
    ],
)
def test_frames_are_split_into_messages_that_peers_take(sizes, messages):
    frames = [bytes(size) for size in sizes]
    made = list(messages_of(frames))
    assert [len(one) for one in made] == messages
    assert [frame for one in made for frame in one] == frames


@pytest.mark.parametrize("keys", [None, KEYS], ids=["plain", "keys"])
def test_close_is_idempotent_and_leaves_nothing(no_leaks, keys):
    for _ in range(3):
        a, b = (ControlSocket(identity=name, keys=keys) for name in (b"a", b"b"))
        a.send(a.connect(b.endpoint), [b"unread"])
        for node in (a, b, a):
            node.close()
            node.wake()
            assert node.closed


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("tcp://127.0.0.1", "no valid port"),
        ("tcp://127.0.0.1:99999", "no valid port"),
        ("tcp://127.0.0.1:x", "no valid port"),
        ("ipc:///tmp/x:1", "scheme 'ipc'"),
        ("tcp://::1:80", "no unambiguous host"),
        ("", "no valid port"),
        ("tcp://127.0.0.1:1/path", "no valid port"),
        ("tcp://127.0.0.1:" + "9" * 450, "no valid port"),
        ("tcp://127.0.0.1:" + "9" * 5000, "of 5016 characters"),
    ],
)
def test_bad_addresses_are_named(make, address, said):
    with pytest.raises(UsageError, match=said):
        make(bind=address)
    with pytest.raises(UsageError, match=said):
        make().connect(address)


def test_any_incarnation_is_an_identity(make):
    """libzmq keeps names that begin with a zero byte to itself, and one random incarnation in 256 begins with one."""
    server = make(b"\x00" * 8)
    for identity in (b"\x00", b"\x00\x01\xff", b"x" * 240):
        node = make(identity)
        node.send(node.connect(server.endpoint), [b"x"])
        assert receive(server) == [(route_of(identity), [b"x"])]


def test_a_taken_port_is_named(make):
    taken = make().endpoint
    with pytest.raises(TransportError, match=taken.removeprefix("tcp://")):
        make(bind=taken)


def test_listening_beyond_loopback_must_be_asked_for(make):
    with pytest.raises(UsageError, match="neither encrypted nor authenticated.*pdstage keys FILE.*keys=FILE"):
        make(bind="tcp://0.0.0.0:0")
    node = make(bind="tcp://*:0", insecure=True, advertise="127.0.0.1")
    assert node.endpoint.startswith("tcp://127.0.0.1:")
    still_works(node, make())
    own = make(bind="tcp://0.0.0.0:0", insecure=True).endpoint
    assert "0.0.0.0" not in own
    assert "*" not in own


def test_ipv6(make):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback")
    node = make(b"six", bind="tcp://[::1]:0")
    assert node.endpoint.startswith("tcp://[::1]:")
    still_works(node, make())


@pytest.mark.parametrize("keys", ["None", "Keys(bytes(range(32)), None)"])
def test_one_that_nobody_closed_is_collected_with_all_that_refers_to_it(keys):
    """As a node and its handles are. In a process of its own, since what goes wrong is that it never returns."""
    code = (
        "import gc\n"
        "from pdstage.control.keys import Keys\n"
        "from pdstage.control.zmq import ControlSocket\n"
        "engine = type('Engine', (), {})()\n"
        f"engine.itself, engine.socket = engine, ControlSocket(identity=b'node', keys={keys})\n"
        "del engine\n"
        "gc.collect()\n"
    )
    python("-c", code, check=True)

"""How much of what a peer or stranger sends a socket holds before it is whole, and that the honest never notice."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time

import pytest
import zmq

from pdstage.control import inflow
from pdstage.control.address import Address
from pdstage.control.keys import Keys
from pdstage.control.zmq import MAX_FRAME_NBYTES, MAX_FRAMES, MAX_MESSAGE_NBYTES, messages_of
from tests.control.sockets import DEADLINE_S, until

MIB = 1 << 20
MOST = 1 << 30
"""What a stranger tries to send. It is cut off long before."""


@pytest.fixture(params=[None, "keys"])
def keys(request):
    return Keys(secrets.token_bytes(32)) if request.param else None


def met(node, *peers):
    """The peers' routes to `node`, by which each has sent one message."""
    routes = [peer.connect(node.endpoint) for peer in peers]
    for peer, route in zip(peers, routes, strict=True):
        peer.send(route, [b"hello"])
    until(lambda _: node.counters.received == len(peers), node, *peers)
    return routes


def arrived(node):
    """What connections brought and the node did not take out."""
    node._inflow.serve(node._port)
    return sum(node._inflow._held(node._port).values())


class Stranger(threading.Thread):
    """Speaks ZMTP 3.0 (RFC 23) without keys, and then says one thing again and again until it is hung up on."""

    def __init__(self, endpoint, said):
        super().__init__(daemon=True)
        self.n_sent = 0
        self._said = said
        self._socket = socket.create_connection(("127.0.0.1", Address.parse(endpoint, "tcp").port))
        self._socket.settimeout(DEADLINE_S)
        self.start()

    def run(self):
        with self._socket, contextlib.suppress(OSError):
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0")
            ready = b"\x05READY" + b"\x0bSocket-Type" + b"\0\0\0\6DEALER"
            self._socket.sendall(greeting.ljust(64, b"\0") + b"\x04" + bytes([len(ready)]) + ready)
            answer = b""
            while len(answer) < 64 + len(ready):  # who says more before he was answered is hung up on
                answer += self._socket.recv(4096)
            while self.n_sent < MOST:
                self._socket.sendall(self._said)
                self.n_sent += len(self._said)


def frame(flags, nbytes):
    return bytes([flags | 2]) + struct.pack(">Q", nbytes) + bytes(nbytes)


@pytest.mark.parametrize("said", [frame(1, MIB), b"\x01\x00" * 65536], ids=["frames of 1 MiB", "empty frames"])
def test_a_message_without_an_end_is_not_taken_in(make, said, caplog):
    """Of 3 GiB of one such message 3.4 GiB were held, of 38 MiB of empty frames 1.2 GiB more. The honest are served."""
    node, peer = make(), make()
    route = peer.connect(node.endpoint)
    stranger = Stranger(node.endpoint, said)
    got = []
    while not node.counters.ended:
        assert peer.send(route, [b"question"])
        got += until(lambda _, n=node.counters.received: node.counters.received > n, node, peer)
    assert {frames for _, (frames,) in got} == {b"question"}
    assert stranger.n_sent < MOST
    peer.disconnect(route)
    until(lambda _: not node._inflow._open, node, peer)
    assert node._inflow._held(node._port) == {}
    assert caplog.text.count("ended a connection with 127.0.0.1") == 1


def test_strangers_in_the_middle_of_the_handshake(make):
    """Each may say one frame of 16 MiB before it is found out, for half a minute: of 60 of them 950 MiB were held."""
    node = make(keys=Keys(secrets.token_bytes(32)))
    begun = b"\x06" + struct.pack(">Q", MAX_FRAME_NBYTES) + bytes(MAX_FRAME_NBYTES - MIB)
    with contextlib.ExitStack() as held:
        for _ in range(12):
            one = held.enter_context(socket.create_connection(("127.0.0.1", Address.parse(node.endpoint, "tcp").port)))
            one.settimeout(DEADLINE_S)
            with contextlib.suppress(OSError):
                one.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(52, b"\0") + begun)
            until(lambda _: sum(node._inflow._held(node._port).values()) < inflow.MAX_HELD_NBYTES, node)
        until(lambda _: node.counters.ended >= 4, node)
        assert sum(node._inflow._held(node._port).values()) < inflow.MAX_HELD_NBYTES
        assert node.counters.ended < 12, "the others are left alone"


def test_a_member_says_what_does_not_end(make):
    keys = Keys(secrets.token_bytes(32))
    node = make(keys=keys)
    with zmq.Context() as context, context.socket(zmq.DEALER) as member:
        member.linger = 0
        member.curve_publickey, member.curve_secretkey, member.curve_serverkey = keys.public, keys.secret, keys.public
        member.connect(node.endpoint.replace(f"{keys.public.hex()}@", ""))
        member.send(b"hello")
        part = bytes(MIB)
        for _ in range(1024):
            member.send(part, zmq.SNDMORE, copy=False)
        member.send(b"the end")
        until(lambda _: node.counters.ended, node)


def test_what_is_counted_as_taken_is_what_came(make, keys):
    """Else it would add up over months, until an honest connection were cut."""
    a, b = make(keys=keys), make(keys=keys)
    (route,) = met(b, a)
    until(lambda _: a._inflow._open and b._inflow._open, a, b)
    begun = b._inflow._held(b._port), a._inflow._held(a._port)
    assert [len(held) for held in begun] == [1, 1]
    assert all(0 < nbytes < 1024 for held in begun for nbytes in held.values()), "greetings and no more"
    sizes = [0, 1, 7, 200, 221, 222, 223, 224, 254, 255, 256, 257, 5000, 65535, 70000]
    for n in range(1, 400):
        a.send(route, [bytes(sizes[(n + i) % len(sizes)]) for i in range(1 + n % 5)])
        if not n % 50 or n == 399:
            until(lambda _, n=n: b.counters.received == n + 1, a, b)
    assert (b._inflow._held(b._port), a._inflow._held(a._port)) == begun


@pytest.mark.parametrize("at_rest", [False, True], ids=["turned all the time", "not turned while they come"])
def test_honest_messages_of_the_largest_kind_arrive(make, keys, at_rest):
    """Also where the node is slower than who sends them; and more than it may hold, which it takes out in a moment."""
    node, *peers = (make(keys=keys) for _ in range(4))
    for peer, route in zip(peers, met(node, *peers), strict=True):
        for _ in range(3):
            assert peer.send(route, [bytes(MAX_FRAME_NBYTES)])
    if at_rest:
        until(lambda _: arrived(node) >= 9 * MAX_FRAME_NBYTES > inflow.MAX_HELD_NBYTES, *peers)
    got = until(lambda _: node.counters.received == 12, node, *peers)
    assert {len(frames[0]) for _, frames in got} == {MAX_FRAME_NBYTES}
    assert not node.counters.ended


def test_a_connection_of_which_messages_are_taken_is_not_ended(make):
    """However often a check finds messages that came whole just after the node had found none."""
    node, peer = make(), make()
    (route,) = met(node, peer)
    now = time.monotonic()
    for number in range(1, 4):
        for _ in range(2):
            assert peer.send(route, [bytes(MAX_FRAME_NBYTES)])
        until(lambda _: arrived(node) >= 2 * MAX_FRAME_NBYTES > inflow.MAX_UNFINISHED_NBYTES, peer)
        node._inflow.look(node._port, now + number, drained=True)  # which was so a moment before
        assert not node.counters.ended
        taken, _ = node._port.recv(2, 1, MAX_FRAME_NBYTES)
        assert len(taken) == 1, "a call takes a bounded number of bytes"
        node._port.recv(1, 1, MAX_FRAME_NBYTES)


def test_what_the_kernel_holds_is_not_libzmqs():
    """It may be more than a message, and has its own limit."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
        with peer, ours:
            known = inflow._Open(True, ours.getsockname()[1])
            peer.sendall(bytes(60_000))
            assert inflow._read_nbytes(ours.fileno(), known) == 0
            n = len(ours.recv(20_000, socket.MSG_WAITALL))
            assert inflow._read_nbytes(ours.fileno(), known) == n == 20_000


def test_no_connection_but_its_own_is_ended(make):
    """libzmq says nothing of connections that it closes itself, and the next socket may get their descriptor."""
    node, peer = make(), make()
    met(node, peer)
    (fd,) = node._inflow._open
    near, far = socket.socketpair()
    with near, far, socket.create_server(("127.0.0.1", 0)) as others:
        theirs = socket.create_connection(others.getsockname())
        known = node._inflow._open.pop(fd)
        for one in (near, theirs, others):
            node._inflow._open[one.fileno()] = known
            node._inflow._cut(one.fileno(), MIB, 0.0)
        node._inflow._open[10**6] = known  # closed
        node._inflow._cut(10**6, MIB, 0.0)
        assert node._inflow._held(node._port) == {}
        assert not node._inflow._open
        near.sendall(b"still open")
        assert far.recv(100) == b"still open"
        theirs.sendall(b"x")
        theirs.close()
    assert not node.counters.ended


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

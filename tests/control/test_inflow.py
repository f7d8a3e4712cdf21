"""How much of what a peer or stranger sends a socket holds before it is whole, and that the honest never notice."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest
import zmq

from pdstage.control import inflow
from pdstage.control.address import Address
from pdstage.control.keys import Keys
from pdstage.control.zmq import MAX_FRAME_NBYTES, MAX_FRAMES, MAX_MESSAGE_NBYTES, ControlSocket, messages_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEADLINE_S = 240.0
MIB = 1 << 20
MOST = 1 << 30
"""What a stranger tries to send. It is cut off long before."""


@pytest.fixture
def make(either_port) -> Iterator[Callable[..., ControlSocket]]:
    with contextlib.ExitStack() as stack:
        yield lambda keys=None: stack.enter_context(ControlSocket(identity=secrets.token_bytes(8), keys=keys))


@pytest.fixture(params=[None, "keys"])
def keys(request) -> Keys | None:
    return Keys(secrets.token_bytes(32)) if request.param else None


def until(done: Callable[[], object], *nodes: ControlSocket) -> list[tuple[bytes, list[bytes]]]:
    """Lets the nodes wait and receive until `done`; what they received."""
    got: list[tuple[bytes, list[bytes]]] = []
    deadline_at = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline_at, "it did not come to pass"
        for node in nodes:
            node.wait(0.01)
            got += node.recv()
    return got


class Stranger(threading.Thread):
    """Speaks ZMTP 3.0 (RFC 23) with a mechanism, and then says one thing again and again until it is hung up on."""

    def __init__(self, endpoint: str, mechanism: bytes, said: bytes) -> None:
        super().__init__(daemon=True)
        self.n_sent = 0
        self._mechanism, self._said = mechanism, said
        self._socket = socket.create_connection(("127.0.0.1", Address.parse(endpoint, "tcp").port))
        self._socket.settimeout(DEADLINE_S)
        self.start()

    def run(self) -> None:
        with self._socket, contextlib.suppress(OSError):
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + self._mechanism.ljust(20, b"\0")
            self._socket.sendall(greeting.ljust(64, b"\0"))
            if self._mechanism == b"NULL":
                name, value = b"\x0bSocket-Type", b"\0\0\0\6DEALER"
                ready = b"\x05READY" + name + value
                self._socket.sendall(b"\x04" + bytes([len(ready)]) + ready)
                answer = b""
                while len(answer) < 64 + len(ready):  # who says more before he was answered is hung up on
                    answer += self._socket.recv(4096)
            while self.n_sent < MOST:
                self._socket.sendall(self._said)
                self.n_sent += len(self._said)


def frame(flags: int, nbytes: int) -> bytes:
    return bytes([flags | 2]) + struct.pack(">Q", nbytes) + bytes(nbytes)


@pytest.mark.parametrize("said", [frame(1, MIB), b"\x01\x00" * 65536], ids=["frames of 1 MiB", "empty frames"])
def test_a_message_without_an_end_is_not_taken_in(make, said: bytes, caplog) -> None:
    """Of 3 GiB of one such message 3.4 GiB were held, of 38 MiB of empty frames 1.2 GiB more."""
    node = make()
    stranger = Stranger(node.endpoint, b"NULL", said)
    until(lambda: node.counters.ended, node)
    assert stranger.n_sent < MOST
    assert node._inflow._held(node._port) == {}
    assert caplog.text.count("ended a connection with 127.0.0.1") == 1


def test_strangers_in_the_middle_of_the_handshake(make) -> None:
    """Each may say one frame of 16 MiB before it is found out, for half a minute: of 60 of them 950 MiB were held."""
    node = make(Keys(secrets.token_bytes(32)))
    begun = b"\x06" + struct.pack(">Q", MAX_FRAME_NBYTES) + bytes(MAX_FRAME_NBYTES - MIB)
    held = []
    for _ in range(12):
        held.append(socket.create_connection(("127.0.0.1", Address.parse(node.endpoint, "tcp").port)))
        held[-1].settimeout(DEADLINE_S)
        with contextlib.suppress(OSError):
            held[-1].sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(52, b"\0") + begun)
        until(lambda: sum(node._inflow._held(node._port).values()) < inflow.MAX_HELD_NBYTES, node)
    until(lambda: node.counters.ended >= 4, node)
    assert sum(node._inflow._held(node._port).values()) < inflow.MAX_HELD_NBYTES
    assert node.counters.ended < 12, "the others are left alone"
    for one in held:
        one.close()


def test_a_member_says_what_does_not_end(make) -> None:
    keys = Keys(secrets.token_bytes(32))
    node = make(keys)
    with zmq.Context() as context, context.socket(zmq.DEALER) as member:
        member.linger = 0
        member.curve_publickey, member.curve_secretkey, member.curve_serverkey = keys.public, keys.secret, keys.public
        member.connect(node.endpoint.replace(f"{keys.public.hex()}@", ""))
        member.send(b"hello")
        part = bytes(MIB)
        for _ in range(1024):
            member.send(part, zmq.SNDMORE, copy=False)
        member.send(b"the end")
        until(lambda: node.counters.ended, node)


def test_the_honest_are_served_meanwhile(make) -> None:
    node, peer = make(), make()
    route = peer.connect(node.endpoint)
    Stranger(node.endpoint, b"NULL", frame(1, MIB))
    got, n_asked = [], 0
    while not node.counters.ended:
        assert peer.send(route, [b"question"])
        n_asked += 1
        got += until(lambda n=n_asked: node.counters.received == n, node, peer)
    assert [frames for _, frames in got] == [[b"question"]] * n_asked
    assert node.counters.ended == 1


def test_what_is_counted_as_taken_is_what_came(make, keys) -> None:
    """Else it would add up over months, until an honest connection were cut."""
    a, b = make(keys), make(keys)
    route = a.connect(b.endpoint)
    a.send(route, [b"first"])
    until(lambda: b.counters.received == 1 and a._inflow._open and b._inflow._open, a, b)
    begun = b._inflow._held(b._port), a._inflow._held(a._port)
    assert [len(held) for held in begun] == [1, 1]
    assert all(0 < nbytes < 1024 for held in begun for nbytes in held.values()), "greetings and no more"
    sizes = [0, 1, 7, 200, 221, 222, 223, 224, 254, 255, 256, 257, 5000, 65535, 70000]
    for n in range(1, 400):
        a.send(route, [bytes(sizes[(n + i) % len(sizes)]) for i in range(1 + n % 5)])
        if not n % 50:
            until(lambda n=n: b.counters.received == n + 1, a, b)
    until(lambda: b.counters.received == 400, a, b)
    assert (b._inflow._held(b._port), a._inflow._held(a._port)) == begun


def test_honest_messages_of_the_largest_kind_arrive(make, keys) -> None:
    """Also where the node is slower than who sends them."""
    node, peers = make(keys), [make(keys) for _ in range(3)]
    for peer in peers:
        route = peer.connect(node.endpoint)
        for _ in range(3):
            assert peer.send(route, [bytes(MAX_FRAME_NBYTES)])
    got = until(lambda: node.counters.received == 9, node, *peers)
    assert {len(frames[0]) for _, frames in got} == {MAX_FRAME_NBYTES}
    assert not node.counters.ended


def arrived(node: ControlSocket) -> int:
    """What connections brought and the node did not take out."""
    node._inflow.serve(node._port)
    return sum(node._inflow._held(node._port).values())


def test_what_came_while_the_node_did_not_turn_is_no_flood(make, keys) -> None:
    """More than a node may hold, and yet it takes it out in a moment."""
    node, peers = make(keys), [make(keys) for _ in range(3)]
    for peer in peers:
        route = peer.connect(node.endpoint)
        peer.send(route, [b"hello"])
    until(lambda: node.counters.received == 3, node, *peers)
    for peer in peers:
        for _ in range(3):
            assert peer.send(peer.connect(node.endpoint), [bytes(MAX_FRAME_NBYTES)])
    until(lambda: arrived(node) >= 9 * MAX_FRAME_NBYTES > inflow.MAX_HELD_NBYTES, *peers)
    until(lambda: node.counters.received == 12, node, *peers)
    assert not node.counters.ended


def test_messages_that_came_whole_while_a_look_was_interrupted_are_no_unfinished_one(make) -> None:
    node, peer = make(), make()
    route = peer.connect(node.endpoint)
    peer.send(route, [b"hello"])
    until(lambda: node.counters.received == 1, node, peer)
    for _ in range(2):
        assert peer.send(route, [bytes(MAX_FRAME_NBYTES)])
    until(lambda: arrived(node) >= 2 * MAX_FRAME_NBYTES > inflow.MAX_UNFINISHED_NBYTES, peer)
    node._inflow.look(node._port, time.monotonic(), drained=True)  # which was so a moment before
    until(lambda: node.counters.received == 3, node, peer)
    assert not node.counters.ended


def test_a_connection_of_which_messages_are_taken_is_not_ended(make) -> None:
    """However often a check finds messages that came whole just after the node had found none."""
    node, peer = make(), make()
    route = peer.connect(node.endpoint)
    peer.send(route, [b"hello"])
    until(lambda: node.counters.received == 1, node, peer)
    now = time.monotonic()
    for number in range(1, 4):
        for _ in range(2):
            assert peer.send(route, [bytes(MAX_FRAME_NBYTES)])
        until(lambda: arrived(node) >= 2 * MAX_FRAME_NBYTES > inflow.MAX_UNFINISHED_NBYTES, peer)
        node._inflow.look(node._port, now + number, drained=True)
        assert not node.counters.ended
        node._port.recv(2, 1, MAX_FRAME_NBYTES)


def test_what_the_kernel_holds_is_not_libzmqs() -> None:
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


def test_a_call_takes_a_bounded_number_of_bytes(make) -> None:
    node, peer = make(), make()
    route = peer.connect(node.endpoint)
    for _ in range(8):
        peer.send(route, [bytes(MAX_FRAME_NBYTES // 2)])
    n = 0
    deadline_at = time.monotonic() + DEADLINE_S
    while n < 8:
        assert time.monotonic() < deadline_at
        node.wait(0.1)
        taken = node.recv()
        assert len(taken) <= 2
        n += len(taken)


def test_no_connection_but_its_own_is_ended(make) -> None:
    """libzmq says nothing of connections that it closes itself, and the next socket may get their descriptor."""
    node, peer = make(), make()
    route = peer.connect(node.endpoint)
    peer.send(route, [b"hello"])
    until(lambda: node.counters.received == 1, node, peer)
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
        ([1] * 5, [5]),
        ([1] * (MAX_FRAMES + 1), [MAX_FRAMES, 1]),
        ([MAX_MESSAGE_NBYTES], [1]),
        ([MAX_MESSAGE_NBYTES, 1, 1], [1, 2]),
        ([1, MAX_MESSAGE_NBYTES, 1], [1, 1, 1]),
        ([MAX_MESSAGE_NBYTES // 2] * 5, [2, 2, 1]),
    ],
)
def test_frames_are_split_into_messages_that_peers_take(sizes: list[int], messages: list[int]) -> None:
    frames = [bytes(size) for size in sizes]
    made = list(messages_of(frames))
    assert [len(one) for one in made] == messages
    assert [frame for one in made for frame in one] == frames

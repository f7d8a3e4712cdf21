"""What tests of control sockets share: waiting for what arrives, and a peer that is none of ours."""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from pdstage.control.zmq import ControlSocket

DEADLINE_S = 240.0
Messages = list[tuple[bytes, list[bytes]]]


def until(done: Callable[[Messages], object], *nodes: ControlSocket) -> Messages:
    """Lets the nodes wait and receive until `done` with what they have received, which is returned."""
    got: Messages = []
    deadline_at = time.monotonic() + DEADLINE_S
    while not done(got):
        assert time.monotonic() < deadline_at, f"it did not come to pass, after {got[:8]}"
        for node in nodes:
            node.wait(0.002)
            got += node.recv()
    return got


def receive(node: ControlSocket, n: int = 1, *others: ControlSocket) -> Messages:
    """The next `n` messages."""
    return until(lambda got: len(got) >= n, node, *others)


def raw_dealer(endpoint: str, identity: bytes) -> zmq.Socket[bytes]:
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    dealer.identity = identity
    dealer.connect(endpoint)
    return dealer


def still_works(node: ControlSocket, good: ControlSocket) -> None:
    """A good peer is served whatever a stranger did before."""
    route = good.connect(node.endpoint)
    good.send(route, [b"ping"])
    got = until(lambda got: [b"ping"] in [frames for _, frames in got], node)
    node.send(next(back for back, frames in got if frames == [b"ping"]), [b"pong"])
    assert receive(good) == [(route, [b"pong"])]

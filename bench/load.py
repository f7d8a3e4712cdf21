"""A steady load to watch: rooms of many lengths from TP 2 to TP 1; now and then a client disconnects.

    python -m pdstage.bench.load --seconds 30 --metrics-port 9470
    pdstage top 9470 9471 9472

It measures nothing: it is meant to be watched by `pdstage top` and dashboards.
"""

from __future__ import annotations

import argparse
import os
import random
import time

from pdstage.control.bootstrap import BootstrapServer
from pdstage.layout.topology import Topology
from pdstage.manager import DecodeNode, PrefillNode, Receiver, Sender
from pdstage.protocol.state import State
from pdstage.tools.watch.option import VARIABLE, checked

from .ranks import Actor, Rank, Shape, expose, observers

WINDOW = 12
LEAVES_EVERY = 61
END_S = 2.0
SHAPE = Shape(kv_heads=8, head_dim=64, layers=8, page=16, n_pages=1024)


def pages_of(room: int) -> int:
    """The room's length in pages: what a router would know."""
    return random.Random(room).choice((2, 8, 16, 16, 32, 64))


def name_of(room: int) -> str:
    return f"chatcmpl-{random.Random(room).getrandbits(32):08x}"


class _Side(Actor):
    """One rank: keeps `WINDOW` rooms open until its time is up, then gives up those that do not end by themselves."""

    node: PrefillNode | DecodeNode

    def __init__(self) -> None:
        self.free = list(range(SHAPE.n_pages))
        self.open: list[tuple[Sender | Receiver, list[int]]] = []

    def begin(self, room: int, pages: list[int]) -> Sender | Receiver:
        raise NotImplementedError

    def run(self, seconds: float) -> int:
        """How many rooms there were."""
        room, until = 0, time.monotonic() + seconds
        while self.open or time.monotonic() < until:
            while len(self.open) < WINDOW and time.monotonic() < until:
                room += 1
                pages = [self.free.pop() for _ in range(pages_of(room))]
                self.open.append((self.begin(room, pages), pages))
            if time.monotonic() > until + END_S:  # as where decode left a room that prefill had not begun
                for handle, _ in self.open:
                    handle.abort("the load is over")
            self.turn()
            for one in [one for one in self.open if one[0].released]:
                self.open.remove(one)
                self.free += one[1]
        return room

    def turn(self) -> None:
        self.node.turn(1e-3)

    def idle(self) -> None:
        self.turn()

    def close(self) -> None:
        self.node.close()


class Source(_Side):
    def __init__(self, rank: int, bootstrap: str, transport: str, path: str) -> None:
        super().__init__()
        pool, place = SHAPE._replace(tp=2, rank=rank).pool(), Topology(tp_size=2, tp_rank=rank)
        self.node: PrefillNode = PrefillNode(
            pool,
            place,
            transport=transport,
            path=path,
            bootstrap=bootstrap,
            staging_nbytes=16 << 20,
            observers=observers(),
        )
        expose(self.node)

    def begin(self, room: int, pages: list[int]) -> Sender:
        sender = self.node.send(name_of(room))
        tokens = len(pages) * SHAPE.page
        for start in range(0, tokens, 256):  # as chunked prefill computes them
            sender.chunk(pages, (start, min(start + 256, tokens)))
        sender.finish()
        return sender


class Sink(_Side):
    def __init__(self, bootstrap: str, transport: str, path: str) -> None:
        super().__init__()
        self.bootstrap = bootstrap
        self.leaving: list[Receiver] = []
        self.node: DecodeNode = DecodeNode(
            SHAPE.pool(), Topology(), transport=transport, path=path, staging_nbytes=24 << 20, observers=observers()
        )
        expose(self.node)

    def begin(self, room: int, pages: list[int]) -> Receiver:
        receiver = self.node.receive(name_of(room), self.bootstrap)
        receiver.bind(pages, len(pages) * SHAPE.page)
        if not room % LEAVES_EVERY:
            self.leaving.append(receiver)
        return receiver

    def turn(self) -> None:
        super().turn()
        for receiver in list(self.leaving):
            if receiver.state not in (State.BOOTSTRAPPING, State.WAITING_FOR_INPUT):
                receiver.abort("the client left")
                self.leaving.remove(receiver)


def load(seconds: float, transport: str, path: str) -> int:
    """How many rooms there were."""
    with BootstrapServer() as server:
        ranks = [Rank(Source, number, server.address, transport, path) for number in range(2)]
        ranks.append(Rank(Sink, server.address, transport, path))
        try:
            for rank in ranks:
                rank.ready()
            for rank in ranks:
                rank.begin("run", seconds)
            return max(int(rank.result()) for rank in ranks)
        finally:
            for rank in reversed(ranks):
                rank.close()


def main() -> None:
    given = argparse.ArgumentParser(prog="python -m pdstage.bench.load", description="A steady load to watch.")
    given.add_argument("--seconds", type=float, default=30.0, metavar="S", help="default %(default)s")
    given.add_argument("--transport", default="local", metavar="NAME", help="default %(default)s")
    given.add_argument("--path", default="staged", metavar="PATH", help="default %(default)s")
    given.add_argument("--metrics-port", type=int, metavar="PORT", help="the first of the ranks' metrics endpoints")
    options = given.parse_args()
    if (port := checked(options.metrics_port)) is not None:
        os.environ[VARIABLE] = str(port)
    print(f"{load(options.seconds, options.transport, options.path)} rooms")


if __name__ == "__main__":
    main()

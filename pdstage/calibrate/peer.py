"""The served side of a calibration: a decode node that receives what it is told to, and says how long that took.

Layer 6. Must not know the sweep: the caller asks for one thing at a time. Questions and answers are msgpack, one frame
each, over a control socket, with keys where that has them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Self, TypeAlias

import msgspec
from msgspec import Meta

from pdstage.calibrate import pool as pools
from pdstage.control.zmq import ControlSocket
from pdstage.errors import PdstageError, UsageError
from pdstage.manager import DecodeNode
from pdstage.plan import TOKEN_MAJOR
from pdstage.protocol.room import State
from pdstage.tables import Index
from pdstage.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.control.keys import Keys
    from pdstage.kernels import Pool
    from pdstage.layout import Region
    from pdstage.stager import Stager

STAGING_NBYTES = 64 << 20
WAIT_S = 60.0

Run: TypeAlias = Annotated[int, Meta(ge=pools.RUNS[0], le=pools.RUNS[-1])]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 24)]


class Start(msgspec.Struct, frozen=True, tag=True):
    """A new node over `transport`, instead of the one there was."""

    transport: Annotated[str, Meta(max_length=64)]


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Receive `room` of that many runs a view; the answer is the seconds from `bind` to Success."""

    room: int
    directory: Annotated[str, Meta(max_length=512)]
    run: Run
    tokens: Count


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Scatter that many runs a view out of staging memory; the answer is the seconds of each of `repeats`."""

    run: Run
    tokens: Count
    repeats: Annotated[int, Meta(ge=1, le=100)]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Close the node."""


class Took(msgspec.Struct, frozen=True, tag=True):
    seconds: list[float]


class Failed(msgspec.Struct, frozen=True, tag=True):
    why: str


Question = Start | Pull | Copy | Stop
Answer = Took | Failed
_questions = msgspec.msgpack.Decoder(Question)


class Peer:
    """Answers one question after the other, at `bind`; its node listens on the same host, at a port of its own.

    A context manager.
    """

    def __init__(self, bind: str, *, device: str = "cpu", keys: Keys | None = None, insecure: bool = False) -> None:
        self._keys, self._insecure = keys, insecure
        self._host = f"{bind.rpartition(':')[0]}:0"
        self._pool = pools.make(device)
        self._node: DecodeNode | None = None
        self._socket = ControlSocket(bind, identity=b"calibrate", keys=keys, insecure=insecure)
        self.endpoint = self._socket.endpoint

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Answers until `until()`, which is asked several times a second."""
        while not until():
            if self._node is not None:
                self._node.turn(5e-4)  # what is written here lands on some fabrics only while it is asked for
                if not self._socket.wait(0.0).messages:
                    continue
            elif not self._socket.wait(0.2).messages:
                continue
            for route, frames in self._socket.recv():
                for frame in frames:
                    self._socket.send(route, [msgspec.msgpack.encode(self._answer(frame))])

    def close(self) -> None:
        """Ends the node and stops listening. May be repeated."""
        self._stop()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, frame: bytes) -> Answer:
        try:
            question = _questions.decode(frame)
            match question:
                case Start():
                    self._stop()
                    self._node = DecodeNode(
                        self._pool, Topology(), transport=question.transport, path="auto", bind=self._host,
                        staging_nbytes=STAGING_NBYTES, keys=self._keys, insecure=self._insecure,
                    )  # fmt: skip
                case Pull():
                    return Took([self._pull(question)])
                case Copy():
                    return Took(self._copy(question))
                case Stop():
                    self._stop()
        except msgspec.DecodeError as error:
            return Failed(f"the caller's question cannot be read: {error}")
        except (PdstageError, TimeoutError) as error:
            return Failed(f"at the peer: {error}")
        return Took([])

    def _stop(self) -> None:
        node, self._node = self._node, None
        if node is not None:
            node.close()

    def _started(self) -> DecodeNode:
        if self._node is None:
            raise UsageError("no transport was started here", remedy="ask for Start first")
        return self._node

    def _pull(self, asked: Pull) -> float:
        node, name = self._started(), pools.component(asked.run)
        receiver = node.receive(asked.room, asked.directory, deadline_s=WAIT_S)
        while receiver.state is State.BOOTSTRAPPING:
            node.turn(1e-3)
        start = time.perf_counter()
        pages = pools.pages(asked.run, asked.tokens, -1 - asked.room & 0xFFFF)
        receiver.bind({name: pages}, {name: (0, asked.tokens)})
        receiver.wait(WAIT_S)
        took = time.perf_counter() - start
        receiver.wait_released(WAIT_S)
        return took

    def _copy(self, asked: Copy) -> list[float]:
        node = self._started()
        return copies(node.stager, self._pool, node.parts, asked, into_pool=True)


def copies(stager: Stager, pool: Pool, staging: list[Region], asked: Copy, *, into_pool: bool) -> list[float]:
    """Seconds of each gather into `staging`, or scatter out of it, each of other pages and at another place."""
    owned, what = pools.shares(asked.run), (pools.rect(asked.run, asked.tokens),)
    name = pools.component(asked.run)
    took = []
    for number in range(asked.repeats + 1):
        items = {name: Index.of(pools.pages(asked.run, asked.tokens, number))}
        part = staging[number % len(staging)]
        begun = time.perf_counter()
        if into_pool:
            stager.scatter(number, owned, what, wire=TOKEN_MAJOR, items=items, src=part)
        else:
            stager.gather(number, owned, what, wire=TOKEN_MAJOR, items=items, dst=part)
        while not (done := stager.poll()):
            pass
        took.append(time.perf_counter() - begun)
        if done[0].error is not None:
            raise done[0].error
    return took[1:]  # the first makes the plan

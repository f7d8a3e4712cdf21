"""The serving side of a calibration, and of the doctor's check with a peer: a decode node that receives as asked, and
reports how long that took.

The caller asks one question at a time. Questions and answers are msgpack, one frame each, over a control socket,
encrypted if it has keys. Fields are only ever added, with defaults, so that releases can be mixed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
from msgspec import Meta

from pdstage import State
from pdstage.closing import Closing
from pdstage.control.bootstrap import BootstrapClient
from pdstage.control.directory_api import UNREADABLE
from pdstage.control.zmq import ControlSocket
from pdstage.errors import PdstageError, UsageError
from pdstage.layout.topology import Topology
from pdstage.manager import DecodeNode, Receiver
from pdstage.plan import TOKEN_MAJOR, tokens_of
from pdstage.plan.tables import Index
from pdstage.stager import Move, Stager
from pdstage.tools.calibrate import pool as pools
from pdstage.tools.calibrate.about import Side, this_side

if TYPE_CHECKING:
    from pdstage.control.keys import Keys
    from pdstage.kernels import Pool
    from pdstage.layout import Region

STAGING_NBYTES = 64 << 20
WAIT_S = 60.0

Run: TypeAlias = Annotated[int, Meta(ge=pools.RUNS[0], le=pools.RUNS[-1])]
Count: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 24)]
Address: TypeAlias = Annotated[str, Meta(max_length=512)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=600)]


class Start(msgspec.Struct, frozen=True, tag=True):
    """Start a new node over `transport`, instead of the last one."""

    transport: Annotated[str, Meta(max_length=64)]


class Pull(msgspec.Struct, frozen=True, tag=True):
    """Receive `n_rooms` from `room` on, with that many runs per view; the answer is the seconds from `bind` to Success.

    `look`: also return a digest of the last room's data.
    """

    room: int
    directory: Address
    run: Run
    tokens: Count
    deadline_s: Seconds = WAIT_S
    look: bool = False
    n_rooms: Annotated[int, Meta(ge=1, le=64)] = 1


class About(msgspec.Struct, frozen=True, tag=True):
    """Describe yourself."""


class Find(msgspec.Struct, frozen=True, tag=True):
    """Ask the directory at the caller; the answer is the seconds it took."""

    directory: Address


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Connect to the caller's node, by a room that is then given up; the answer is the seconds to Welcome."""

    room: int
    directory: Address
    deadline_s: Seconds


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Scatter that many runs per view from staging memory; the answer is the seconds of each of `repeats`."""

    run: Run
    tokens: Count
    repeats: Annotated[int, Meta(ge=1, le=100)]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Close the node."""


class Took(msgspec.Struct, frozen=True, tag=True):
    seconds: list[float]
    digest: bytes = b""


class Known(msgspec.Struct, frozen=True, tag=True):
    side: Side


class Failed(msgspec.Struct, frozen=True, tag=True):
    why: str
    remedy: str = ""


Question = Start | Pull | Copy | Stop | About | Find | Meet
Answer = Took | Known | Failed
_questions = msgspec.msgpack.Decoder(Question)


class Peer(Closing):
    """Answers one question at a time at `bind`; its node listens on the same host, at another port.

    A context manager.
    """

    def __init__(self, bind: str, *, device: str = "cpu", keys: Keys | None = None, insecure: bool = False) -> None:
        self._keys, self._insecure = keys, insecure
        self._host = f"{bind.rpartition(':')[0]}:0"
        self._pool = pools.make(device)
        self._node: DecodeNode | None = None
        self._socket = ControlSocket(bind, identity=b"calibrate", keys=keys, insecure=insecure)
        self.endpoint = self._socket.endpoint

    def serve(self) -> None:
        """Answers until this process is interrupted."""
        while True:
            self._socket.take_refusals()  # while some are there, no wait waits
            if self._node is not None:
                self._node.turn(5e-4)  # on some fabrics writes to this process land only while it polls
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

    def _answer(self, frame: bytes) -> Answer:
        try:
            return self._answer_to(_questions.decode(frame))
        except UNREADABLE as error:
            return Failed(f"the caller's question cannot be read: {error}", "run one release on both sides")
        except PdstageError as error:
            return Failed(f"at the peer: {error.what}", error.remedy)
        except TimeoutError as error:
            return Failed(f"at the peer: {error}")

    def _answer_to(self, question: Question) -> Answer:
        match question:
            case Start():
                self._start(question.transport)
            case Stop():
                self._stop()
            case Pull():
                return self._pull(question)
            case Copy():
                node = self._started()
                return Took(copies(node.stager, self._pool, node.parts, question, into_pool=True))
            case About():
                return Known(this_side())
            case Find():
                begun = time.perf_counter()
                BootstrapClient(question.directory, keys=self._keys).lookup()
                return Took([time.perf_counter() - begun])
            case Meet():
                return self._meet(question)
        return Took([])

    def _start(self, transport: str) -> None:
        self._stop()
        self._node = DecodeNode(
            self._pool, Topology(), transport=transport, path="auto", bind=self._host,
            staging_nbytes=STAGING_NBYTES, keys=self._keys, insecure=self._insecure,
        )  # fmt: skip

    def _stop(self) -> None:
        node, self._node = self._node, None
        if node is not None:
            node.close()

    def _started(self) -> DecodeNode:
        if self._node is None:
            raise UsageError("no transport was started here", remedy="ask for Start first")
        return self._node

    def _meet(self, asked: Meet) -> Took:
        begun = time.perf_counter()
        receiver = self._connected(asked, asked.room)
        took = time.perf_counter() - begun
        failed = receiver.state is State.FAILED
        receiver.abort("they have met")
        if failed:
            receiver.wait(asked.deadline_s)  # raises why
        receiver.wait_released(asked.deadline_s)
        return Took([took])

    def _connected(self, asked: Meet | Pull, room: int) -> Receiver:
        """A room whose writer has agreed, or which has failed."""
        node = self._started()
        receiver = node.receive(room, asked.directory, deadline_s=asked.deadline_s)
        while receiver.state is State.BOOTSTRAPPING:
            node.turn(1e-3)
        return receiver

    def _pull(self, asked: Pull) -> Took:
        name, rooms = pools.component(asked.run), range(asked.room, asked.room + asked.n_rooms)
        pages = [pools.pages(asked.run, asked.tokens, -1 - room & 0xFFFF) for room in rooms]
        receivers = [self._connected(asked, room) for room in rooms]
        start = time.perf_counter()
        for receiver, items in zip(receivers, pages, strict=True):
            receiver.bind({name: items}, {name: (0, asked.tokens)})
        for receiver in receivers:
            receiver.wait(asked.deadline_s)
        took = time.perf_counter() - start
        for receiver in receivers:
            receiver.wait_released(asked.deadline_s)
        digest = pools.digest(self._pool, asked.run, asked.tokens, pages[-1]) if asked.look else b""
        return Took([took], digest)


def copies(stager: Stager, pool: Pool, staging: list[Region], asked: Copy, *, into_pool: bool) -> list[float]:
    """Seconds of each gather into `staging`, or scatter from it, each with other pages at another place."""
    owned, what = pools.shares(asked.run), (pools.rect(asked.run, asked.tokens),)
    name = pools.component(asked.run)
    took = []
    for number in range(asked.repeats + 1):
        items = {name: Index.of(pools.pages(asked.run, asked.tokens, number))}
        part = staging[number % len(staging)]
        begun = time.perf_counter()
        move = Move(owned, what, tokens_of(what), TOKEN_MAJOR, items)
        (stager.scatter if into_pool else stager.gather)(number, move, part)
        while not (done := stager.poll()):
            pass
        took.append(time.perf_counter() - begun)
        if done[0].error is not None:
            raise done[0].error
    return took[1:]  # the first makes the plan

"""Rooms: how many a second, and the latency of a single one.

One prefill and one decode rank, one process each, through the public API; a room is one page of 1 KiB. The baseline is
an echo between two of the same control sockets in the same two processes, in turn with the rooms.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import subprocess
import sys
import threading
import time
from itertools import product
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pdstage.control.bootstrap import BootstrapServer
from pdstage.control.zmq import ControlSocket
from pdstage.kernels import Pool
from pdstage.layout.topology import Topology
from pdstage.manager import DecodeNode, PrefillNode
from pdstage.protocol.state import State
from pdstage.tensors import build, paged_nhd

from .harness import Measured, Row, interleaved
from .ranks import Actor, Rank, observers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdstage.manager import Receiver, Sender

PAGE = 16
N_PAGES = 16_384
WINDOW = 64
"""Rooms in flight where rooms a second are measured."""
WAIT_S = 60.0
PROGRESS = ("inline", "thread")
RATES = {"inline": 9000, "thread": 2000}
"""Rooms a second to reach over `local`."""


def run(quick: bool, device: str | None = None) -> list[Row] | Measured:
    """`quick` leaves out nixl's rows. `device`: `gpu_rooms` in place of all that."""
    if device is not None:
        from .gpu_rooms import run as run_on  # noqa: PLC0415  (needs torch)

        return run_on(quick, device)
    rows: list[Row] = []
    for transport, progress in product(("local",) if quick else ("local", "nixl"), PROGRESS):
        with Pair(transport, progress) as pair:
            rows += [_rate(pair, quick), *_latency(pair, quick)]
            if progress == "inline":
                rows.append(_polls(pair, quick))
    return rows


def tiny_pool() -> Pool:
    """K and V of one layer and one head of 16."""
    memory = np.ones((2, 1, N_PAGES, PAGE, 1, 16), np.uint16)
    return Pool.of(build(paged_nhd(memory[0], memory[1], total_heads=1, tp=(1, 0), format="bf16")), keep=memory)


class Pair:
    """A prefill and a decode process, and the room numbers they have used."""

    def __init__(self, transport: str, progress: str) -> None:
        self.transport, self.progress = transport, progress
        self._bootstrap = BootstrapServer().start()
        options = {"transport": transport, "progress": progress, "staging_nbytes": 4 << 20}
        self.prefill = Rank(PrefillRank, self._bootstrap.address, options)
        self.decode = Rank(DecodeRank, self._bootstrap.address, options)
        self._next = 0

    def __enter__(self) -> Self:
        endpoint = self.prefill.ready().call("echo_endpoint")
        self.decode.ready().call("echo_connect", endpoint)
        return self

    def __exit__(self, *_: object) -> None:
        self.decode.close()
        self.prefill.close()
        self._bootstrap.close()

    def rooms(self, n: int) -> range:
        self._next += n
        return range(self._next - n, self._next)

    def both(self, method: str, *given: object) -> Any:  # noqa: ANN401
        """Runs `method` at both ranks side by side; the decode rank's answer."""
        self.prefill.begin(method, *given)
        answer = self.decode.call(method, *given)
        self.prefill.result()
        return answer


class _RoomRank(Actor):
    """What the two ranks share: a node, and one end of the echo."""

    node: PrefillNode | DecodeNode

    def __init__(self, progress: str) -> None:
        self.inline = progress == "inline"
        self.echo = ControlSocket(identity=secrets.token_bytes(8))
        self.route = b""

    def idle(self) -> None:
        if self.inline:
            self.node.turn(1e-3)
        else:
            super().idle()

    def close(self) -> None:
        self.node.close()
        self.echo.close()

    def begin(self, room: int) -> Sender | Receiver:
        """Has the node start one room."""
        raise NotImplementedError

    def run(self, rooms: range) -> float:
        """Seconds for all of `rooms`, `WINDOW` of them under way at once."""
        start = time.perf_counter()
        begun = ended = 0
        while ended < len(rooms):
            while begun < len(rooms) and begun - ended < WINDOW:
                self.begin(rooms[begun])
                begun += 1
            done = self.node.completions()
            for handle in done:
                handle.wait()  # raises the error of one that failed
            ended += len(done)
            if not done:
                self._wait_a_little()
        return time.perf_counter() - start

    def beside_work(self, method: str, *given: object) -> Any:  # noqa: ANN401
        """The answer of `method`, run in a thread while this one computes."""
        answers: list[object] = []
        thread = threading.Thread(target=lambda: answers.append(getattr(self, method)(*given)))
        thread.start()
        while thread.is_alive():
            _compute()
        return answers[0]

    def _wait_a_little(self) -> None:
        if self.inline:
            self.node.turn(1e-3)
        else:
            time.sleep(1e-4)


class PrefillRank(_RoomRank):
    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        super().__init__(options["progress"])
        self.node: PrefillNode = PrefillNode(
            tiny_pool(), Topology(), directory=directory, observers=observers(), **options
        )
        self.page = np.array([7])

    def begin(self, room: int) -> Sender:
        sender = self.node.send(room)
        sender.chunk(self.page, PAGE)
        sender.finish()
        return sender

    def serve(self, rooms: range, busy: bool) -> None:
        """Gives all of `rooms` at once; then waits, or computes, until decode has taken them."""
        senders = [self.begin(room) for room in rooms]
        while busy and not all(sender.status & 0x7F == State.SUCCESS for sender in senders):
            _compute()
            if self.inline:
                self.node.poll_many(senders)
        senders[-1].wait_released(WAIT_S)

    def echo_endpoint(self) -> str:
        return self.echo.endpoint

    def echoes(self, n: int, window: int) -> None:
        while n:
            self.echo.wait(1.0)
            for route, frames in self.echo.recv():
                n -= len(frames)
                self.echo.send(route, frames)


class DecodeRank(_RoomRank):
    def __init__(self, directory: str, options: dict[str, Any]) -> None:
        super().__init__(options["progress"])
        self.directory = directory
        self.node: DecodeNode = DecodeNode(tiny_pool(), Topology(), observers=observers(), **options)

    def begin(self, room: int) -> Receiver:
        receiver = self.node.receive(room, self.directory)
        receiver.bind(np.array([room % N_PAGES]), PAGE)
        return receiver

    def polls(self, rooms: range, repeats: int) -> list[float]:
        """Seconds of one `poll_many` of `rooms`, which nobody sends, and of asking each handle."""
        handles = [self.begin(room) for room in rooms]
        ways = [lambda: self.node.poll_many(handles), lambda: [handle.state for handle in handles]]
        took = interleaved(ways, repeats=repeats)
        for handle in handles:
            handle.abort()
        return took

    def latencies(self, rooms: range, busy: bool) -> list[float]:
        """Seconds from `bind` to Success, a room at a time."""
        receivers = [self.node.receive(room, self.directory) for room in rooms]
        while not all(receiver.ready_to_bind for receiver in receivers):
            self._wait_a_little()
        took = []
        for receiver in receivers:
            start = time.perf_counter()
            receiver.bind(np.array([1]), PAGE)
            self._await_success(receiver, busy)
            took.append(time.perf_counter() - start)
            receiver.wait_released(WAIT_S)
        return took

    def _await_success(self, receiver: Receiver, busy: bool) -> None:
        if not busy:
            receiver.wait(WAIT_S)
        while receiver.status & 0x7F != State.SUCCESS:
            _compute()
            if self.inline:
                receiver.poll()

    def echo_connect(self, endpoint: str) -> None:
        self.route = self.echo.connect(endpoint)

    def echoes(self, n: int, window: int) -> list[float]:
        """Seconds of `n` echoes, `window` in the air: of each if that is 1, else of all together."""
        took = []
        frames = [b"x" * 64] * window
        for _ in range(n // window):
            start = time.perf_counter()
            for frame in frames:
                self.echo.send(self.route, [frame])
            left = window
            while left:
                self.echo.wait(1.0)
                left -= sum(len(got) for _, got in self.echo.recv())
            took.append(time.perf_counter() - start)
        return took if window == 1 else [sum(took)]


def _compute() -> None:
    """About 200 us of nothing but Python: an engine's scheduler between two polls."""
    until = time.perf_counter() + 2e-4
    while time.perf_counter() < until:
        pass


def _echoes(pair: Pair, n: int, busy: bool) -> list[float]:
    """Seconds of `n` echoes, one at a time; `busy` with what keeps the rooms' processors busy, and their interpreters
    where a thread makes the progress.
    """
    method = ("beside_work", "echoes") if busy and pair.progress == "thread" else ("echoes",)
    with _spinning() if busy and pair.progress == "inline" else contextlib.nullcontext():
        took: list[float] = pair.both(*method, n, 1)
    return took


@contextlib.contextmanager
def _spinning() -> Iterator[None]:
    """Two processes that compute all the while, as both ranks' main threads do in the rooms beside which this runs."""
    spinners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def _rate(pair: Pair, quick: bool) -> Row:
    n, repeats = (256, 3) if quick else (2000, 7)
    pair.both("run", pair.rooms(n))
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(n / pair.both("run", pair.rooms(n)))
        theirs.append(n / pair.both("echoes", n // WINDOW * WINDOW, WINDOW)[0])
    return Row(
        name=f"rooms a second, {pair.transport}, {pair.progress}",
        value=statistics.median(ours),
        baseline=statistics.median(theirs),
        unit="1/s",
        target=RATES[pair.progress] if pair.transport == "local" else None,
        on="value",
        detail=f"{WINDOW} under way; baseline: echoes of 64 bytes, as many in the air",
    )


def _polls(pair: Pair, quick: bool) -> Row:
    poll, ask = pair.decode.call("polls", pair.rooms(1000), 21 if quick else 201)
    return Row(
        name=f"poll_many of 1000 rooms, {pair.transport}",
        value=poll * 1e6,
        baseline=ask * 1e6,
        unit="us",
        target=10,
        on="value",
        better="lower",
        detail="inline: with one turn of the node; baseline: each handle's state",
    )


def _latency(pair: Pair, quick: bool) -> list[Row]:
    n, repeats = (40, 1) if quick else (200, 5)
    rows = []
    for busy, share, target in ((False, 50, 300), (True, 99, 1.2)):
        ours, theirs = [], []
        what = f"{'busy' if busy else 'idle'} main threads, p{share}, {pair.transport}, {pair.progress}"
        for _ in range(repeats):
            rooms = pair.rooms(n)
            pair.prefill.begin("serve", rooms, busy)
            ours.append(np.percentile(pair.decode.call("latencies", rooms, busy), share))
            pair.prefill.result()
            theirs.append(np.percentile(_echoes(pair, n, busy), share))
        rows.append(
            Row(
                name=f"Open to Success, {what}",
                value=statistics.median(ours) * 1e6,
                baseline=statistics.median(theirs) * 1e6,
                unit="us",
                target=target if pair.transport == "local" else None,
                on="ratio" if busy else "value",
                better="lower",
                detail="one room at a time; baseline: one echo, as busy",
            )
        )
    return rows

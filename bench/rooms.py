"""Rooms: how many a second, the cost of one beside thousands of others, and the latency of a single one.

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
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pdstage.control.bootstrap import BootstrapServer
from pdstage.control.zmq import ControlSocket
from pdstage.layout.topology import Topology
from pdstage.manager import DecodeNode, PrefillNode
from pdstage.protocol.state import State

from .harness import Measured, Row, interleaved
from .ranks import Actor, Rank, Shape, expose, observers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdstage.manager import Receiver, Sender

PAGE = 16
TINY = Shape(kv_heads=1, head_dim=16, layers=1, page=PAGE, n_pages=16_384)
WINDOW = 64
"""Rooms in flight where rooms a second are measured."""
WAIT_S = 60.0
PROGRESS = ("inline", "thread")
RATES = {"inline": 9000, "thread": 2000}
"""Rooms a second to reach over `local`."""


def run(quick: bool, device: str | None = None) -> list[Row] | Measured:
    """`quick` leaves out nixl's rows, and opens 1,000 rooms where else it opens 10,000. `device`: `gpu_rooms` in place
    of all that.
    """
    if device is not None:
        from .gpu_rooms import run as run_on  # noqa: PLC0415  (needs torch)

        return run_on(quick, device)
    rows: list[Row] = []
    for progress in PROGRESS:
        with Pair("local", progress) as pair:
            rows += [_rate(pair, quick), *_latency(pair, quick)]
            if progress == "inline":
                rows += _crowd(pair, quick)
    if not quick:
        for progress in PROGRESS:
            with Pair("nixl", progress) as pair:
                rows += [_rate(pair, quick), *_latency(pair, quick)]
    return rows


class Pair:
    """A prefill and a decode process, and the room numbers they have used; with `keys`, a key file, encrypted."""

    def __init__(self, transport: str, progress: str, keys: str | None = None) -> None:
        self.transport, self.progress = transport, progress
        self._bootstrap = BootstrapServer(keys=keys).start()
        options = {"transport": transport, "progress": progress, "staging_nbytes": 4 << 20, "keys": keys}
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

    def begin(self, room: int) -> None:
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
    def __init__(self, bootstrap: str, options: dict[str, Any]) -> None:
        super().__init__(options["progress"])
        self.node: PrefillNode = PrefillNode(
            TINY.pool(), Topology(), bootstrap=bootstrap, observers=observers(), **options
        )
        expose(self.node)
        self.page = np.array([7])
        self.held: list[Sender] = []

    def begin(self, room: int) -> None:
        self.submit(room)

    def submit(self, room: int) -> Sender:
        sender = self.node.send(room)
        sender.chunk(self.page, PAGE)
        sender.finish()
        return sender

    def hold(self, rooms: Sequence[int]) -> None:
        """Submits rooms of which no chunk comes."""
        self.held += [self.node.send(room) for room in rooms]

    def drop(self, n_left: int) -> None:
        """Waits for the end of all held rooms but the first `n_left`."""
        for sender in self.held[n_left:]:
            sender.wait_released(WAIT_S)
        del self.held[n_left:]
        self.node.completions()

    def serve(self, rooms: range, busy: bool) -> None:
        """Gives all of `rooms` at once; then waits, or computes, until decode has taken them."""
        senders = [self.submit(room) for room in rooms]
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
    def __init__(self, bootstrap: str, options: dict[str, Any]) -> None:
        super().__init__(options["progress"])
        self.bootstrap = bootstrap
        self.node: DecodeNode = DecodeNode(TINY.pool(), Topology(), observers=observers(), **options)
        expose(self.node)
        self.held: list[Receiver] = []

    def begin(self, room: int) -> None:
        self.take(room)

    def take(self, room: int) -> Receiver:
        receiver = self.node.receive(room, self.bootstrap)
        receiver.bind(np.array([room % TINY.n_pages]), PAGE)
        return receiver

    def hold(self, rooms: Sequence[int]) -> None:
        """Opens rooms to which nothing comes."""
        self.held += [self.take(room) for room in rooms]
        while any(receiver.status & 0x7F == State.BOOTSTRAPPING for receiver in self.held):
            self._wait_a_little()

    def drop(self, n_left: int) -> None:
        for receiver in self.held[n_left:]:
            receiver.abort()
        for receiver in self.held[n_left:]:
            receiver.wait_released(WAIT_S)
        del self.held[n_left:]
        self.node.completions()

    def poll_many(self, n: int, repeats: int) -> list[float]:
        """Seconds of one `poll_many` of `n` held rooms, and of asking each handle."""
        handles = self.held[:n]
        return interleaved(
            [lambda: self.node.poll_many(handles), lambda: [handle.state for handle in handles]], repeats=repeats
        )

    def latencies(self, rooms: range, busy: bool) -> list[float]:
        """Seconds from `bind` to Success, a room at a time."""
        receivers = [self.node.receive(room, self.bootstrap) for room in rooms]
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


def _crowd(pair: Pair, quick: bool) -> list[Row]:
    """What a room costs while many others are open, and `poll_many` of 1,000 of them."""
    n, few, many, repeats = (256, 100, 1000, 1) if quick else (2000, 100, 10_000, 3)
    pair.both("hold", list(pair.rooms(few)))
    alone, crowded, polls = [], [], []
    for _ in range(repeats):
        alone.append(pair.both("run", pair.rooms(n)) / n)
        pair.both("hold", list(pair.rooms(many - few)))
        crowded.append(pair.both("run", pair.rooms(n)) / n)
        polls.append(pair.decode.call("poll_many", 1000, 21 if quick else 201))
        pair.both("drop", few)
    pair.both("drop", 0)
    poll, ask = (statistics.median(column) for column in zip(*polls, strict=True))
    return [
        Row(
            name=f"a room's cost, {many} open beside {few} open, {pair.transport}",
            value=statistics.median(crowded) * 1e6,
            baseline=statistics.median(alone) * 1e6,
            unit="us",
            target=1.5,
            better="lower",
            detail=f"inline, {WINDOW} under way; the others wait for their first chunk",
        ),
        Row(
            name=f"poll_many of 1000 rooms, {many} open",
            value=poll * 1e6,
            baseline=ask * 1e6,
            unit="us",
            target=10,
            on="value",
            better="lower",
            detail="inline: with one turn of the node; baseline: each handle's state",
        ),
    ]

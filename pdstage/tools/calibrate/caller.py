"""The asking side of a calibration: a prefill node, the sweep, and the resulting file.

Times copies alone, and rooms by either path end to end: medians of repeats, taken in turn.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime
from itertools import product
from typing import TYPE_CHECKING

import msgspec

from pdstage.closing import Closing
from pdstage.control.zmq import ControlSocket
from pdstage.errors import PdstageError, TransportError
from pdstage.layout.topology import Topology
from pdstage.manager import PrefillNode
from pdstage.manager.calibration import VERSION, Calibration
from pdstage.protocol.config import Config
from pdstage.protocol.destinations import LEAST_PIECE_NBYTES
from pdstage.tools.calibrate import fit
from pdstage.tools.calibrate import pool as pools
from pdstage.tools.calibrate.fit import Timed, Timings
from pdstage.tools.calibrate.peer import (
    STAGING_NBYTES,
    WAIT_S,
    About,
    Answer,
    Copy,
    Failed,
    Known,
    Pull,
    Question,
    Start,
    Stop,
    Took,
    copies,
)
from pdstage.transport import available
from pdstage.watch import terminal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pdstage.control.keys import Keys
    from pdstage.plan.cost import CostModel
    from pdstage.tools.calibrate.about import Side

_answers = msgspec.msgpack.Decoder(Answer)


# Runs, bytes of a room or a copy, repeats.
FULL = (pools.RUNS, (256 << 10, 1 << 20, 4 << 20, 16 << 20), 6)
_CONFIG = Config(chunk_nbytes=LEAST_PIECE_NBYTES)
"""Chunks of one length, however long a room, so that it is known how many each has."""
QUICK = (pools.RUNS[::3], (256 << 10, 2 << 20, 8 << 20), 3)
_SHOWN_NBYTES = 16 << 20
"""Of the room, in runs of 4 KiB, whose staged rate is shown."""
AT_ONCE = 4
"""Rooms that are timed together: a single room waits for its lease and its copies in turn, while a busy node does other
work meanwhile.
"""


class Caller(Closing):
    """A calibration with the peer at `endpoint`. A context manager."""

    def __init__(
        self,
        endpoint: str,
        *,
        bind: str = "tcp://127.0.0.1:0",
        device: str = "cpu",
        keys: Keys | None = None,
        insecure: bool = False,
    ) -> None:
        self._bind, self._keys, self._insecure = bind, keys, insecure
        self.pool = pools.make(device)
        self._socket = ControlSocket(None, identity=secrets.token_bytes(16), keys=keys, insecure=insecure)
        self._route = self._socket.connect(endpoint)
        self._endpoint = endpoint
        self._next = 0
        self._unanswered: TransportError | None = None

    def close(self) -> None:
        """Disconnects. May be repeated."""
        self._socket.close()

    @contextlib.contextmanager
    def started(self, transport: str, *, wait_s: float = 2 * WAIT_S) -> Iterator[PrefillNode]:
        """A node here, and one at the peer that `room` may use. Raises what either raises at its start."""
        self.ask(Start(transport), wait_s=wait_s)
        with PrefillNode(
            self.pool, Topology(), transport=transport, path="auto", bind=self._bind, staging_nbytes=STAGING_NBYTES,
            keys=self._keys, insecure=self._insecure, config=_CONFIG,
        ) as node:  # fmt: skip
            yield node
        self.ask(Stop(), wait_s=wait_s)

    def measure(self, transport: str, *, quick: bool = False) -> CostModel:
        """The cost of `transport` from here to the peer. Raises what its nodes raise on either side."""
        runs, sizes, repeats = QUICK if quick else FULL
        with self.started(transport) as node:
            self.room(node, "staged", runs[0], pools.tokens(runs[0], sizes[0]))  # connects the two
            asked = [Copy(run, tokens, repeats) for run, tokens in _cases(runs, [n for n in sizes if n <= 4 << 20])]
            gather = [_timed(one, copies(node.stager, self.pool, node.parts, one, into_pool=False)) for one in asked]
            scatter = [_timed(one, self.ask(one, node).seconds) for one in asked]
            rooms = self._rooms(node, [Copy(run, tokens, repeats) for run, tokens in _cases(runs, sizes)])
        return fit.model(Timings(gather, scatter, rooms["direct"], rooms["staged"]))

    def _rooms(self, node: PrefillNode, asked: list[Copy]) -> dict[str, list[Timed]]:
        """By path; timed in turn, so that the machine's slow phases affect both alike."""
        took = defaultdict(list)
        for number in range(asked[0].repeats + 1):
            for one, path in product(asked, ("direct", "staged")):
                seconds = self.room(node, path, one.run, one.tokens, at_once=AT_ONCE).seconds[0]
                if number:  # the first round warms up
                    took[path, one].append(seconds / AT_ONCE)
        chunk_nbytes, found = min(node.parts[0].nbytes, _CONFIG.chunk_nbytes), defaultdict(list)
        for (path, one), seconds_each in took.items():
            found[path].append(_timed(one, seconds_each, chunk_nbytes))
        return found

    def room(
        self,
        node: PrefillNode,
        path: str,
        run: int,
        tokens: int,
        *,
        wait_s: float = WAIT_S,
        look: bool = False,
        at_once: int = 1,
    ) -> Took:
        """Sends `at_once` rooms to the peer. `look`: raises `TransportError` unless the last arrived unchanged."""
        numbers = [self.next_room() for _ in range(at_once)]
        node.path = path
        senders = [node.send(number) for number in numbers]
        name = pools.component(run)
        for number, sender in zip(numbers, senders, strict=True):
            pages = pools.pages(run, tokens, number)
            sender.chunk({name: pages}, {name: (0, tokens)})
            sender.finish()
        pull = Pull(numbers[0], node.directory_address, run, tokens, wait_s, look, at_once)
        took = self.ask(pull, node, wait_s=wait_s + 5)
        for sender in senders:
            sender.wait_released(wait_s)
        if look and took.digest != pools.digest(self.pool, run, tokens, pages):
            raise TransportError(
                f"other bytes arrived than were sent, by the {path} path over {node.transport.traits.name}",
                remedy="do not use that transport here; report it",
            )
        return took

    def next_room(self) -> int:
        self._next += 1
        return self._next

    def about(self, wait_s: float = WAIT_S) -> Side:
        """Describes the peer. Raises `TransportError` if the peer is too old to answer."""
        answer = self._answer(About(), None, wait_s)
        assert isinstance(answer, Known)
        return answer.side

    def ask(self, question: Question, node: PrefillNode | None = None, *, wait_s: float = 2 * WAIT_S) -> Took:
        """The peer's answer; `node` goes on meanwhile. Raises `TransportError` with the peer's own reason."""
        answer = self._answer(question, node, wait_s)
        assert isinstance(answer, Took)
        return answer

    def _answer(self, question: Question, node: PrefillNode | None, wait_s: float) -> Took | Known:
        if self._unanswered is not None:  # the next answer may belong to that question
            raise self._unanswered
        self._socket.send(self._route, [msgspec.msgpack.encode(question)])
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            if node is not None:
                node.turn(5e-4)
            if self._socket.wait(0.0 if node is not None else 0.2).messages:
                for _, (frame, *_) in self._socket.recv():
                    answer: Answer = _answers.decode(frame)
                    if isinstance(answer, Failed):
                        remedy = answer.remedy or "see what the peer printed; run one release on both sides"
                        raise TransportError(answer.why, remedy=remedy)
                    return answer
            for _, error in self._socket.take_refusals():
                raise error
        self._unanswered = TransportError(
            f"no answer from {self._endpoint} in {wait_s:g} s",
            remedy="is pdstage calibrate --serve (or doctor --serve) still running there, with keys as here?",
        )
        raise self._unanswered


def _cases(runs: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Runs and tokens; with long runs, one token exceeds the smaller sizes."""
    return list(dict.fromkeys((run, pools.tokens(run, size)) for run in runs for size in sizes))


def _timed(one: Copy, took: list[float], chunk_nbytes: int = 1 << 62) -> Timed:
    n_runs = one.tokens * pools.N_VIEWS
    return Timed(n_runs * one.run, n_runs, -(-n_runs * one.run // chunk_nbytes), statistics.median(took))


def calibrate(
    caller: Caller, transports: Sequence[str], *, decode_host: str = "", quick: bool = False
) -> tuple[Calibration, list[str]]:
    """Measures each of `transports`; with ["all"], those that work here, and says why the others do not.

    Raises what a named one raises, and `TransportError` if none of all can be measured: an empty file must not replace
    the last one.
    """
    every, reasons = list(transports) == ["all"], available()
    found = {}
    left_out = [reason for reason in reasons.values() if reason and every]
    for name in [name for name, reason in reasons.items() if not reason] if every else transports:
        try:
            found[name] = caller.measure(name, quick=quick)
        except PdstageError as error:
            if not every:
                raise
            left_out.append(f"transport {name!r}: {error}")
    if not found:
        raise TransportError(f"no transport was measured: {'; '.join(left_out)}", remedy="name one with --transport")
    here = socket.gethostname()
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    made = Calibration(
        version=VERSION, made_at=made_at, prefill_host=here, decode_host=decode_host or here, transports=found
    )
    return made, left_out


def table(made: Calibration) -> list[str]:
    """Lines for people: of each transport, a descriptor's time by its length, and the rate of one staged room."""
    lengths = sorted({nbytes for cost in made.transports.values() for nbytes, _ in cost.descriptors})
    rows = [
        (
            name, *(f"{cost.descriptor_s(nbytes) * 1e6:.2f}" for nbytes in lengths),
            f"{_SHOWN_NBYTES / cost.staged_s(_SHOWN_NBYTES, _SHOWN_NBYTES >> 12) / 1e9:.2f}",
        )
        for name, cost in made.transports.items()
    ]  # fmt: skip
    return terminal.table(("us a descriptor of", *(f"{nbytes:,} B" for nbytes in lengths), "GB/s staged"), rows)


@contextlib.contextmanager
def own_peer(device: str = "cpu", keys: Path | None = None) -> Iterator[str]:
    """The endpoint of a peer in another process on this host, which ends with the context."""
    command = [sys.executable, "-m", "pdstage.cli", "calibrate", "--serve", "tcp://127.0.0.1:0", "--device", device]
    command += ["--keys", str(keys)] if keys is not None else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise TransportError("the peer's process did not start", remedy="see what it printed")
            yield line.split()[-1]
        finally:
            process.terminate()
            process.wait()

"""Processes that are interrupted: one engine's life with a node, and a Ctrl-C at a chosen place of it.

Python raises KeyboardInterrupt where a function begins and where a call of a C function has returned. A profiler sees
both, so it can raise one at each place that a life passes, without any timing.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

import pdstage
from pdstage import State
from pdstage.control.bootstrap import BootstrapServer
from pdstage.errors import PdstageError
from pdstage.manager.handle import Handle
from pdstage.manager.node import Node
from tests.manager.engine import QUICK, TOKENS, Rank, decode_node, drive, prefill_node

forked = multiprocessing.get_context("fork")
"""Of a process without threads: what each life needs is loaded already."""

_PACKAGE = f"{Path(pdstage.__file__).parent}{os.sep}"
_CALLED = ("contextlib.py", "threading.py", "queue.py")
LONGEST_S = 240.0
_CLOSE_S = 1.0


class Place(NamedTuple):
    """Where a Ctrl-C comes: in this line, for the `nth` time it could."""

    file: str
    line: int
    event: str
    nth: int


class Steps:
    """A profiler: counts what this thread does, and interrupts it at `at`."""

    def __init__(self, at: Place | None) -> None:
        self._at = at
        self.seen: Counter[tuple[str, int, str]] = Counter()

    def step(self, frame: object, event: str, _: object) -> None:
        if event not in ("call", "c_return"):
            return
        file = frame.f_code.co_filename
        if not file.startswith(_PACKAGE) and not file.endswith(_CALLED):
            return
        place = (file.removeprefix(_PACKAGE), frame.f_lineno, event)
        self.seen[place] += 1
        if self._at is not None and place == self._at[:3] and self.seen[place] == self._at.nth:
            signal.raise_signal(signal.SIGINT)


def places(seen: Counter[tuple[str, int, str]], n: int, seed: int) -> list[Place]:
    """`n` of the places that a life passed, drawn; of each one of its times."""
    rng = random.Random(seed)
    drawn = rng.sample(sorted(seen), min(n, len(seen)))
    return [Place(*place, rng.randint(1, min(seen[place], 8))) for place in drawn]


class Outcome(NamedTuple):
    """What became of one life."""

    interrupted: bool
    broken: str
    """What must not be, in words; empty if nothing."""
    seen: Counter[tuple[str, int, str]]


SOON_MISSED = replace(QUICK, max_silence_s=10.0)
"""Of a life: the side that serves it need not wait for long where it ends without a word. On a busy machine its rooms
may fail of that, as they may of the Ctrl-C.
"""


def decode_life(peer: Peer, held: list[object], **options: object) -> None:
    """Receives two rooms, the second of which it gives up. `held` gets the node and its handles."""
    rank = Rank()
    held.append(node := decode_node(rank, config=SOON_MISSED, **options))
    one, other = (node.receive(room, peer.address) for room in peer.rooms)
    held += [one, other]
    into = rank.allocate(TOKENS)
    one.bind(into, TOKENS)
    drive([node], lambda: one.state is not State.BOOTSTRAPPING, LONGEST_S)
    other.bind(rank.allocate(TOKENS), TOKENS)
    one.wait(LONGEST_S)
    assert rank.holds(peer.rooms[0], TOKENS, into)
    other.abort()
    node.poll_many([one, other])
    node.status()
    one.wait_released(LONGEST_S)
    node.close(_CLOSE_S)


def prefill_life(peer: Peer, held: list[object], **options: object) -> None:
    """Sends two rooms, the second of which it gives up."""
    rank = Rank()
    held.append(node := prefill_node(rank, peer.address, instance=peer.instance, config=SOON_MISSED, **options))
    one, other = (node.send(room) for room in peer.rooms)
    held += [one, other]
    pages = rank.allocate(TOKENS)
    rank.write(peer.rooms[0], TOKENS, pages)
    one.chunk(pages, (0, 20))
    one.chunk(pages, (20, TOKENS))
    one.finish(aux=b"aux")
    other.chunk(pages, (0, 20))
    one.wait(LONGEST_S)
    other.abort()
    node.completions()
    node.status()
    one.wait_released(LONGEST_S)
    node.close(_CLOSE_S)


class Peer(NamedTuple):
    """Where the other side of a life is found, and which rooms it expects."""

    address: str
    instance: str
    rooms: tuple[int, int]


def serve_lives(pipe: Connection, role: str) -> None:
    """The other side of many lives, one after the other: is told of each, and at the end says what did not end well.

    What a life never began with is given up once it is over: no deadline that a busy machine might pass does that.
    """
    rank = Rank(n_pages=1 << 15)
    with BootstrapServer() as directory:
        make = partial(prefill_node, bootstrap=directory.address) if role == "prefill" else decode_node
        with make(rank, progress="thread") as node:
            pipe.send(directory.address)
            handles, into = [], {}
            while (peer := pipe.recv()) is not None:
                _give_up(handles[-2:])
                for room in peer.rooms:
                    into[room] = rank.allocate(TOKENS)
                    if role == "prefill":
                        rank.write(room, TOKENS, into[room])
                        handles.append(node.send(room))
                        handles[-1].chunk(into[room], (0, TOKENS))
                        handles[-1].finish()
                    else:
                        handles.append(node.receive(room, peer.address, instance=peer.instance))
                        handles[-1].bind(into[room], TOKENS)
                pipe.send("expected")
            _give_up(handles[-2:])
            pipe.send(list(_left_behind(node, rank, handles, into)))


def _give_up(handles: Sequence[Handle]) -> None:
    for handle in handles:
        if handle.state is State.BOOTSTRAPPING:
            handle.abort()


def _left_behind(node: Node, rank: Rank, handles: Sequence[Handle], into: Mapping[int, np.ndarray]) -> Iterator[str]:
    """What lives that are over have left of their rooms. One that ended before it ever answered is not proved dead."""
    for handle in handles:
        with contextlib.suppress(PdstageError):
            handle.wait(LONGEST_S)
            if not rank.holds(handle.id, TOKENS, into[handle.id]):
                yield f"room {handle.id} has other bytes"
    for endpoint in node.unfenced():
        node.fence(endpoint)
    for handle in handles:
        try:
            handle.wait_released(LONGEST_S)
        except TimeoutError:
            yield f"room {handle.id} is {handle.state.name}, and not released"


def _broken(held: list[object]) -> Iterator[str]:
    """What must not be after a Ctrl-C: a close that does not end, a lock that is held, a room that goes on."""
    for node in held[:1]:
        closing = threading.Thread(target=node.close, args=(_CLOSE_S,), daemon=True)
        closing.start()  # another thread: of locks that this one holds it cannot say anything
        closing.join(LONGEST_S)
        if closing.is_alive():
            at = traceback.extract_stack(sys._current_frames()[closing.ident])
            yield f"close() has not ended: {at[-4:]}"
            return
        node.close(_CLOSE_S)
        if node.driver.turning.holder is not None:
            yield "a turn has no end"
    for handle in held[1:]:
        if handle.state not in (State.SUCCESS, State.FAILED):
            yield f"room {handle.id} is {handle.state.name}"


def live(pipe: Connection, life: Callable[..., None], at: Place | None, *args: object, **options: object) -> None:
    """One life in this process, interrupted at `at`; says what became of it, and ends as a program does."""
    held: list[object] = []
    steps, kept = Steps(at), None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.setprofile(steps.step)
        life(*args, held, **options)
    except KeyboardInterrupt as error:
        kept = error  # and with it every frame of what was interrupted, as a prompt keeps them
    except PdstageError:  # the peer's or the room's
        pass
    except RuntimeError as error:  # of threading.Condition.wait, which then releases a lock that it does not hold
        kept = error.__context__
        assert isinstance(kept, KeyboardInterrupt)
    finally:
        sys.setprofile(None)
    pipe.send(Outcome(kept is not None, "; ".join(_broken(held)), steps.seen))


def run(life: Callable[..., None], at: Place | None, *args: object, **options: object) -> Outcome:
    """`live` in a forked process, which ends well."""
    ours, theirs = forked.Pipe()
    process = forked.Process(target=live, args=(theirs, life, at, *args), kwargs=options)
    process.start()
    theirs.close()
    try:
        assert ours.poll(4 * LONGEST_S), f"no word after {at}"
        outcome = ours.recv()
        process.join(LONGEST_S)
        assert (outcome.broken, process.exitcode) == ("", 0), at
        return outcome
    finally:
        ours.close()
        process.kill()
        process.join()


def interrupt_anywhere(role: str, progress: str, n: int) -> None:
    """Lives of one role, interrupted at `n` places; a process of the other role serves them all."""
    life, other = (decode_life, "prefill") if role == "decode" else (prefill_life, "decode")
    pipe, theirs = forked.Pipe()
    process = forked.Process(target=serve_lives, args=(theirs, other))
    process.start()
    theirs.close()
    try:
        assert pipe.poll(LONGEST_S)
        address, n_lives = pipe.recv(), itertools.count(1)

        def next_life(place: Place | None) -> Outcome:
            number = next(n_lives)
            peer = Peer(address, f"life {number}", (2 * number, 2 * number + 1))
            pipe.send(peer)
            assert pipe.poll(LONGEST_S)
            assert pipe.recv() == "expected"
            return run(life, place, peer, progress=progress)

        whole = next_life(None)
        n_interrupted = sum(next_life(place).interrupted for place in places(whole.seen, n, seed=1))
        assert n_interrupted > n // 2 or n_interrupted > len(whole.seen) // 2
        next_life(None)
        pipe.send(None)
        assert pipe.poll(300)
        assert pipe.recv() == []
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()

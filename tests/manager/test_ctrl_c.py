"""A Ctrl-C at any place of a life with two nodes.

Python raises KeyboardInterrupt where a function begins and where a call of a C function has returned. A profiler sees
both, so it can raise one at each place that a life passes, without any timing.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import pytest

import pdstage
from pdstage import PdstageError, State
from tests import processes
from tests.manager.engine import QUICK, TOKENS, Pair, Rank, decode_node, prefill_node

_PACKAGE = f"{Path(pdstage.__file__).parent}{os.sep}"
_CALLED = ("contextlib.py", "threading.py", "queue.py")
_LONGEST_S, _CLOSE_S = 240.0, 1.0
_CONFIG = replace(QUICK, max_silence_s=10.0)
"""Neither side waits for long where the other was ended without a word."""


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


def life(nodes: list, handles: list, inline: str) -> None:
    """Moves a room and gives up another, between a node that this thread turns and one that has its own."""
    src, dst = Rank(), Rank()
    mode = {role: "inline" if role == inline else "thread" for role in ("prefill", "decode")}
    nodes.append(p := prefill_node(src, None, config=_CONFIG, progress=mode["prefill"]))
    nodes.append(d := decode_node(dst, config=_CONFIG, progress=mode["decode"]))
    pair = Pair(p, src, d, dst)
    rooms = [pair.open(room) for room in (1, 2)]
    for sender, receiver, pages, _ in rooms:
        handles += (sender, receiver)
        sender.chunk(pages, (0, 20))
    rooms[0].sender.chunk(rooms[0].pages, (20, TOKENS))
    rooms[0].sender.finish(aux=b"aux")
    senders, receivers, *_ = zip(*rooms, strict=True)
    ours = [(senders, p), (receivers, d)]
    for (one, other), node in ours if inline == "prefill" else ours[::-1]:
        one.wait(_LONGEST_S)
        other.abort()
        node.poll_many([one, other])
        node.completions()
        node.status()
        one.wait_released(_LONGEST_S)
    assert dst.holds(1, TOKENS, rooms[0].into)
    for node in nodes:
        node.close(_CLOSE_S)


def broken(nodes: list, handles: list) -> Iterator[str]:
    """What must not be after a Ctrl-C: a close that does not end, a lock that is held, a room that goes on."""
    for node in nodes:
        closing = threading.Thread(target=node.close, args=(_CLOSE_S,), daemon=True)
        closing.start()  # another thread: of locks that this one holds it cannot say anything
        closing.join(_LONGEST_S)
        if closing.is_alive():
            at = traceback.extract_stack(sys._current_frames()[closing.ident])
            yield f"close() has not ended: {at[-4:]}"
            return
        node.close(_CLOSE_S)
        if node.driver.turning.holder is not None:
            yield "a turn has no end"
    for handle in handles:
        if handle.state not in (State.SUCCESS, State.FAILED):
            yield f"room {handle.id} is {handle.state.name}"


def live(pipe: Connection, at: Place | None, inline: str) -> None:
    """One life in this process, interrupted at `at`; says what became of it, and ends as a program does."""
    nodes, handles, steps, kept = [], [], Steps(at), None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.setprofile(steps.step)
        life(nodes, handles, inline)
    except KeyboardInterrupt as error:
        kept = error  # and with it every frame of what was interrupted, as a prompt keeps them
    except PdstageError:  # the other node's or the room's
        pass
    except RuntimeError as error:  # of threading.Condition.wait, which then releases a lock that it does not hold
        kept = error.__context__
        assert isinstance(kept, KeyboardInterrupt)
    finally:
        sys.setprofile(None)
    pipe.send((kept is not None, "; ".join(broken(nodes, handles)), steps.seen))


def run(at: Place | None, inline: str) -> tuple[bool, Counter[tuple[str, int, str]]]:
    """`live` in a forked process, which ends well: whether it was interrupted, and what it passed."""
    process, pipe = processes.child(live, at, inline, how="fork")
    try:
        assert pipe.poll(4 * _LONGEST_S), f"no word after {at}"
        interrupted, wrong, seen = pipe.recv()
        process.join(_LONGEST_S)
        assert (wrong, process.exitcode) == ("", 0), at
        return interrupted, seen
    finally:
        pipe.close()
        process.kill()
        process.join()


@pytest.mark.parametrize("n", [12, pytest.param(700, marks=pytest.mark.full)])
@pytest.mark.parametrize("inline", ["prefill", "decode", "neither"])
def test_a_ctrl_c_at_any_place(inline: str, n: int) -> None:
    """The nodes close in time, with no lock held, their rooms end, and their process does (I10)."""
    _, seen = run(None, inline)
    rng = random.Random(1)
    drawn = rng.sample(sorted(seen), min(n, len(seen)))
    n_interrupted = sum(run(Place(*place, rng.randint(1, min(seen[place], 8))), inline)[0] for place in drawn)
    assert n_interrupted > len(drawn) // 2

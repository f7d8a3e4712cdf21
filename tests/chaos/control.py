"""The negative control: a writer stopped amid a direct write, and an engine that may reuse the pages too early.

With `sabotage` the engine takes its pages back when the room has failed, not when it is `released`; the writer goes on
later and the checks must see its bytes. Without it they must see none: the pages stay reserved while that writer may
live.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdstage import DecodeNode, State, Topology
from pdstage.control.bootstrap import BootstrapServer
from tests.chaos.engine import DecodeEngine, Order
from tests.chaos.member import Member
from tests.chaos.memory import Pages
from tests.chaos.plan import CONFIG, Engine, Site
from tests.chaos.rank import Job

_TOKENS, _PAGE, _STAGING_NBYTES = 12_288, 16, 1 << 20
_TRIES = 8


@dataclass(slots=True)
class Seen:
    """`wrong`: what the checks saw. `released_...`: whether the pages came back while the writer was stopped, and after
    its death.
    """

    wrong: list[str] = field(default_factory=list)
    tries: int = 0
    released_early: bool = False
    released_at_death: bool = False


def stopped_writer(folder: Path, transport: str, *, sabotage: bool) -> Seen:
    """Tries until a writer was stopped between a room's first and last byte; lets it go on, and at last kills it."""
    seen, shape = Seen(), Engine("control", "prefill", 1, 8, False, "inline")
    site = Site(engines=(shape,), transport=transport, path="direct")
    pages = Pages(1, 0, page=_PAGE, n_pages=2 * _TOKENS // _PAGE, hnd=True)
    node = DecodeNode(
        pages.pool, Topology(), transport=transport, path="direct", config=replace(CONFIG, max_silence_s=1.0),
        n_lanes=1, staging_nbytes=_STAGING_NBYTES,
    )  # fmt: skip
    with BootstrapServer() as directory, closing(node):
        engine = DecodeEngine(
            node, pages, random.Random(0), lambda kind, what: seen.wrong.append(what) if kind == "wrong" else None,
            site, directory=directory.address, sabotage=sabotage,
        )  # fmt: skip
        job = Job(
            site=site, engine=shape, rank=0, directory=directory.address, log=folder / "prefill.log",
            n_tokens=2 * _TOKENS, staging_nbytes=_STAGING_NBYTES,
        )  # fmt: skip
        writer = Member(job)
        writer.start()
        try:
            _await(lambda: writer.hear() and writer.state == "up")
            _provoke(engine, writer, seen)
        finally:
            writer.kill()
    return seen


def _provoke(engine: DecodeEngine, writer: Member, seen: Seen) -> None:
    while seen.tries < _TRIES and not (seen.wrong and engine.sabotage):
        seen.tries += 1
        order = Order(f"control-{seen.tries}", seen.tries, _TOKENS, 0, "control", calm=True)
        engine.waiting.append(order)
        writer.send("order", order)
        engine.step()
        (room,) = engine.rooms
        _await(lambda room=room: not engine.pages.untouched(room.pages[0]) or room.ended, engine.step)
        writer.stop()
        if room.ended or not engine.pages.untouched(room.pages[-1]):
            writer.resume()
            _await(lambda: not engine.rooms, engine.step)
            continue
        _await(lambda room=room: room.ended, engine.step)
        assert room.handle.state is State.FAILED
        seen.released_early = room.handle.released
        writer.resume()
        until = time.monotonic() + 2.0  # time to do harm; there is no more to wait for where it does none
        while time.monotonic() < until and not seen.wrong:
            engine.step()
            engine.node.turn(0.002)
        if not engine.sabotage:
            os.kill(writer.pids[-1], signal.SIGKILL)
            _await(lambda room=room: room not in engine.rooms, engine.step)
            seen.released_at_death = True
            return


def _await(done: Callable[[], object], turn: Callable[[], object] = lambda: None) -> None:
    until = time.monotonic() + 60.0
    while not done():
        if time.monotonic() > until:
            raise TimeoutError("the negative control does not get on")
        turn()

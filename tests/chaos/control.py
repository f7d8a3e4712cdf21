"""The negative control: a writer stopped amid a direct write, and an engine that may reuse the pages too early.

With `sabotage` the engine takes its pages back when the room has failed, not when it is `released`; the writer goes on
later and the checks must see its bytes. Without it they must see none: the pages stay reserved while that writer may
live.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pdstage import DecodeNode, State, Topology
from pdstage.transport import open_transport
from tests.chaos.engine import DecodeEngine, Order
from tests.chaos.member import Directory, Member
from tests.chaos.network import SameNetwork
from tests.chaos.pages import Pages
from tests.chaos.plan import CONFIG, HUNG_AFTER_S, Site
from tests.chaos.worker import Job

_TOKENS = 12_288
_PAGE = 16
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


def stopped_writer(transport: str, *, sabotage: bool) -> Seen:
    """Tries until a writer was stopped between a room's first and last byte; lets it go on, and at last kills it."""
    site = Site(1, 1, transport, "direct", "inline", "inline", False, True, 8, _PAGE, 1, False, "", False)
    folder, net, seen = Path(tempfile.mkdtemp(prefix="pdstage-chaos-")), SameNetwork(), Seen()
    directory = Directory(net)
    job = Job(
        site, "prefill", 0, 0, "control", directory.address, "127.0.0.1", 0, "", folder / "prefill.log",
        n_tokens=2 * _TOKENS, staging_nbytes=1 << 20,
    )  # fmt: skip
    writer = Member(job)
    pages = Pages(1, 0, page=_PAGE, n_pages=2 * _TOKENS // _PAGE, hnd=True)
    config = replace(CONFIG, max_silence_s=1.0)
    node = DecodeNode(
        pages.pool, Topology(), transport=open_transport(transport), path="direct", config=config, n_lanes=1,
        staging_nbytes=1 << 20,
    )  # fmt: skip
    engine = DecodeEngine(
        node, pages, random.Random(0), lambda kind, what: seen.wrong.append(what) if kind == "wrong" else None,
        sabotage=sabotage, directory=directory.address,
    )  # fmt: skip
    try:
        writer.start()
        _await(lambda: writer.hear() and writer.state == "up")
        _provoke(engine, writer, seen)
    finally:
        node.close(0.1)
        writer.end()
        directory.close()
    return seen


def _provoke(engine: DecodeEngine, writer: Member, seen: Seen) -> None:
    while seen.tries < _TRIES and not (seen.wrong and engine.sabotage):
        seen.tries += 1
        order = Order(f"control-{seen.tries}", seen.tries, _TOKENS, 0, True)
        engine.order(order)
        writer.send("order", order)
        room, caught = _stop_amid(engine, writer)
        if caught:
            _await(lambda room=room: room.ended, engine.step)
            assert room.handle.state is State.FAILED
            seen.released_early = room.handle.released
            writer.resume()
            _go_on(engine, seen)
            if not engine.sabotage:
                writer.kill()
                _await(lambda room=room: room not in engine.rooms, engine.step)
                seen.released_at_death = True
                return
        else:
            writer.resume()
            _await(lambda: not engine.rooms, engine.step)


def _stop_amid(engine: DecodeEngine, writer: Member) -> tuple:
    """Stops the writer once the first token came; whether the last one had not come yet."""
    engine.step()
    (room,) = engine.rooms
    pages = engine.pages
    _await(lambda: not pages.untouched(room.pages[0]) or room.ended, engine.step)
    writer.stop()
    return room, not room.ended and pages.untouched(room.pages[-1])


def _go_on(engine: DecodeEngine, seen: Seen) -> None:
    """Gives the resumed writer time to do harm; there is no more to wait for than a few turns where it does none."""
    until = time.monotonic() + 2.0
    while time.monotonic() < until and not seen.wrong:
        engine.step()
        engine.node.turn(0.002)


def _await(done: Callable[[], object], turn: Callable[[], object] = lambda: None) -> None:
    until = time.monotonic() + HUNG_AFTER_S
    while not done():
        if time.monotonic() > until:
            raise TimeoutError("the negative control does not get on")
        turn()

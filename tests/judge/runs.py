"""Real nodes that write their journals: two prefill ranks and one decode rank, rooms a few at a time, some given up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from pdstage import PdstageError, State
from pdstage.manager.journal import OLDER, SUFFIX, Head, Line
from pdstage.tools.judge import judge
from pdstage.transport import open_transport
from tests.manager.conftest import Site
from tests.manager.engine import QUICK, Rank
from tests.transport.faults import faulty

TOKENS = 50
LATE = {"seed": 3, "delay": 0.7, "delay_s": 0.02}
"""Posts whose ends, and tags whose arrivals, are told later."""
SOON = replace(QUICK, transfer_s=1.0)
"""For rooms that wait for what never comes."""


def run(
    folder: Path, *, rooms: int = 12, at_a_time: int = 4, faults: dict | None = None, limit_s: float = 60.0, **options
) -> list[State]:
    """How the rooms ended at decode. Every fourth is given up while its chunks are on their way, by either side.

    Never raises for what the nodes do wrong: that is the judge's to say. Rooms that are not over in `limit_s` are left.
    """

    def transport() -> object:
        return faulty(open_transport("local"), **faults) if faults else "local"

    options = {"path": "staged", "staging_nbytes": 1 << 14, "journal": folder} | options
    ended = []
    with ExitStack() as stack, contextlib.suppress(PdstageError):
        site = Site(stack)
        src, dst = [Rank(2, rank) for rank in range(2)], Rank(hnd=True)
        prefill = [site.prefill(rank, transport=transport(), **options) for rank in src]
        decode = site.decode(dst, transport=transport(), **options)
        for first in range(0, rooms, at_a_time):
            handles = []
            for room in range(first, first + at_a_time):
                receiver, senders = decode.receive(room, site.address), [node.send(room) for node in prefill]
                receiver.bind(dst.allocate(TOKENS), TOKENS)
                for sender, rank in zip(senders, src, strict=True):
                    pages = rank.allocate(TOKENS)
                    sender.chunk(pages, (0, 20))
                    sender.chunk(pages, (20, TOKENS))
                    sender.finish(b"first token")
                    rank.free(pages)  # nobody writes them before the room is over
                dst.free(receiver.bound.checked["kv"].pages)
                if room % 4 == 3:
                    turns(site.nodes, lambda room=receiver: room.state is State.TRANSFERRING, min(limit_s, 2.0))
                    (receiver if room % 8 == 3 else senders[0]).abort("no longer wanted")
                handles += [receiver, *senders]
            turns(site.nodes, lambda handles=handles: all(handle.released for handle in handles), limit_s)
            ended += [handle.state for handle in handles[::3]]
        for node in site.nodes:
            node.close()
    return ended


def turns(nodes, done: Callable[[], bool], limit_s: float = 60.0) -> None:
    until = time.monotonic() + limit_s
    while not done() and time.monotonic() < until:
        for node in nodes:
            node.turn(1e-4)


# Journals as they are on disk, to be changed.

_encode = msgspec.json.encode


class Written:
    """One node's journal in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        head, *lines = path.read_bytes().splitlines()
        self.head = msgspec.json.decode(head, type=Head)
        self.lines = [msgspec.json.decode(line, type=Line) for line in lines]

    def find(self, nth: int = 0, **told: object) -> int:
        """The index of the line number `nth`, from 0, that says this."""
        found = [at for at, line in enumerate(self.lines) if all(getattr(line, k) == v for k, v in told.items())]
        return found[nth]

    def put(self, folder: Path, *, renumber: bool = True) -> None:
        """Writes it there, with its lines numbered anew."""
        if renumber:
            for n, line in enumerate(self.lines, self.head.first):
                line.n = n
        data = b"\n".join([_encode(self.head), *map(_encode, self.lines)]) + b"\n"
        (folder / self.path.name).write_bytes(data)


def written(folder: Path) -> dict[str, Written]:
    """By role and rank; not of a node that has two files."""
    assert not list(folder.glob(f"*{OLDER}"))
    found = [Written(path) for path in sorted(folder.glob(f"*{SUFFIX}"))]
    return {f"{one.head.role} {one.head.rank}": one for one in found}


def judged(folder: Path, *journals: Written) -> set[str]:
    """The rules that these break."""
    for one in journals:
        one.put(folder)
    return rules(judge([folder]).wrong)


def rules(wrong: list[str]) -> set[str]:
    return {said.split(": ")[1] for said in wrong}

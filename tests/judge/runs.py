"""Real nodes that are traced: two prefill ranks and one decode rank, rooms a few at a time, some given up."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from contextlib import ExitStack

from pdstage import PdstageError, State
from pdstage.tools.trace import Tracer
from pdstage.tools.trace.model import Trace
from pdstage.transport import open_transport
from tests.manager.conftest import Site
from tests.manager.engine import Rank
from tests.transport.faults import faulty

TOKENS = 50
LATE = {"seed": 3, "delay": 0.7, "delay_s": 0.02}
"""Posts whose ends, and tags whose arrivals, are told later."""


def run(*, rooms: int = 12, at_a_time: int = 4, faults: dict | None = None, limit_s: float = 60.0, **options) -> Trace:
    """Every fourth room is given up while its chunks are on their way, by either side.

    Never raises for what the nodes do wrong: that is the judge's to say. Rooms that are not over in `limit_s` are left.
    """

    def transport() -> object:
        return faulty(open_transport("local"), **faults) if faults else "local"

    tracer = Tracer()
    options = {"path": "staged", "staging_nbytes": 1 << 14, "observers": (tracer,)} | options
    with ExitStack() as stack, contextlib.suppress(PdstageError):
        site = Site(stack)
        src, dst = [Rank(2, rank) for rank in range(2)], Rank(hnd=True)
        prefill = [site.prefill(rank, transport=transport(), **options) for rank in src]
        decode = site.decode(dst, transport=transport(), **options)
        for first in range(0, rooms, at_a_time):
            handles = []
            for room in range(first, first + at_a_time):
                receiver, senders = decode.receive(room, site.address), [node.send(room) for node in prefill]
                wanted = dst.allocate(TOKENS)
                receiver.bind(wanted, TOKENS)
                for sender, rank in zip(senders, src, strict=True):
                    pages = rank.allocate(TOKENS)
                    sender.chunk(pages, (0, 20))
                    sender.chunk(pages, (20, TOKENS))
                    sender.finish(b"first token")
                    rank.free(pages)  # nobody writes them before the room is over
                dst.free(wanted)
                if room % 4 == 3:
                    turns(site.nodes, lambda room=receiver: room.state is State.TRANSFERRING, min(limit_s, 2.0))
                    (receiver if room % 8 == 3 else senders[0]).abort("no longer wanted")
                handles += [receiver, *senders]
            turns(site.nodes, lambda handles=handles: all(handle.released for handle in handles), limit_s)
    return tracer.trace()


def turns(nodes, done: Callable[[], bool], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while not done() and time.monotonic() < until:
        for node in nodes:
            node.turn(1e-4)

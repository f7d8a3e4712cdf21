"""What the processes of test_processes.py run."""

from __future__ import annotations

from multiprocessing.connection import Connection

from pdstage import State
from tests.manager.engine import Rank, decode_node, drive, prefill_node

TOKENS = 50


def serve_prefill(
    pipe: Connection,
    address: str,
    tp: int,
    rank: int,
    transport: str,
    path: str,
    rooms: int,
    stop: int,
    keys: str | None,
) -> None:
    """Sends `rooms` rooms; of room `stop` only the first half, and then waits to be killed."""
    pool = Rank(tp, rank, n_pages=256)
    with prefill_node(pool, address, transport=transport, path=path, keys=keys) as node:
        pipe.send("ready")
        senders = []
        for room in range(rooms):
            pages = pool.allocate(TOKENS)
            pool.write(room, TOKENS, pages)
            sender = node.send(room)
            sender.chunk(pages, (0, 20))
            if room != stop:
                sender.chunk(pages, (20, TOKENS))
                sender.finish(aux=b"%d" % room)
            senders.append(sender)
        if stop < rooms:
            drive([node], pipe.poll, 60)
        drive([node], lambda: all(sender.released for sender in senders), 60)
        pipe.send([int(sender.state) for sender in senders])
        drive([node], pipe.poll, 60)


def serve_decode(pipe: Connection, address: str, transport: str) -> None:
    """Receives room 0; says so once some of it is there, and then waits to be killed."""
    pool = Rank(n_pages=256)
    with decode_node(pool, transport=transport, path="staged") as node:
        receiver = node.receive(0, address)
        receiver.bind(pool.allocate(TOKENS), TOKENS)
        drive([node], lambda: receiver.state is State.TRANSFERRING, 60)
        pipe.send("half")
        drive([node], pipe.poll, 60)

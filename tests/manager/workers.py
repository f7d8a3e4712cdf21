"""What the processes of test_processes.py and test_failures.py run."""

from __future__ import annotations

import errno
from multiprocessing.connection import Connection

from pdstage.transport import open_transport
from tests.manager.engine import IMPATIENT, QUICK, TOKENS, Rank, begun, decode_node, drive, fails, prefill_node
from tests.processes import enter
from tests.transport.endpoint import forbid_writing_to_processes


def serve_prefill(
    pipe: Connection,
    address: str,
    tp: int,
    rank: int,
    transport: str,
    path: str,
    rooms: int,
    stop: int,
) -> None:
    """Sends `rooms` rooms; of room `stop` only the first half, and then waits to be killed."""
    pool, config = Rank(tp, rank, n_pages=256), IMPATIENT if stop < rooms else QUICK
    with prefill_node(pool, address, transport=transport, path=path, config=config) as node:
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
            drive([node], pipe.poll)
        drive([node], lambda: all(sender.released for sender in senders))
        pipe.send([int(sender.state) for sender in senders])
        drive([node], pipe.poll)


def serve_prefill_forbidden_to_write(*args: object) -> None:
    """As `serve_prefill`, where a seccomp profile forbids process_vm_writev."""
    forbid_writing_to_processes(errno.EPERM)
    serve_prefill(*args)


def serve_decode(pipe: Connection, address: str, transport: str) -> None:
    """Receives room 0; says so once some of it is there, and then waits to be killed."""
    pool = Rank(n_pages=256)
    with decode_node(pool, transport=transport, path="staged", config=IMPATIENT) as node:
        begun(node, pool, address)
        pipe.send("half")
        drive([node], pipe.poll)


def send_to_a_host_that_vanishes(pipe: Connection, namespace: str, host: str, transport: str) -> None:
    """Sends room 0; the second half once it is told that decode's host is away. Says how the room ends, and when over.

    Runs in a network namespace, as on a host of its own.
    """
    enter(namespace)
    pool = Rank(n_pages=256)
    with prefill_node(pool, None, **_at(host, transport)) as node:
        pipe.send(node.directory_address)
        pages = pool.allocate(TOKENS)
        pool.write(0, TOKENS, pages)
        sender = node.send(0)
        sender.chunk(pages, (0, 20))
        drive([node], pipe.poll)
        pipe.recv()
        sender.chunk(pages, (20, TOKENS))
        sender.finish()
        fails(node, sender)
        pipe.send(str(sender.error))
        if transport == "mooncake":  # of itself it takes minutes: docs/transports.md
            drive([node], node.unfenced)
            for endpoint in node.unfenced():
                node.fence(endpoint)
        drive([node], lambda: sender.released)
        pipe.send("released")


def receive_from_a_host_that_vanishes(
    pipe: Connection, namespace: str, host: str, transport: str, prefill: str
) -> None:
    """Receives room 0; says how far it is, how it ends, what of it is kept back then, and what is after `fence`."""
    enter(namespace)
    pool = Rank(n_pages=256)
    with decode_node(pool, **_at(host, transport)) as node:
        receiver = begun(node, pool, prefill)
        pipe.send("half")
        fails(node, receiver)
        pipe.send(str(receiver.error))
        drive([node], node.unfenced)
        pipe.send(receiver.released)
        for endpoint in node.unfenced():
            node.fence(endpoint)
        drive([node], lambda: receiver.released)
        pipe.send("released")


def _at(host: str, transport: str) -> dict[str, object]:
    """The options of that host's node."""
    made = open_transport(transport, host=host) if transport == "mooncake" else transport
    return {"transport": made, "path": "direct", "bind": f"tcp://{host}:0", "insecure": True, "config": IMPATIENT}

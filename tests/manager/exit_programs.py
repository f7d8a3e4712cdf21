"""A program with two open nodes and how it ends: `python -m tests.manager.exit_programs END TRANSPORT PROGRESS`.

It moves a room between two nodes of its own, leaves another half done, and says a word; then it ends.
"""

from __future__ import annotations

import asyncio
import sys
import threading

from pdstage import DecodeNode, PrefillNode, State
from pdstage.manager.handle import Handle
from tests.manager.engine import Pair, Rank, decode_node, drive, prefill_node

_kept: list[object] = []
"""What nobody closes."""


def _nodes(transport: str, progress: str) -> tuple[PrefillNode, DecodeNode, Handle]:
    """Two nodes between which a room was moved and another is half done: the receiver of that."""
    src, dst, how = Rank(), Rank(), {"transport": transport, "progress": progress}
    pair = Pair(prefill_node(src, None, **how), src, decode_node(dst, **how), dst)
    late = pair.open(2)
    late.sender.chunk(late.pages, (0, 20))
    pair.move(1)
    drive(pair.nodes, lambda: late.receiver.state is State.TRANSFERRING, 120)
    _kept.extend((pair, late))
    return *pair.nodes, late.receiver


def closed(*options: str) -> None:
    p, d, _ = _nodes(*options)
    print("ready")

    async def close() -> None:
        assert await asyncio.gather(d.close_async(), p.close_async()) == [True, True]

    asyncio.run(close())


def in_a_global(*options: str) -> None:
    _nodes(*options)
    print("ready")


def in_a_thread(*options: str) -> None:
    """Whose thread waits for ever, while the program ends."""
    waiting = threading.Event()

    def wait() -> None:
        _, _, late = _nodes(*options)
        waiting.set()
        late.wait()

    threading.Thread(target=wait, daemon=True).start()
    assert waiting.wait(120)
    print("ready")


def in_a_loop(*options: str) -> None:
    """Whose task waits for ever, and is cancelled as the loop ends."""

    async def main() -> None:
        _, _, late = _nodes(*options)
        _kept.append(asyncio.ensure_future(late.wait_async()))
        await asyncio.sleep(0)
        print("ready")

    asyncio.run(main())


ENDS = {each.__name__: each for each in (closed, in_a_global, in_a_thread, in_a_loop)}

if __name__ == "__main__":
    ENDS[sys.argv[1]](*sys.argv[2:])

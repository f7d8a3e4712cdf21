"""Waiting in an event loop for rooms of a node with a thread: no thread and no poll for it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter

import pytest

from pdstage import Aborted, PeerError, State, UsageError
from tests.manager.engine import TOKENS, Pair, Rank, drive


def begin(pair: Pair, room: int):
    """A room whose sender has everything but `finish`."""
    begun = pair.open(room)
    begun.sender.chunk(begun.pages, TOKENS)
    return begun


def nobody_waits(pair: Pair) -> bool:
    """No waiter is left at its nodes."""
    return not any(node.roster._waiters for node in pair.nodes)


async def started(*waits) -> list[asyncio.Task]:
    """Tasks that have come as far as they can at once."""
    tasks = [asyncio.ensure_future(one) for one in waits]
    await asyncio.sleep(0)
    return tasks


def test_a_room_is_awaited_at_both_ends(site):
    """And `async with` closes the nodes, also after an exception."""
    pair = site.pair(progress="thread")

    async def main() -> None:
        async with pair.p, pair.d:
            sender, receiver, _, into = begin(pair, 1)
            waiting = await started(receiver.wait_async(60), sender.wait_async(60))
            sender.finish(aux=b"first")
            assert await asyncio.gather(*waiting) == [State.SUCCESS] * 2
            assert receiver.aux == b"first"
            await asyncio.gather(receiver.wait_released_async(60), sender.wait_released_async(60))
            assert receiver.released and sender.released
            assert pair.dst.holds(1, TOKENS, into)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())
    assert nobody_waits(pair)
    for node in pair.nodes:
        with pytest.raises(UsageError, match="closed"):
            node.poll_many([])


def test_an_inline_node_is_not_awaited(site):
    with pytest.raises(UsageError, match='progress="thread"'):
        asyncio.run(site.prefill(Rank()).send(1).wait_async(60))


def test_a_thousand_waits_are_cheap(site):
    """No thread for any of them, and each is woken by its own room alone."""
    pair = site.pair(progress="thread")

    async def main() -> None:
        receivers = [pair.receive(room) for room in range(1000)]
        waits = await started(*(receiver.wait_async(60) for receiver in receivers))
        threads = threading.active_count()
        for number, room in enumerate((7, 500, 993), 1):
            receivers[room].bind(pair.dst.allocate(4), 4)
            sender = pair.p.send(room)
            sender.chunk(pair.src.allocate(4), 4)
            sender.finish()
            await asyncio.gather(waits[room], sender.wait_released_async(60))
            assert sum(one.done() for one in waits) == number
        assert threading.active_count() <= threads
        for receiver in receivers:
            if receiver.state is not State.SUCCESS:
                receiver.abort()
        ended = await asyncio.gather(*waits, return_exceptions=True)
        assert Counter(map(type, ended)) == {State: 3, Aborted: 997}

    asyncio.run(main())
    assert nobody_waits(pair)


def test_a_wait_that_is_cancelled_or_ends_in_time_leaves_the_room_alone(site):
    pair = site.pair(progress="thread")

    async def main() -> None:
        sender, receiver, _, into = begin(pair, 1)
        gone, stays = await started(receiver.wait_async(60), receiver.wait_async(60))
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert not stays.done()
        stays.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stays
        assert nobody_waits(pair)
        for timeout_s in (0, 0.05):
            with pytest.raises(TimeoutError, match=f"room 1 did not get there in {timeout_s} s"):
                await receiver.wait_async(timeout_s)
        assert receiver.error is None
        sender.finish()
        await asyncio.gather(receiver.wait_async(), sender.wait_released_async(60))
        assert await receiver.wait_async(0) is State.SUCCESS, "what is so already needs no time"
        assert pair.dst.holds(1, TOKENS, into)

    asyncio.run(main())
    assert nobody_waits(pair)


def test_closing_a_node_ends_its_waits(site):
    """Each with its room's error."""
    pair = site.pair(progress="thread")

    async def main() -> None:
        receiver, early = begin(pair, 1).receiver, pair.p.send(2)
        waits = await started(receiver.wait_async(60), early.wait_async(60))
        for node in pair.nodes:
            node.close(0.2)
        failed, unsent = await asyncio.gather(*waits, return_exceptions=True)
        assert isinstance(failed, Aborted | PeerError), failed
        assert isinstance(unsent, Aborted), unsent

    asyncio.run(main())
    assert nobody_waits(pair)


def test_a_loop_that_closes_under_its_waits_harms_nobody(site):
    pair, loop = site.pair(progress="thread"), asyncio.new_event_loop()
    loop.set_debug(False)

    async def main():
        room = begin(pair, 1)
        return room, await started(room.receiver.wait_async(60), room.sender.wait_released_async(60))

    room, waits = loop.run_until_complete(main())
    loop.close()
    room.sender.finish()
    room.receiver.wait_released(60)
    room.sender.wait_released(60)
    assert pair.dst.holds(1, TOKENS, room.into)
    for one in waits:
        one._log_destroy_pending = False
    del waits, one
    drive([], lambda: nobody_waits(pair))  # with the last reference to a wait it is gone


def test_a_wait_costs_its_own_room_only(site):
    """What `ring` asks: who waits for a room that changed, none of those who wait for others."""
    d, asked = site.decode(Rank()), Counter()
    quiet, loud = (d.receive(room, site.address) for room in (1, 2))
    with contextlib.ExitStack() as stack:
        for receiver in (quiet, loud):
            done = lambda receiver=receiver: asked.update([receiver.room.key]) or receiver.released  # noqa: E731
            stack.enter_context(d.roster.waiting(receiver, done, lambda: None))
        loud.abort()
        drive([d], lambda: loud.released)
    assert set(asked) == {loud.room.key}

"""Waiting in an event loop: no thread and no poll for it, whoever turns the node."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter

import pytest

from pdstage import Aborted, PeerError, State, UsageError
from pdstage.control.keys import Keys
from tests.manager.engine import Rank, decode_node, drive, prefill_node

TOKENS = 30
MODES = ["inline", "thread"]
both = pytest.mark.parametrize("progress", MODES)


def pair(site, progress, **options):
    src, dst = Rank(page=4), Rank(page=8, hnd=True)
    p = site.prefill(src, progress=progress, **options)
    return src, dst, p, site.decode(dst, progress=progress, **options)


def begin(site, src, dst, p, d, room: int):
    """A room whose sender has everything but `finish`."""
    pages, into = src.allocate(TOKENS), dst.allocate(TOKENS)
    src.write(room, TOKENS, pages)
    receiver, sender = d.receive(room, site.address), p.send(room)
    receiver.bind(into, TOKENS)
    sender.chunk(pages, (0, TOKENS))
    return receiver, sender, into


def nobody_waits(*nodes) -> bool:
    """Neither a waiter nor a loop is left at them."""
    return not any(node.driver.pumps or node.roster._waiters or node.roster._of_any_end for node in nodes)


async def started(*waits) -> list[asyncio.Task]:
    """Tasks that have come as far as they can at once."""
    tasks = [asyncio.ensure_future(one) for one in waits]
    await asyncio.sleep(0)
    return tasks


@both
@pytest.mark.parametrize("transport", ["local", "nixl"])
def test_a_room_is_awaited_at_both_ends(site, progress, transport):
    if transport == "nixl":
        pytest.importorskip("nixl")
    src, dst, p, d = pair(site, progress, transport=transport)

    async def main() -> None:
        receiver, sender, into = begin(site, src, dst, p, d, 1)
        waiting = await started(receiver.wait_async(60), sender.wait_async(60))
        sender.finish(aux=b"first")
        assert await asyncio.gather(*waiting) == [State.SUCCESS] * 2
        assert receiver.aux == b"first"
        await asyncio.gather(receiver.wait_released_async(60), sender.wait_released_async(60))
        assert receiver.released and sender.released
        assert dst.holds(1, TOKENS, into)

    asyncio.run(main())
    assert nobody_waits(p, d)


def test_nodes_with_keys_are_turned_by_a_loop_too(site, tmp_path):
    """Their handshakes are answered by whoever watches the socket."""
    keys = Keys.make(tmp_path / "key")
    src, dst = Rank(page=4), Rank(page=8)
    p, d = prefill_node(src, None, keys=keys), decode_node(dst, keys=keys)
    site.address = p.bootstrap_address

    async def main() -> None:
        async with p, d:
            receiver, sender, into = begin(site, src, dst, p, d, 1)
            sender.finish()
            await asyncio.gather(receiver.wait_released_async(60), sender.wait_released_async(60))
            assert dst.holds(1, TOKENS, into)

    asyncio.run(main())


@both
def test_a_thousand_waits_are_cheap(site, progress):
    """No thread for any of them, and each is woken by its own room alone."""
    src, dst, p, d = pair(site, progress)

    async def main() -> None:
        receivers = [d.receive(room, site.address) for room in range(1000)]
        waits = await started(*(receiver.wait_async(60) for receiver in receivers))
        threads = threading.active_count()
        for number, room in enumerate((7, 500, 993), 1):
            pages, into = src.allocate(4), dst.allocate(4)
            receivers[room].bind(into, 4)
            sender = p.send(room)
            sender.chunk(pages, (0, 4))
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
    assert nobody_waits(p, d)


def test_an_inline_node_is_turned_when_something_happens_and_not_in_between(site, monkeypatch):
    """What repeats a question every 50 ms and has nothing else to do turns some twenty times a second, not 100,000."""
    d = site.decode(Rank())
    n_turns = 0
    turn = type(d.driver)._turn

    def counted(node, heard) -> None:
        nonlocal n_turns
        n_turns += 1
        turn(node, heard)

    monkeypatch.setattr(type(d.driver), "_turn", counted)

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await d.receive(1, site.address).wait_async(0.5)

    asyncio.run(main())
    assert 0 < n_turns < 200


@both
def test_cancelling_a_wait_leaves_the_room_alone(site, progress):
    src, dst, p, d = pair(site, progress)

    async def main() -> None:
        receiver, sender, into = begin(site, src, dst, p, d, 1)
        gone, stays = await started(receiver.wait_async(60), receiver.wait_async(60))
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert not stays.done()
        stays.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stays
        assert nobody_waits(p, d)
        assert receiver.error is None
        sender.finish()
        await asyncio.gather(receiver.wait_async(60), sender.wait_released_async(60))
        assert dst.holds(1, TOKENS, into)

    asyncio.run(main())
    assert nobody_waits(p, d)


@both
def test_a_wait_ends_in_time_and_the_room_goes_on(site, progress):
    src, dst, p, d = pair(site, progress)

    async def main() -> None:
        receiver, sender, _ = begin(site, src, dst, p, d, 1)
        for timeout_s in (0, 0.05):
            with pytest.raises(TimeoutError, match=f"room 1 did not get there in {timeout_s} s"):
                await receiver.wait_async(timeout_s)
        sender.finish()
        await asyncio.gather(receiver.wait_async(), sender.wait_released_async())
        assert await receiver.wait_async(0) is State.SUCCESS, "what is so already needs no time"

    asyncio.run(main())
    assert nobody_waits(p, d)


@both
def test_a_room_that_fails_raises_what_wait_raises(site, progress):
    src, dst, p, d = pair(site, progress)

    async def main() -> None:
        receiver, sender, _ = begin(site, src, dst, p, d, 1)
        async with p, d:
            [waiting] = await started(receiver.wait_async(60))
            sender.abort("the client hung up")
            with pytest.raises((Aborted, PeerError), match="the client hung up"):
                await waiting
            with pytest.raises(Aborted, match="the client hung up"):
                await sender.wait_async(60)
            await asyncio.gather(sender.wait_released_async(60), receiver.wait_released_async(60))

    asyncio.run(main())


@both
@pytest.mark.parametrize("closing", ["sync", "async"])
def test_closing_a_node_ends_its_waits(site, progress, closing):
    """Each with its room's error."""
    src, dst, p, d = pair(site, progress)

    async def main() -> None:
        receiver, _, _ = begin(site, src, dst, p, d, 1)
        early = p.send(2)
        waits = await started(receiver.wait_async(60), early.wait_async(60), _all_of(d), _all_of(p))
        for node in (p, d):
            if closing == "sync":
                node.close(0.2)
            else:
                await node.close_async(0.2)
        failed, unsent, *ended = await asyncio.gather(*waits, return_exceptions=True)
        assert isinstance(failed, Aborted | PeerError), failed
        assert isinstance(unsent, Aborted), unsent
        assert ended == [[receiver.key], [b"i1", early.key]]

    asyncio.run(main())
    assert nobody_waits(p, d)


async def _all_of(node) -> list[bytes]:
    return sorted([handle.key async for handle in node.completions_async()])


@both
def test_completions_come_one_by_one(site, progress):
    src, dst, p, d = pair(site, progress)

    async def main() -> None:
        rooms = {}
        for room in (1, 2, 3):
            receiver, sender, _ = begin(site, src, dst, p, d, room)
            rooms[receiver.key] = receiver
            sender.finish()
        async with p, d:
            async for handle in d.completions_async():
                assert rooms.pop(handle.key) is handle
                assert handle.state is State.SUCCESS
                if not rooms:
                    break
            assert not d.completions()
        assert nobody_waits(p, d)

    asyncio.run(main())


@both
def test_a_loop_that_closes_under_its_waits_harms_nobody(site, progress):
    src, dst, p, d = pair(site, progress)
    loop = asyncio.new_event_loop()
    loop.set_debug(False)

    async def main():
        begun = begin(site, src, dst, p, d, 1)
        return begun, await started(begun[0].wait_async(60), begun[1].wait_released_async(60))

    (receiver, sender, into), waits = loop.run_until_complete(main())
    loop.close()
    sender.finish()
    if progress == "inline":
        drive([p, d], lambda: receiver.released and sender.released)
    receiver.wait_released(60)
    sender.wait_released(60)
    assert dst.holds(1, TOKENS, into)
    for one in waits:
        one._log_destroy_pending = False
    del waits, one
    if progress == "thread":  # it may still be about to take them away
        drive([], lambda: nobody_waits(p, d))
    assert nobody_waits(p, d), "with the last reference to a wait it is gone"


def test_a_thread_and_a_loop_wait_at_one_inline_node(site):
    """Whoever has the turn serves both."""
    src, dst, p, d = pair(site, "inline")

    async def main() -> None:
        receiver, sender, into = begin(site, src, dst, p, d, 1)
        waits = await started(receiver.wait_async(60), asyncio.to_thread(receiver.wait_released, 60))
        waits += await started(sender.wait_async(60), asyncio.to_thread(sender.wait_released, 60))
        sender.finish()
        states = await asyncio.gather(*waits)
        assert states == [State.SUCCESS, None, State.SUCCESS, None]
        assert dst.holds(1, TOKENS, into)

    asyncio.run(main())
    assert nobody_waits(p, d)


def test_a_turn_that_fails_in_a_loop_ends_its_waits(site, monkeypatch):
    """As it does in the node's own thread: nobody hangs because the driver broke."""
    src, dst, p, d = pair(site, "inline")

    def broken(*_: object) -> None:
        raise OSError("the socket is gone")

    async def main() -> None:
        receiver, _, _ = begin(site, src, dst, p, d, 1)
        [waiting] = await started(receiver.wait_async(60))
        monkeypatch.setattr(d.driver, "_feed", broken)
        with pytest.raises(Exception, match="the socket is gone|this node failed"):
            await waiting

    asyncio.run(main())
    assert nobody_waits(p, d)


@both
def test_async_with_closes_also_after_an_exception(progress):
    src, dst = Rank(), Rank()

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            async with prefill_node(src, None, progress=progress) as p, decode_node(dst, progress=progress) as d:
                raise ZeroDivisionError
        for node in (p, d):
            with pytest.raises(UsageError, match="closed"):
                node.poll_many([])

    asyncio.run(main())


def test_a_wait_costs_its_own_room_only(site):
    """What `ring` asks: who waits for a room that changed, none of those who wait for others."""
    d = site.decode(Rank())
    asked = Counter()
    quiet, loud = (d.receive(room, site.address) for room in (1, 2))
    with contextlib.ExitStack() as stack:
        for receiver in (quiet, loud):
            done = lambda receiver=receiver: asked.update([receiver.key]) or receiver.released  # noqa: E731
            stack.enter_context(d.roster.waiting(receiver, done, lambda: None))
        loud.abort()
        drive([d], lambda: loud.released)
    assert set(asked) == {loud.key}


def test_turns_that_come_to_nothing_wake_no_loop(site):
    """Another thread that waits would be woken by its own turn, and turn again and again (found by the simulator)."""
    d = site.decode(Rank())

    async def main() -> None:
        async with d:
            d.socket.wait(0.0)
            d.turn()
            assert not d.socket.wait(0.0).woken

    asyncio.run(main())

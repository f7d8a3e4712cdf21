"""The end of a node: what it gives back, and what another may begin on the same memory."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
import weakref
from collections import Counter
from unittest import mock

import pytest

from pdstage import State, UsageError
from pdstage.control.bootstrap import BootstrapClient, Incomplete
from pdstage.manager import node as node_module
from pdstage.stager import Stager
from tests import descriptors, processes
from tests.chaos import account
from tests.manager.engine import TOKENS, Pair, Rank, begun, bound, decode_node, drive, prefill_node, unheard
from tests.manager.test_processes import Remote, any_transport
from tests.rows import both_paths, inline_or_thread, usable


def held() -> Counter[str]:
    """This process's file descriptors, by what they are, and its threads, by name."""
    gc.collect()
    return descriptors.kinds() + Counter(account.threads())


def leaks(before: Counter[str], n_turns: int, timeout: float = 10) -> Counter[str]:
    """What was held `before` and is held `n_turns` times more: a turn that leaks does so every time, whereas a library
    may open something once, late. Looks again for `timeout` seconds: the directory that served a node ends its
    connection in a thread of its own, which may still be about it when the node has its answer and is closed.
    """
    deadline = time.monotonic() + timeout
    while (left := _times(held() - before, n_turns)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _times(more: Counter[str], n: int) -> Counter[str]:
    return Counter({kind: count for kind, count in more.items() if count >= n})


@inline_or_thread
def test_a_prefill_node_that_drains(site, progress):
    """What it began ends well, what it did not fails at decode without a deadline, and it is found no more."""
    pair = site.pair(prefill={"progress": progress}, decode={"progress": "thread"})
    p, (sender, begun, pages, into) = pair.p, pair.open(1)
    never = bound(pair.d, pair.dst, 2, site.address)
    drive([p], lambda: sender.opened and len(p.core.pending))
    assert not p.drain(0.0), "a room of its is under way"
    with pytest.raises(UsageError, match="takes no new rooms: it drains"):
        p.send(3)
    sender.chunk(pages, (0, TOKENS))
    sender.finish()
    assert p.drain(240.0)
    with pytest.raises(Incomplete):
        BootstrapClient(site.address).lookup()
    assert sender.state is State.SUCCESS
    drive([p], lambda: begun.released and never.released)
    assert pair.dst.holds(1, TOKENS, into)
    assert "takes no new rooms" in str(never.error)
    assert p.close()


@inline_or_thread
def test_a_prefill_node_that_drains_is_found_until_its_rooms_are_opened(site, progress):
    """What it has begun and decode has not looked up yet ends well; a drain asked for once goes on by itself."""
    pair = site.pair(prefill={"progress": progress}, decode={"progress": "thread"})
    p, pages = pair.p, pair.src.allocate(TOKENS)
    pair.src.write(1, TOKENS, pages)
    sender = p.send(1)
    assert not p.drain(0.0)
    receiver = bound(pair.d, pair.dst, 1, site.address)
    sender.chunk(pages, (0, TOKENS))
    sender.finish()
    drive([p], lambda: receiver.released and p.directory.withdrawn)
    assert (sender.state, receiver.state) == (State.SUCCESS, State.SUCCESS), receiver.error


@pytest.mark.parametrize("breaks", [False, True], ids=["turns", "breaks"])
def test_rooms_end_though_the_thread_sleeps_until_the_node_is_closed(site, monkeypatch, caplog, breaks):
    """An engine that asks a closed node's room must not hear that it still waits, even if the last turn breaks."""
    pair = site.pair(path="direct", progress="thread")
    d = pair.d
    pair.move(0)
    late = bound(d, pair.dst, 1, site.address, 4)
    drive([], lambda: late.state is State.WAITING_FOR_INPUT, 20)
    asleep = threading.Event()

    def sleep(wait_s: float) -> None:
        asleep.set()
        drive([], lambda: d.closed, 20)

    monkeypatch.setattr(d.driver, "turn", sleep)
    assert asleep.wait(20)
    if breaks:
        monkeypatch.setattr(d.transport, "poll", mock.Mock(side_effect=OSError("no fabric")))
    d.close(0.1)
    assert late.state is State.FAILED
    assert ("the node's last turn failed" in caplog.text) == breaks


@any_transport
@both_paths
def test_a_rank_changes_its_role_on_the_same_memory(site, transport, path):
    """Each role gives back all it had, so that the other may begin at once, time after time (I2, I8, I14)."""
    one, other = Rank(page=4), Rank(page=8, hnd=True)
    options = {"transport": transport, "path": path, "progress": "thread"}
    for turn in range(6):
        src, dst = (one, other) if turn % 2 == 0 else (other, one)
        p = prefill_node(src, site.address, **options)
        d = decode_node(dst, **options)
        Pair(p, src, d, dst).move(turn)
        late = bound(d, dst, 100 + turn, site.address, 4)
        for node in (d, p) if turn % 2 else (p, d):
            assert node.close()
        assert d.close(), "repeated"
        assert late.state is State.FAILED
        assert late.released
        assert not d.unfenced()
        dst._free = list(range(dst.n_pages))
        if turn == 1:
            before = held()  # by now each rank has had both roles
    assert not leaks(before, n_turns=4)


@any_transport
def test_a_node_that_must_close_beside_a_stopped_writer_keeps_its_memory(site, transport, caplog):
    """The writer may go on at any time, so nobody else may get what it was lent (I2); and it says who it is."""
    dst = Rank(n_pages=128)
    d = decode_node(dst, transport=transport, path="direct")
    kept = len(node_module._kept_for_ever)
    with Remote(site.address, 1, transport, "direct", rooms=1, stop=0) as remote:
        receiver = begun(d, dst, site.address)
        processes.stop(remote.processes[0].pid)
        with caplog.at_level(logging.ERROR, "pdstage"):
            assert not d.close(0.2)
        assert not d.close()
        assert receiver.state is State.FAILED
        assert not receiver.released
        assert "tcp://127.0.0.1:" in caplog.text
        assert len(node_module._kept_for_ever) == kept + 1
        assert node_module._kept_for_ever[-1].pool is dst.pool
        os.kill(remote.processes[0].pid, signal.SIGCONT)
    node_module._kept_for_ever.pop()


def test_what_a_copy_may_still_write_stays_mapped_after_the_node(site, monkeypatch):
    """A gather on a device goes on, into memory of a peer that is mapped here."""
    p = site.prefill(Rank())
    monkeypatch.setattr(Stager, "launched", property(lambda _: True))
    p.data_path.placed[7] = Rank()
    mapped = weakref.ref(p.data_path.placed[7])
    assert not p.close(0.0)
    assert mapped() is not None
    assert node_module._kept_for_ever.pop() is p


@contextlib.contextmanager
def lost_peer(site, monkeypatch):
    """A decode node whose prefill was killed in the middle of a room, which cannot be seen from here; its receiver."""
    dst = Rank(n_pages=128)
    d = site.decode(dst, transport="local", path="direct")
    with Remote(site.address, 1, "local", "direct", rooms=1, stop=0) as remote:
        receiver = begun(d, dst, site.address)
        monkeypatch.setattr(type(d.transport), "proved_dead", lambda *_: False)  # as of a peer on another host
        remote.processes[0].kill()
        remote.processes[0].join()
        unheard(d)
        drive([d], lambda: receiver.state is State.FAILED and d.unfenced())
        yield d, receiver


def test_an_operator_fences_a_peer_whose_death_cannot_be_seen(site, monkeypatch):
    """I14: its leases and pages come back by the operator's word, and not before."""
    with lost_peer(site, monkeypatch) as (d, receiver):
        ((endpoint, n_sessions),) = d.unfenced().items()
        assert (endpoint.startswith("tcp://127.0.0.1:"), n_sessions) == (True, 1)
        for _ in range(100):
            d.turn()
        assert not receiver.released
        assert d.fence("tcp://127.0.0.1:1") == 0
        assert d.fence(endpoint) == 1
        d.turn()
        assert receiver.released
        assert not d.unfenced()
        assert d.core.idle


def test_what_a_death_sets_free_is_told_in_the_turn_that_proves_it(site, monkeypatch):
    """Not in the next, for which a thread may sleep (found by the simulator of whole nodes)."""
    with lost_peer(site, monkeypatch) as (d, receiver):
        monkeypatch.setattr(type(d.transport), "proved_dead", lambda *_: True)
        d.sessions._dead_check_at = 0.0
        d.turn()
        assert receiver.released


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_peer_may_be_fenced_while_the_driver_asks_whether_it_is_dead(site, monkeypatch, is_dead):
    """The driver asks without the lock, so the operator's word may come in between: the session ends once."""
    with lost_peer(site, monkeypatch) as (d, receiver):
        (endpoint,) = d.unfenced()
        fenced = []

        def proved_dead(*_):
            fenced.append(d.fence(endpoint))
            return is_dead

        monkeypatch.setattr(type(d.transport), "proved_dead", proved_dead)
        drive([d], lambda: receiver.released, 20)
        assert fenced == [1]
        assert not d.unfenced()
        assert d.core.idle


def test_what_a_handler_raises_in_a_wait_harms_nothing(site, monkeypatch):
    """A signal handler's exception, of whatever class, comes out of the wait that it interrupts."""
    pair = site.pair()
    with monkeypatch.context() as patched:
        patched.setattr(pair.d.socket, "wait", mock.Mock(side_effect=TimeoutError("the alarm")))
        with pytest.raises(TimeoutError, match="the alarm"):
            pair.d.turn(0.1)
    pair.move(1)


def test_a_node_is_not_closed_inside_of_its_own_turn(site, monkeypatch):
    """As by a signal handler that interrupts a wait: it would wait for itself for ever."""
    node = site.decode(Rank())
    with monkeypatch.context() as patched:
        patched.setattr(node.socket, "wait", lambda *_: node.close(0.1))
        with pytest.raises(UsageError, match="closed inside of its own turn"):
            node.turn(0.1)
    assert node.close()


@pytest.mark.parametrize("transport", usable("local", "nixl", "mooncake"))
@inline_or_thread
def test_a_forked_child_ends_nothing_of_its_parents(site, progress, transport):
    """Closing what it inherited withdrew the parent's advert, and waited for ever for threads that it did not have."""
    src, dst, how = Rank(), Rank(hnd=True), {"progress": progress, "transport": transport}
    p, d = site.keep(prefill_node(src, None, **how)), site.decode(dst, **how)
    pair = Pair(p, src, d, dst)
    pair.move(1)

    def end(pipe) -> None:
        with pytest.raises(UsageError, match="after the fork"):
            p.turn()
        pipe.send([node.close() for node in (p, d)])

    child, ours = processes.child(end, how="fork")
    assert ours.poll(20)
    assert ours.recv() == [True, True]
    child.join(20)
    assert child.exitcode == 0
    d.directory.forget()
    pair.move(2)


def test_staging_memory_goes_with_the_close_of_a_node_that_is_kept(site):
    """I14: an engine may hold the closed node for long."""
    gc.collect()  # nodes of other tests
    before = descriptors.count("/memfd:pdstage")
    pair = site.pair(progress="thread")
    pair.move(1)
    assert descriptors.count("/memfd:pdstage") > before
    assert pair.d.close()
    assert pair.p.close()
    assert descriptors.count("/memfd:pdstage") <= before


def test_a_thread_that_is_closed_between_two_turns_complains_of_nothing(site, monkeypatch, caplog):
    """Found by the simulator of whole nodes."""
    d = site.decode(Rank(), progress="thread")
    longest_s = d.driver.longest_s

    def close_first() -> float:
        d.driver.closed = True
        return longest_s()

    monkeypatch.setattr(d.driver, "longest_s", close_first)
    d.socket.wake()
    d.driver._thread.join()
    d.driver.closed = False
    assert d.close()
    assert caplog.text == ""


def test_who_waits_while_another_thread_turns_does_not_ask_without_a_pause(site, monkeypatch):
    """Two that wait at one inline node kept each other and the processor busy (found by the simulator)."""
    d = site.decode(Rank())
    receiver, refused = d.receive(1, site.address), mock.Mock(return_value=False)
    monkeypatch.setattr(d.driver, "turn", refused)
    with pytest.raises(TimeoutError):
        receiver.wait(0.1)
    monkeypatch.undo()
    assert 1 <= refused.call_count <= 110

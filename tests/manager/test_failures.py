"""What the user of a node sees when a peer's process fails: the rows of docs/transports.md about rooms.

A test names its row in its docstring. Each runs over every transport of this package that imports here.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import pytest

from pdstage import DecodeNode, PeerError, State, TransportError, stager
from pdstage.control.zmq import route_of
from pdstage.manager.data_path import Posts
from pdstage.plan.spans import Spans
from pdstage.transport import Done, PostFailed
from tests import processes
from tests.chaos.network import Network, permitted
from tests.control.sockets import raw_dealer
from tests.manager.engine import IMPATIENT, TOKENS, Rank, bound, drive, fails, unheard
from tests.manager.test_processes import Remote, any_transport
from tests.manager.workers import (
    receive_from_a_host_that_vanishes,
    send_to_a_host_that_vanishes,
    serve_decode,
    serve_prefill_forbidden_to_write,
)
from tests.rows import either_side, rows, usable


def half_sent(d: DecodeNode, dst: Rank, address: str) -> list:
    """Receivers of two rooms: the first ends well, of the second half is there."""
    receivers = [bound(d, dst, room, address) for room in range(2)]
    drive([d], lambda: receivers[0].state is State.SUCCESS and receivers[1].state is State.TRANSFERRING)
    return receivers


@pytest.mark.parametrize("path", rows(["staged", "direct"], full={"direct"}))
@any_transport
def test_a_killed_prefill_process_fails_its_rooms_only(site, transport, path):
    """Row: writer killed. I6, I10, I14: the room it was sending fails with a reason, and its pages and leases come back
    once its death is proved. Row: writer restarted. Its next life serves new rooms of a node that was not.
    """
    dst = Rank(n_pages=128)
    d = site.decode(dst, transport=transport, path=path, config=IMPATIENT)
    with Remote(site.address, 1, transport, path, rooms=2, stop=1) as remote:
        receivers = half_sent(d, dst, site.address)
        (session,) = d.core.sessions.values()
        os.kill(remote.processes[0].pid, signal.SIGKILL)
        remote.processes[0].join()
        unheard(d)
        fails(d, receivers[1], "silent")
        drive([d], lambda: receivers[1].released and not d.core.holds(session))
        assert d.core.idle
        assert receivers[0].state is State.SUCCESS
    if path == "staged":
        with Remote(site.address, 1, transport, path, rooms=1) as remote:
            remote.all_arrive(d, dst, site.address, 1)


@any_transport
def test_a_stopped_prefill_process_keeps_memory_out_of_use_until_it_goes_on(site, transport):
    """Row: writer stopped. I2, I10: its room fails in time; the pages it may still write come back once it says so."""
    dst = Rank(n_pages=128)
    d = site.decode(dst, transport=transport, path="direct", config=IMPATIENT)
    with Remote(site.address, 1, transport, "direct", rooms=2, stop=1) as remote:
        receivers = half_sent(d, dst, site.address)
        processes.stop(remote.processes[0].pid)
        unheard(d)
        fails(d, receivers[1], "silent")
        assert receivers[0].state is State.SUCCESS
        assert not receivers[1].released
        assert d.unfenced()
        os.kill(remote.processes[0].pid, signal.SIGCONT)
        drive([d], lambda: receivers[1].released and not d.unfenced())


def test_a_prefill_process_that_may_not_write_fails_the_room_before_anything_is_sent(site):
    """Row of local: writing forbidden."""
    dst = Rank(n_pages=128)
    d = site.decode(dst, path="direct")
    with Remote(site.address, 1, "local", "direct", rooms=1, stop=1, serve=serve_prefill_forbidden_to_write):
        receiver = bound(d, dst, 0, site.address)
        fails(d, receiver, "does not know this session")
        drive([d], lambda: receiver.released)
        assert not any(tensor.any() for tensor in dst.tensors)


@any_transport
def test_a_killed_decode_process_fails_its_rooms_at_prefill(site, transport):
    """Row: receiver killed. I8, I10: the source's pages come back at once, since nothing reads them any more."""
    src = Rank(n_pages=128)
    p = site.prefill(src, transport=transport, path="staged", config=IMPATIENT)
    pages = src.allocate(TOKENS)
    src.write(0, TOKENS, pages)
    sender = p.send(0)
    sender.chunk(pages, (0, 20))
    process, pipe = processes.child(serve_decode, site.address, transport)
    try:
        drive([p], pipe.poll)
        assert pipe.recv() == "half"
    finally:
        process.kill()
        process.join()
    sender.chunk(pages, (20, TOKENS))
    sender.finish()
    unheard(p)
    fails(p, sender, "silent")
    drive([p], lambda: sender.released)
    assert not p.unfenced()


@pytest.fixture
def two_hosts(monkeypatch) -> Iterator[Network]:
    """Network namespaces on a switch. Of fabrics, what would find another way is off; and the test is not to take long.

    The bound that NIXL gets here by default is tested in tests/transport/test_nixl.py.
    """
    if not permitted():
        pytest.skip("network namespaces cannot be made here")
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_TCP_USER_TIMEOUT", "5s")
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "5")
    with Network(["prefill", "decode"]) as hosts:
        yield hosts


VANISHED = {"nixl": ("decode was silent", "nixlRemoteDisconnectError"), "mooncake": ("decode was silent",)}
"""How prefill's room ends: mooncake takes minutes to give a write up."""


@pytest.mark.parametrize("transport", rows(usable("nixl", "mooncake"), full={"nixl"}))
def test_a_host_that_vanishes_fails_its_rooms_on_both_sides(two_hosts, transport):
    """Row: host vanished. Row of mooncake: host vanished.

    I2, I8, I10: the rooms end by silence, or prefill's as the fabric gives its write up, whichever comes first; the
    source comes back when the fabric gives the write up, of itself, and the destination when an operator says that the
    host is gone.
    """
    pipes, started = {}, []

    def start(rank: str, serve: Callable[..., None], *args: str) -> None:
        where = two_hosts.where(rank), two_hosts.address(rank)
        process, pipes[rank] = processes.child(serve, *where, transport, *args)
        started.append(process)

    def say(rank: str) -> object:
        assert pipes[rank].poll(240), f"{rank} says nothing"
        return pipes[rank].recv()

    try:
        start("prefill", send_to_a_host_that_vanishes)
        start("decode", receive_from_a_host_that_vanishes, say("prefill"))
        assert say("decode") == "half"
        two_hosts.cut("decode")
        pipes["prefill"].send("cut")
        assert "silent" in say("decode")
        assert say("decode") is False, "the other host may still write"
        assert say("decode") == "released"
        ended = say("prefill")
        assert any(words in ended for words in VANISHED[transport]), ended
        assert say("prefill") == "released"
    finally:
        for process in started:
            process.kill()
            process.join()


def test_a_pair_whose_route_a_stranger_took_recovers(site):
    """By itself, once it was silent for max_silence_s: the stranger used decode's name at prefill for a moment, and the
    two never heard of each other again.
    """
    pair = site.pair(config=IMPATIENT)
    p, d = pair.nodes

    def served(number: int) -> bool:
        room = pair.begin(number, 8)
        drive(site.nodes, lambda: room.receiver.state in (State.SUCCESS, State.FAILED))
        room.sender.abort()
        pair.end(room)
        return room.receiver.state is State.SUCCESS

    assert served(0)
    with raw_dealer(p.advert.endpoint, route_of(d.incarnation.to_bytes(8, "little"))) as stranger:
        stranger.send(b"hello")
        drive(site.nodes, lambda: p.socket.counters.malformed or p.stats()["frames_malformed"])
    assert any(served(room) for room in range(1, 5))


@either_side
def test_a_peer_that_the_transport_does_not_reach_fails_its_rooms_alone(site, monkeypatch, side):
    pair = site.pair()
    node, verb, handle = (pair.p, "connect", "sender") if side == "prefill" else (pair.d, "identify", "receiver")
    reach = getattr(node.transport, verb)
    once = mock.Mock(side_effect=[PeerError("no way there", remedy="mend it"), mock.DEFAULT], wraps=reach)
    monkeypatch.setattr(node.transport, verb, once)
    failed = pair.begin(1)
    drive(pair.nodes, lambda: getattr(failed, handle).state is State.FAILED)
    words = "does not know this session" if side == "prefill" else "no way there"
    assert words in str(getattr(failed, handle).error)
    pair.move(2)


@either_side
def test_a_copy_that_fails_as_nobody_foresaw_fails_its_room_alone(site, monkeypatch, side):
    """A lack of memory, say. It ended the node."""
    pair = site.pair(path="staged")
    copied, node = stager._copy_all, pair.p if side == "prefill" else pair.d
    n_failures = iter(range(1))

    def fail_once(plans, *given, **how):
        ours = any(plans is known for known in node.stager._plans.values())
        if ours and next(n_failures, None) is not None:
            raise MemoryError("no memory is left")
        copied(plans, *given, **how)

    monkeypatch.setattr(stager, "_copy_all", fail_once)
    failed = pair.begin(0)
    pair.end(failed)
    fails(pair.d, failed.receiver, "no memory is left")
    pair.move(1)


def test_a_write_of_several_posts_ends_with_the_error_of_one():
    way, error = mock.Mock(), TransportError("no route", remedy="check the cable")
    way.traits_of.return_value.max_descriptors, way.post.side_effect = 1, [1, 2]
    posts = Posts(way)
    posts.begin(7, "b", Spans(*np.arange(9).reshape(3, 3)), b"tag")
    assert posts.ended(PostFailed(1, error, False)) is None, "another post is under way"
    assert posts.ended(Done(2)) == (7, error, False)

"""Who is looked up again, how often, and what is kept of the answers."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from pdstage import DecodeNode, Pool, PrefillNode, State, UsageError
from pdstage.control.bootstrap import Advert, BootstrapClient, BootstrapServer, Incomplete
from pdstage.errors import DeadlineExceeded, TransportError
from pdstage.layout.topology import Topology
from pdstage.manager.lookup import Directory
from pdstage.tensors import build, paged_nhd
from tests.manager.conftest import Site
from tests.manager.engine import Rank, drive


@pytest.fixture
def directory():
    held = Directory(cache_s=1e-9)
    yield held
    held.close()


def test_answers_that_are_old_are_not_kept(directory: Directory) -> None:
    """Of thousands of instances each asked for once (I14)."""
    answers: queue.SimpleQueue = queue.SimpleQueue()
    with BootstrapServer() as server:
        for n in range(20):
            advert = Advert(
                instance=f"p{n}", topology=Topology(), endpoint=f"tcp://127.0.0.1:{n + 1}", incarnation=n + 1, layout=""
            )
            BootstrapClient(server.address).publish(advert)
            until = time.monotonic() + 20.0
            directory.lookup(directory.client(server.address), None, advert.instance, until, lambda *a: answers.put(a))
            assert answers.get(timeout=60.0) == ([advert], None)
            assert len(directory._cache) == 1


def test_an_instance_that_is_not_there_is_asked_for_ever_more_seldom(directory: Directory, monkeypatch) -> None:
    asked_at: list[float] = []

    def lookup(self: BootstrapClient, dp_rank: int | None = None, *, instance: str | None = None) -> list[Advert]:
        asked_at.append(time.monotonic())
        raise Incomplete("nobody is there", (0,))

    monkeypatch.setattr(BootstrapClient, "lookup", lookup)
    answers: queue.SimpleQueue = queue.SimpleQueue()
    until = time.monotonic() + 3.0
    directory.lookup(directory.client("127.0.0.1:1"), None, "p", until, lambda *a: answers.put(a))
    adverts, error = answers.get(timeout=60.0)
    assert adverts is None
    assert isinstance(error, DeadlineExceeded)
    assert 2 <= len(asked_at) <= 15, "0.1 s apart it would have been thirty times"


@pytest.mark.parametrize("second", ["lookup", "close"])
def test_the_first_lookups_may_come_in_several_threads(monkeypatch, second: str) -> None:
    """Whatever comes between the first and the start of its thread: close ends all of them."""
    asked: queue.SimpleQueue = queue.SimpleQueue()
    monkeypatch.setattr(BootstrapClient, "lookup", lambda *_, **__: asked.put(None) or [])
    directory, begun = Directory(), []
    other = threading.Thread(target=lambda: look() if second == "lookup" else directory.close())

    def look() -> None:
        client = directory.client("127.0.0.1:1")
        directory.lookup(client, None, "p", time.monotonic() + 1.0, lambda *_: None)

    class Worker(threading.Thread):
        def __init__(self, **given) -> None:
            begun.append(self)
            if len(begun) == 1:
                other.start()
                other.join(0.2)  # what it can do while the first has not started its worker yet
            super().__init__(**given)

    monkeypatch.setattr("pdstage.manager.lookup.threading.Thread", Worker)
    look()
    other.join()
    directory.close()
    look()
    assert len(begun) <= 2
    assert not any(thread.is_alive() for thread in begun)
    assert asked.qsize() <= 2 if second == "lookup" else asked.qsize() <= 1


BAD_HOSTS = ["a..b", "x" * 70, "a b", "caf\u00e9", "\udc80", "-a", "a-", "[::g]", "a" * 250 + ".bc"]


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_a_host_that_is_none_is_refused_before_anything_began(site: Site, host: str) -> None:
    """It killed the look-up thread, and with it every later room of the node."""
    p, d = site.prefill(Rank()), site.decode(Rank())
    with pytest.raises(UsageError, match="host|address"):
        d.receive(1, f"{host}:1234")
    assert not d.handles()
    receiver = d.receive(1, site.address)
    drive([p, d], lambda: receiver.state is State.WAITING_FOR_INPUT)


def test_an_address_that_does_not_answer_keeps_nobody_else_waiting(site: Site, monkeypatch) -> None:
    plain, released = BootstrapClient.lookup, threading.Event()

    def lookup(self: BootstrapClient, *given, **named) -> list[Advert]:
        if self.given != site.address:
            released.wait(60.0)
            raise Incomplete("nobody is there", (0,))
        return plain(self, *given, **named)

    monkeypatch.setattr(BootstrapClient, "lookup", lookup)
    p, d = site.prefill(Rank()), site.decode(Rank())
    hanging = [d.receive(n, f"127.0.0.1:{n}") for n in range(1, 6)]
    receiver = d.receive(9, site.address)
    drive([p, d], lambda: receiver.state is State.WAITING_FOR_INPUT)
    assert {one.state for one in hanging} == {State.BOOTSTRAPPING}
    released.set()


def test_a_deadline_counts_from_receive(site: Site, monkeypatch) -> None:
    """However long the look-up takes, and if it never ends (I10)."""
    released = threading.Event()
    monkeypatch.setattr(BootstrapClient, "lookup", lambda *_, **__: released.wait(60.0) and [])
    d = site.decode(Rank(), progress="thread")
    receiver = d.receive(1, site.address, deadline_s=0.2)
    with pytest.raises(DeadlineExceeded, match="did not end in its 0.2 s"):
        receiver.wait(20.0)
    assert receiver.released
    released.set()


def test_a_lookup_that_fails_as_nobody_foresaw_harms_its_own_room_only(site: Site, monkeypatch, caplog) -> None:
    plain, n_asked = BootstrapClient.lookup, itertools.count()

    def lookup(self: BootstrapClient, *given, **named) -> list[Advert]:
        if next(n_asked) == 0:
            raise KeyError("nobody foresaw this")
        return plain(self, *given, **named)

    monkeypatch.setattr(BootstrapClient, "lookup", lookup)
    p, d = site.prefill(Rank()), site.decode(Rank())
    harmed = d.receive(1, site.address)
    drive([p, d], lambda: harmed.released)
    assert "nobody foresaw this" in str(harmed.error)
    assert "nobody foresaw this" in caplog.text
    receiver = d.receive(2, site.address)
    drive([p, d], lambda: receiver.state is State.WAITING_FOR_INPUT)


@contextlib.contextmanager
def published() -> Iterator[tuple[Directory, BootstrapClient, Advert]]:
    """A node's lookups, who asks a directory for it, and the one advert there, of instance "p"."""
    with BootstrapServer() as server, Directory() as directory:
        advert = Advert(instance="p", topology=Topology(), endpoint="tcp://127.0.0.1:1", incarnation=1, layout="")
        client = directory.client(server.address)
        client.publish(advert)
        yield directory, client, advert


def test_a_thread_that_cannot_be_started_fails_its_lookup_alone(monkeypatch) -> None:
    answers: queue.SimpleQueue = queue.SimpleQueue()
    with published() as (directory, client, advert):
        until = time.monotonic() + 20.0
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
            directory.lookup(client, None, "p", until, lambda *a: answers.put(a))
        adverts, error = answers.get(timeout=60.0)
        assert adverts is None
        assert isinstance(error, TransportError)
        assert "can't start new thread" in str(error)
        directory.lookup(client, None, "p", until, lambda *a: answers.put(a))
        assert answers.get(timeout=60.0) == ([advert], None)


def test_who_does_not_take_his_answer_keeps_no_other_from_his(caplog) -> None:
    answers: queue.SimpleQueue = queue.SimpleQueue()
    with published() as (directory, client, advert):
        until = time.monotonic() + 20.0
        directory.lookup(client, None, "p", until, mock.Mock(side_effect=OSError("nobody listens")))
        directory.lookup(client, None, "p", until, lambda *a: answers.put(a))
        assert answers.get(timeout=60.0) == ([advert], None)
    assert "nobody listens" in caplog.text


def test_addresses_asked_at_a_time_are_bounded(monkeypatch) -> None:
    """Each has a thread. One too many is refused in words, and others go on."""
    released, answers = threading.Event(), queue.SimpleQueue()
    monkeypatch.setattr("pdstage.manager.lookup._MAX_ADDRESSES", 2)
    monkeypatch.setattr(BootstrapClient, "lookup", lambda *_, **__: released.wait(60.0) and [])
    with Directory() as directory:
        for port in (1, 2, 3):
            until = time.monotonic() + 60.0
            directory.lookup(directory.client(f"127.0.0.1:{port}"), None, None, until, lambda *a: answers.put(a))
        adverts, error = answers.get(timeout=60.0)
        assert adverts is None
        assert isinstance(error, TransportError)
        assert "2 bootstrap addresses are being asked" in str(error)
        released.set()
        assert [answers.get(timeout=60.0) for _ in range(2)] == [([], None)] * 2


def test_a_lease_is_renewed_whatever_a_renewal_raises(monkeypatch) -> None:
    """The thread that renews outlives it: an advert that is not renewed is lost for ever."""
    monkeypatch.setattr("pdstage.manager.lookup._TTL_S", 0.3)
    outcomes = iter([None, MemoryError(), KeyError("x"), TransportError("gone")])
    asked = threading.Semaphore(0)

    def publish(self: BootstrapClient, advert: Advert, ttl_s: float) -> None:
        asked.release()
        if (error := next(outcomes, None)) is not None:
            raise error

    monkeypatch.setattr(BootstrapClient, "publish", publish)
    monkeypatch.setattr(BootstrapClient, "withdraw", lambda *_: None)
    advert = Advert(instance="p", topology=Topology(), endpoint="tcp://127.0.0.1:1", incarnation=1, layout="")
    with Directory() as directory:
        directory.publish("127.0.0.1:1", lambda: [advert])
        for _ in range(6):
            assert asked.acquire(timeout=60.0)


def test_what_is_published_eventually_is_there_once_the_directory_is(monkeypatch) -> None:
    """Of engines that start together any may be first. And it is withdrawn in the end."""
    monkeypatch.setattr("pdstage.manager.lookup._TTL_S", 0.3)
    adverts = [
        Advert(instance=f"p{n}", topology=Topology(), endpoint="tcp://127.0.0.1:1", incarnation=1, layout="")
        for n in range(2)
    ]
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
    asked = threading.Semaphore(0)
    publish = BootstrapClient.publish

    def seen(self: BootstrapClient, advert: Advert, ttl_s: float) -> None:
        asked.release()
        publish(self, advert, 60.0)

    monkeypatch.setattr(BootstrapClient, "publish", seen)
    with Directory() as directory:
        directory.publish(address, lambda: adverts, eventually=True)
        for _ in range(2):
            assert asked.acquire(timeout=60.0)
        with BootstrapServer(address) as server:
            for _ in range(4):
                assert asked.acquire(timeout=60.0)
            assert list(server.directory.instances()) == ["p0", "p1"]
            directory.close()
            assert not server.directory.instances()


def test_an_engine_may_keep_the_directory_itself() -> None:
    """As one does whose ranks hand what they advertise to its scheduler: no rank serves or renews anything."""
    src = np.arange(64, dtype=np.float32).reshape(1, 4, 2, 2, 4)
    dst = np.zeros_like(src)
    pools = [Pool.of(build(paged_nhd(held[..., :2], held[..., 2:], total_heads=2, tp=(1, 0)))) for held in (src, dst)]
    config = {"transport": "local", "progress": "thread"}
    with (
        BootstrapServer() as server,
        PrefillNode(pools[0], Topology(), publish=False, instance="engine-7", **config) as prefill,
        DecodeNode(pools[1], Topology(), **config) as decode,
    ):
        assert prefill.bootstrap_address == ""
        server.directory.publish(prefill.advert, None)
        receiver = decode.receive("room", prefill=server.address, instance="engine-7")
        receiver.bind([1, 2], tokens=4)
        sender = prefill.send("room")
        sender.chunk([0, 3], tokens=(0, 4))
        sender.finish()
        receiver.wait(timeout_s=30)
        receiver.wait_released(timeout_s=30)
    assert np.array_equal(dst[0, [1, 2]], src[0, [0, 3]])

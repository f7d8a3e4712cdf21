"""Who is looked up again, how often, and what is kept of the answers."""

from __future__ import annotations

import copy
import itertools
import queue
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from unittest import mock

import msgspec
import pytest

from pdstage import DeadlineExceeded, State, Topology, TransportError, UsageError
from pdstage.control.bootstrap import Advert, BootstrapClient, BootstrapServer, Conflict, Incomplete
from pdstage.manager.lookup import Directory, has_ended, this_process
from tests.manager.conftest import Site
from tests.manager.engine import QUICK, Rank, fails
from tests.processes import child


def advert(n: int = 0) -> Advert:
    return Advert(instance=f"p{n}", topology=Topology(), endpoint="tcp://127.0.0.1:1", incarnation=n + 1, layout="")


class Lookups(Directory):
    """A node's look-ups; `answer` gives them in their order."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self._answers: queue.SimpleQueue = queue.SimpleQueue()

    def look(self, address: str, instance: str | None = None, within_s: float = 60.0) -> None:
        self.lookup(self.client(address), None, instance, time.monotonic() + within_s, self._answers.put)

    def answer(self):
        return self._answers.get(timeout=60.0)


@pytest.mark.parametrize("cache_s", [1e-9, 600.0])
def test_answers_are_kept_until_they_are_old_or_a_peer_is_lost(cache_s) -> None:
    """Of thousands of instances each asked for once, none that is old (I14)."""
    with BootstrapServer() as server, Lookups(cache_s=cache_s) as directory:
        for n in range(20):
            BootstrapClient(server.address).publish(advert(n))
            directory.look(server.address, f"p{n}")
            assert directory.answer() == [advert(n)]
        first = server.address, None, "p0"
        assert (len(directory._cache), directory.cached(*first)) == ((1, None) if cache_s < 1 else (20, [advert()]))
        directory.forget()
        assert not directory.cached(*first)


def test_an_instance_that_is_not_there_is_asked_for_ever_more_seldom(monkeypatch) -> None:
    lookup = mock.Mock(side_effect=Incomplete("nobody is there", (0,)))
    monkeypatch.setattr(BootstrapClient, "lookup", lookup)
    with Lookups() as directory:
        directory.look("127.0.0.1:1", "p", within_s=3.0)
        error = directory.answer()
    assert isinstance(error, DeadlineExceeded)
    assert 2 <= lookup.call_count <= 15, "0.1 s apart it would have been thirty times"


@pytest.mark.parametrize("second", ["lookup", "close"])
def test_the_first_lookups_may_come_in_several_threads(monkeypatch, second: str) -> None:
    """Whatever comes between the first and the start of its thread: close ends all of them."""
    lookup, begun, directory = mock.Mock(return_value=[]), [], Lookups()
    monkeypatch.setattr(BootstrapClient, "lookup", lookup)
    look = lambda: directory.look("127.0.0.1:1", "p", 1.0)  # noqa: E731
    other = threading.Thread(target=look if second == "lookup" else directory.close)

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
    assert lookup.call_count <= (2 if second == "lookup" else 1)


BAD_HOSTS = ["a..b", "x" * 70, "a b", "caf\u00e9", "\udc80", "-a", "a-", "[::g]", "a" * 250 + ".bc"]


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_a_host_that_is_none_is_refused_before_anything_began(site: Site, host: str) -> None:
    """It killed the look-up thread, and with it every later room of the node."""
    pair = site.pair()
    with pytest.raises(UsageError, match="host|address"):
        pair.d.receive(1, f"{host}:1234")
    assert not pair.d.handles()
    pair.move(1)


def test_an_address_that_does_not_answer_keeps_nobody_else_waiting(site: Site, monkeypatch) -> None:
    plain, released = BootstrapClient.lookup, threading.Event()

    def lookup(self: BootstrapClient, *given, **named) -> list[Advert]:
        if self.given != site.address:
            released.wait(60.0)
            raise Incomplete("nobody is there", (0,))
        return plain(self, *given, **named)

    monkeypatch.setattr(BootstrapClient, "lookup", lookup)
    monkeypatch.setattr("pdstage.manager.lookup._END_S", 0.2)
    pair = site.pair()
    hanging = [pair.d.receive(n, f"127.0.0.1:{n}") for n in range(1, 6)]
    pair.move(9)
    assert {one.state for one in hanging} == {State.BOOTSTRAPPING}
    assert pair.d.close()
    assert all(one.released and "the node closes" in str(one.error) for one in hanging)
    released.set()


def test_a_deadline_counts_from_receive(site: Site, monkeypatch) -> None:
    """However long the look-up takes, and if it never ends (I10)."""
    released = threading.Event()
    monkeypatch.setattr(BootstrapClient, "lookup", lambda *_, **__: released.wait(60.0) and [])
    receiver = site.decode(Rank(), progress="thread").receive(1, site.address, deadline_s=0.2)
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
    pair = site.pair()
    harmed = pair.receive(1)
    site.ends(harmed)
    assert "nobody foresaw this" in str(harmed.error)
    assert "nobody foresaw this" in caplog.text
    pair.move(2)


@pytest.mark.parametrize("why", ["one peer too many", "another key"])
def test_whom_no_room_takes_keeps_no_connection(site: Site, why: str) -> None:
    """I14: of engines that come and go each has an address of its own."""
    node = site.decode(Rank(), config=replace(QUICK, max_peers=1))
    ends = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2" if why == "one peer too many" else "tcp://key@127.0.0.1:2"]
    with BootstrapServer() as server:
        for rank, endpoint in enumerate(ends):
            place = Topology(tp_size=2, tp_rank=rank)
            one = msgspec.structs.replace(advert(rank), instance="p", topology=place, endpoint=endpoint)
            BootstrapClient(server.address).publish(one)
        receiver = node.receive(1, server.address)
        fails(node, receiver)
        assert not node.socket._routes


def test_a_directory_that_names_a_rank_twice_is_refused(site: Site, monkeypatch) -> None:
    """I14: each of the endpoints would stay connected, of any number."""
    twice = [msgspec.structs.replace(advert(), endpoint=f"tcp://127.0.0.1:{port}") for port in (1, 2)]
    monkeypatch.setattr(BootstrapClient, "lookup", lambda *_, **__: twice)
    node = site.decode(Rank())
    receiver = node.receive(1, site.address)
    fails(node, receiver, "names one prefill rank twice")
    assert not node.socket._routes


def test_a_thread_that_cannot_be_started_fails_its_lookup_alone(site: Site, monkeypatch) -> None:
    site.prefill(Rank())
    with Lookups() as directory:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
            directory.look(site.address)
        error = directory.answer()
        assert isinstance(error, TransportError)
        assert "can't start new thread" in str(error)
        directory.look(site.address)
        assert isinstance(directory.answer(), list)


def test_who_does_not_take_his_answer_keeps_no_other_from_his(site: Site, caplog) -> None:
    site.prefill(Rank())
    with Lookups() as directory:
        deaf = mock.Mock(side_effect=OSError("nobody listens"))
        directory.lookup(directory.client(site.address), None, None, time.monotonic() + 20.0, deaf)
        directory.look(site.address)
        assert isinstance(directory.answer(), list)
    assert "nobody listens" in caplog.text


def test_addresses_asked_at_a_time_are_bounded(monkeypatch) -> None:
    """Each has a thread. One too many is refused in words, and others go on."""
    released = threading.Event()
    monkeypatch.setattr("pdstage.manager.lookup._MAX_ADDRESSES", 2)
    monkeypatch.setattr(BootstrapClient, "lookup", lambda *_, **__: released.wait(60.0) and [])
    with Lookups() as directory:
        for port in (1, 2, 3):
            directory.look(f"127.0.0.1:{port}")
        error = directory.answer()
        assert isinstance(error, TransportError)
        assert "2 bootstrap addresses are being asked" in str(error)
        released.set()
        assert [directory.answer() for _ in range(2)] == [[], []]


@pytest.fixture
def asked(monkeypatch) -> threading.Semaphore:
    """Released whenever an advert is published, or would be."""
    monkeypatch.setattr("pdstage.manager.lookup._TTL_S", 0.3)
    return threading.Semaphore(0)


def times(n: int, asked: threading.Semaphore) -> None:
    """It is asked so often."""
    for _ in range(n):
        assert asked.acquire(timeout=60.0)


def test_a_lease_is_renewed_whatever_a_renewal_raises(asked, monkeypatch) -> None:
    """The thread that renews outlives it: an advert that is not renewed is lost for ever."""
    outcomes = iter([None, MemoryError(), KeyError("x"), TransportError("gone")])

    def publish(self: BootstrapClient, advert: Advert, ttl_s: float) -> None:
        asked.release()
        if (error := next(outcomes, None)) is not None:
            raise error

    monkeypatch.setattr(BootstrapClient, "publish", publish)
    monkeypatch.setattr(BootstrapClient, "withdraw", lambda *_: None)
    with Directory() as directory:
        directory.publish("127.0.0.1:1", lambda: [advert()])
        times(6, asked)


def test_a_rank_whose_place_was_taken_says_so_and_takes_no_other_with_it(asked, monkeypatch, caplog) -> None:
    """Of an engine's ranks that are published together one is replaced."""
    renewed: list[str] = []

    def publish(self: BootstrapClient, advert: Advert, ttl_s: float) -> None:
        renewed.append(advert.instance)
        asked.release()
        if advert.instance == "p0" and len(renewed) > 2:
            raise Conflict("p0 was taken over by a newer process", remedy="stop the older one")

    monkeypatch.setattr(BootstrapClient, "publish", publish)
    monkeypatch.setattr(BootstrapClient, "withdraw", lambda *_: None)
    with Directory() as directory:
        directory.publish("127.0.0.1:1", lambda: [advert(0), advert(1)])
        times(8, asked)
    assert renewed[:8] == ["p0", "p1"] * 4
    assert caplog.text.count("is not renewed: p0 was taken over by a newer process") == 1


def say_and_wait(pipe) -> None:
    pipe.send(this_process())
    pipe.recv()


def test_a_process_s_place_is_taken_once_it_has_ended(site, monkeypatch, caplog) -> None:
    """By a node that finds no such process on its machine, or runs in the same pod. One that lives is heard."""
    process, pipe = child(say_and_wait)
    there = msgspec.structs.replace(advert(), process=pipe.recv())
    client = BootstrapClient(site.address)
    client.publish(there)
    take = partial(site.prefill, Rank(), instance="p0")
    with pytest.raises(Conflict, match="registered by another process.*an instance name of its own"):
        take()
    assert "was refused: rank 0" in caplog.text
    assert client.lookup() == [there]
    elsewhere = copy.deepcopy(there.process) | {"pod": "p-0"}
    elsewhere["identity"]["namespaces"]["pid"] += "0"  # of another container
    for pod, started in (("p-0", 1 << 40), ("p-1", 0), ("p-0", 0)):
        monkeypatch.setenv("PDSTAGE_POD", pod)
        elsewhere["identity"]["started"] = started
        assert has_ended(elsewhere) == ((pod, started) == ("p-0", 0))
    assert not any(map(has_ended, (there.process, this_process(), {})))
    pipe.send(None)
    process.join()
    assert has_ended(there.process)
    assert [one.incarnation for one in client.lookup()] == [1]
    p = take()
    assert client.lookup() == [p.advert]
    with pytest.raises(Conflict, match="taken over by a newer process"):
        client.publish(there)
    p.close()
    take()


def test_rooms_that_wait_for_one_directory_are_answered_by_one_request(monkeypatch) -> None:
    """It is away, and each request waits: asked one by one, rooms would outlast their deadlines unanswered."""
    asking, go = threading.Semaphore(0), threading.Semaphore(0)

    def lookup(self: BootstrapClient, *_, **__) -> list[Advert]:
        asking.release()
        assert go.acquire(timeout=60.0)
        raise TransportError("nobody answers", remedy="start it")

    monkeypatch.setattr(BootstrapClient, "lookup", lookup)
    with Lookups() as directory:
        directory.look("127.0.0.1:1", within_s=0.0)
        assert asking.acquire(timeout=60.0)
        for _ in range(50):
            directory.look("127.0.0.1:1", within_s=0.0)
        go.release(2)
        errors = [directory.answer() for _ in range(51)]
        assert {type(error) for error in errors} == {DeadlineExceeded}
        assert directory.counters.lookups_failed == 51


def test_what_is_published_eventually_is_there_once_the_directory_is(asked, monkeypatch) -> None:
    """Of engines that start together any may be first. And it is withdrawn in the end."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
    publish = BootstrapClient.publish

    def seen(self: BootstrapClient, advert: Advert, ttl_s: float) -> None:
        asked.release()
        publish(self, advert, 60.0)

    monkeypatch.setattr(BootstrapClient, "publish", seen)
    with Directory() as directory:
        directory.publish(address, lambda: [advert(0), advert(1)], eventually=True)
        times(2, asked)
        with BootstrapServer(address) as server:
            times(4, asked)
            assert list(server.directory.instances()) == ["p0", "p1"]
            directory.close()
            assert not server.directory.instances()

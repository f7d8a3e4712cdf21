"""What every directory does, whichever it is: in this process, over HTTP, encrypted, and in etcd."""

from __future__ import annotations

import json
import random
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import pytest

from pdstage.bench.etcd_servers import ETCD, Servers
from pdstage.control import etcd
from pdstage.control.bootstrap import BootstrapServer, DirectoryClient, client_of
from pdstage.control.directory import Advert, Conflict, Directory, Incomplete
from pdstage.control.keys import Keys
from pdstage.errors import PdstageError, UsageError
from pdstage.layout.topology import Topology
from tests.control.test_directory import advert

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 240.0


class Client(Protocol):
    """What a node asks of a directory."""

    def publish(self, advert: Advert, ttl_s: float = ...) -> None: ...

    def withdraw(self, advert: Advert) -> None: ...

    def lookup(self, dp_rank: int | None = None, *, instance: str | None = None) -> list[Advert]: ...

    def instances(self) -> bytes: ...


class Embedded:
    """The table itself, as its own process uses it."""

    def __init__(self, table: Directory) -> None:
        self._table = table
        self.publish = table.publish

    def withdraw(self, advert: Advert) -> None:
        self._table.withdraw(advert.instance, advert.topology.unique_rank, advert.incarnation)

    def lookup(self, dp_rank: int | None = None, *, instance: str | None = None) -> list[Advert]:
        return self._table.lookup(instance, dp_rank)

    def instances(self) -> bytes:
        from pdstage.control.directory_api import answer  # noqa: PLC0415

        return answer(self._table, "GET", "/v1/instances", b"")[1]


@pytest.fixture(scope="module")
def etcd_server(tmp_path_factory) -> Iterator[Servers | None]:
    if ETCD is None:
        yield None
        return
    with Servers(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers.ready()


@pytest.fixture(params=["embedded", "http", "curve", "etcd"])
def make(request, etcd_server, monkeypatch, tmp_path) -> Iterator[Callable[[], Client]]:
    """Clients of one directory, each as of a node of its own."""
    with ExitStack() as held:
        if request.param == "embedded":
            table = Directory(time.monotonic)
            yield lambda: Embedded(table)
            return
        keys = None
        if request.param == "etcd":
            if etcd_server is None:
                pytest.skip("there is no etcd")
            monkeypatch.setattr(etcd, "_QUIET_S", 0.5)
            address = etcd_server.address(f"contract/{time.monotonic_ns()}")
        else:
            keys = Keys.make(tmp_path / "key") if request.param == "curve" else None
            address = held.enter_context(BootstrapServer(keys=keys)).address

        def one() -> DirectoryClient:
            client = client_of(address, WAIT_S, keys=keys)
            held.callback(client.close)
            return client

        yield one


def settled(client: Client, wanted: Callable[[], bool]) -> None:
    """A watch tells a moment later."""
    end = time.monotonic() + WAIT_S
    while not wanted():
        assert time.monotonic() < end, client.instances()
        time.sleep(0.01)


def found(client: Client, **asked: object) -> list[Advert] | type[PdstageError]:
    try:
        return client.lookup(**asked)  # type: ignore[arg-type]
    except PdstageError as error:
        return type(error)


def test_ranks_come_in_any_order_and_are_found_by_group_rank(make):
    node, reader = make(), make()
    assert found(reader) is Incomplete
    for rank in (3, 0, 2, 1):
        node.publish(advert(rank, tp=4), 30.0)
    expected = [advert(rank, tp=4) for rank in range(4)]
    settled(reader, lambda: found(reader) == expected)
    assert found(reader, dp_rank=0, instance="p0") == expected


def test_every_kind_of_rank_is_wanted(make):
    node, reader = make(), make()
    shape = {"tp_size": 2, "pp_size": 2, "cp_size": 1, "dp_size": 2}
    places = [Topology(**shape, tp_rank=t, pp_rank=p, dp_rank=d) for t in range(2) for p in range(2) for d in range(2)]
    for place in places:
        assert found(reader, instance="p", dp_rank=1) in (Incomplete, UsageError)
        node.publish(Advert(instance="p", topology=place, endpoint="e", incarnation=2**64 - 1, layout="x"), 30.0)
    for dp_rank in (0, 1):
        settled(reader, lambda dp_rank=dp_rank: isinstance(found(reader, dp_rank=dp_rank), list))
        assert [one.topology.group_rank for one in reader.lookup(dp_rank)] == [0, 1, 2, 3]
    assert found(reader) is UsageError, "which replica?"


def test_missing_ranks_are_named(make):
    node, reader = make(), make()
    for rank in (0, 3):
        node.publish(advert(rank, tp=4), 30.0)
    settled(reader, lambda: b'"tp_rank":3' in reader.instances())

    def missing() -> tuple[int, ...]:
        with pytest.raises(Incomplete) as caught:
            reader.lookup()
        return caught.value.missing

    settled(reader, lambda: missing() == (1, 2))


def test_a_successor_takes_over_at_once_and_the_predecessor_cannot_come_back(make):
    older, newer, reader = make(), make(), make()
    one, two = (advert(0, tp=1, incarnation=n) for n in (1, 2))
    older.publish(one, 30.0)
    newer.publish(two, 30.0)
    settled(reader, lambda: found(reader) == [two])
    for _ in range(2):
        with pytest.raises(Conflict, match="taken over by a newer process"):
            older.publish(one, 30.0)
    older.withdraw(one)
    newer.publish(two, 30.0)
    assert found(reader) == [two]


def test_one_shape_an_instance(make):
    node, reader = make(), make()
    node.publish(advert(0, tp=2), 30.0)
    with pytest.raises(Conflict, match="is live with"):
        make().publish(advert(0, tp=4), 30.0)
    node.withdraw(advert(0, tp=2))
    node.publish(advert(0, tp=1), 30.0)
    settled(reader, lambda: found(reader) == [advert(0, tp=1)])


@pytest.mark.parametrize("name", ["", "x" * 257, "line\nbreak"])
def test_names_that_nobody_can_read_are_refused(make, name):
    with pytest.raises(UsageError, match="cannot be published|does not decode"):
        make().publish(advert(0, tp=1, instance=name), 30.0)


def test_durations_that_are_none_are_refused(make):
    for ttl_s in (0.0, -1.0, 1e9):
        with pytest.raises(UsageError, match="a lease of"):
            make().publish(advert(0, tp=1), ttl_s)


def test_people_can_read_it(make):
    node = make()
    node.publish(advert(0, tp=1), 30.0)
    shown = json.loads(make().instances())
    assert 0 < shown["p0"][0]["expires_in_s"] <= 30
    assert shown["p0"][0]["advert"]["endpoint"] == advert(0).endpoint


def test_any_history_ends_as_the_table_ends(make):
    """Ranks of two instances come, come again as other processes, and go: all directories tell the same."""
    rng, table = random.Random(7), Embedded(Directory(time.monotonic))
    nodes, reader = [make() for _ in range(3)], make()
    for _ in range(60):
        one = advert(rng.randrange(2), tp=2, incarnation=rng.randrange(1, 4), instance=rng.choice(["a", "b"]))
        node, what = rng.choice(nodes), rng.choice(["publish", "publish", "withdraw"])
        outcomes = []
        for place in (table, node):
            try:
                getattr(place, what)(*(one, 3600.0) if what == "publish" else (one,))
                outcomes.append("")
            except PdstageError as error:
                outcomes.append(error.what)
        assert outcomes[0] == outcomes[1], one
    for name in ("a", "b"):
        settled(reader, lambda name=name: found(reader, instance=name) == found(table, instance=name))

"""What every directory does, whichever it is: in this process, over HTTP, encrypted, and in etcd."""

from __future__ import annotations

import json
import random
import time
from contextlib import ExitStack

import msgspec
import pytest

from pdstage import Keys, PdstageError, Topology, UsageError
from pdstage.bench.etcd_servers import ETCD, Servers
from pdstage.control import etcd
from pdstage.control.bootstrap import BootstrapServer, client_of
from pdstage.control.directory import Advert, Conflict, Directory, Incomplete
from pdstage.control.directory_api import answer
from tests.control.test_directory import advert
from tests.processes import until

WAIT_S = 240.0
TTL_S = 30.0


class Embedded:
    """The table itself, as its own process uses it."""

    def __init__(self, table):
        self._table = table
        self.publish, self.withdraw = table.publish, table.withdraw

    def lookup(self, dp_rank=None, *, instance=None):
        return self._table.lookup(instance, dp_rank)

    def instances(self):
        return answer(self._table, "GET", "/v1/instances", b"")[1]


@pytest.fixture(scope="module")
def etcd_server(tmp_path_factory):
    if ETCD is None:
        yield None
        return
    with Servers(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers.ready()


@pytest.fixture(params=["embedded", "http", "curve", "etcd"])
def make(request, etcd_server, monkeypatch, tmp_path):
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
            monkeypatch.setattr(etcd, "_EVERY_S", 0.05)
            address = etcd_server.address(f"contract/{time.monotonic_ns()}")
        else:
            keys = Keys.make(tmp_path / "key") if request.param == "curve" else None
            address = held.enter_context(BootstrapServer(keys=keys)).address

        def one():
            client = client_of(address, WAIT_S, keys=keys)
            if isinstance(client, etcd.EtcdClient):
                held.callback(client.close)
            return client

        yield one


def settled(client, wanted):
    """A watch tells a moment later."""
    until(wanted, client.instances)


def found(client, **asked):
    """The ranks, or why there are none."""
    try:
        return client.lookup(**asked)
    except PdstageError as error:
        return error.what


def test_ranks_come_in_any_order_and_are_found_by_group_rank(make):
    node, reader = make(), make()
    assert found(reader) == "no rank is registered"
    assert found(reader, instance="p0") == "no rank of instance 'p0' is registered"
    for rank in (3, 0, 2, 1):
        node.publish(advert(rank, tp=4), TTL_S)
    expected = [advert(rank, tp=4) for rank in range(4)]
    settled(reader, lambda: found(reader) == expected)
    assert found(reader, dp_rank=0, instance="p0") == expected
    node.withdraw(advert(2, tp=4))
    settled(reader, lambda: "1 of 4 ranks of dp replica 0 are not registered, ranks 2" in found(reader))


def test_every_kind_of_rank_is_wanted(make):
    node, reader = make(), make()
    shape = {"tp_size": 2, "pp_size": 2, "cp_size": 2, "dp_size": 2}
    places = [
        Topology(**shape, tp_rank=n & 1, pp_rank=n >> 1 & 1, cp_rank=n >> 2 & 1, dp_rank=n >> 3) for n in range(16)
    ]
    for place in places:
        assert "registered" in found(reader, instance="p", dp_rank=1)
        node.publish(Advert(instance="p", topology=place, endpoint="e", incarnation=2**64 - 1, layout="x"), TTL_S)
    for dp_rank in (0, 1):
        settled(reader, lambda dp_rank=dp_rank: isinstance(found(reader, dp_rank=dp_rank), list))
        assert [one.topology.group_rank for one in reader.lookup(dp_rank)] == list(range(8))
        assert {one.topology.dp_rank for one in reader.lookup(dp_rank)} == {dp_rank}


def test_what_is_missing_and_what_must_be_chosen_is_named(make):
    node, reader = make(), make()
    with pytest.raises(Incomplete) as caught:
        reader.lookup()
    assert caught.value.missing == ()
    for rank in (0, 3, 5):
        node.publish(advert(rank, tp=4, dp=2), TTL_S)
    settled(reader, lambda: "ranks 4, 6, 7" in found(reader, dp_rank=1))
    with pytest.raises(Incomplete, match="2 of 4 ranks of dp replica 0 are not registered, ranks 1, 2") as caught:
        reader.lookup(0)
    assert caught.value.missing == (1, 2)
    assert "2 dp replicas" in found(reader)
    for dp_rank, said in ((2, "no dp replica 2"), (-1, "-1")):
        assert said in found(reader, dp_rank=dp_rank)
    names = ["a/b?c=d&e#f %", "präfill", "..", "x" * 256]
    for name in names:
        node.publish(advert(instance=name), TTL_S)
    settled(reader, lambda: found(reader, instance=names[-1]) == [advert(instance=names[-1])])
    assert [found(reader, instance=name) for name in names] == [[advert(instance=name)] for name in names]
    with pytest.raises(UsageError, match="5 instances are registered"):
        reader.lookup()


def test_a_place_is_one_process_s_and_after_it_its_successor_s(make):
    """Two with one name are refused, whoever comes first; who was replaced cannot come back."""
    older, newer, reader = make(), make(), make()
    one, two = (advert(incarnation=n) for n in (1, 2))
    older.publish(one, TTL_S)
    for after in (0, 2, 7):
        with pytest.raises(Conflict, match=r"registered by another process, at tcp://127\.0\.0\.1:9000") as caught:
            newer.publish(two, TTL_S, after)
        assert caught.value.fields["holder"] == one
        older.publish(one, TTL_S)
    settled(reader, lambda: found(reader) == [one])
    newer.publish(two, TTL_S, 1)
    settled(reader, lambda: found(reader) == [two])
    for _ in range(2):
        with pytest.raises(Conflict, match=r"taken over by a newer process at tcp://127\.0\.0\.1:9000"):
            older.publish(one, TTL_S)
        older.withdraw(one)  # the place is not its own any more
        newer.publish(two, TTL_S)
    assert found(reader) == found(make()) == [two]
    third, three = make(), advert(incarnation=3)
    third.publish(three, TTL_S, 2)
    for client, ended in ((older, one), (newer, two)):
        with pytest.raises(Conflict, match="taken over by a newer process"):
            client.publish(ended, TTL_S)
    settled(reader, lambda: found(reader) == [three])
    assert found(make()) == [three]
    third.withdraw(three)
    settled(reader, lambda: found(reader) == "no rank is registered")
    older.publish(one, TTL_S)  # its place is free


def test_one_shape_an_instance(make):
    node, reader = make(), make()
    node.publish(advert(1, tp=4), TTL_S)
    with pytest.raises(Conflict, match=r"live with .* = \(1, 1, 1, 4\), not \(1, 1, 1, 2\)"):
        make().publish(advert(0, tp=2), TTL_S)
    node.withdraw(advert(1, tp=4))
    node.publish(advert(), TTL_S)
    settled(reader, lambda: found(reader) == [advert()])


def test_names_and_durations_that_are_none_are_refused(make):
    for name in ("", "x" * 257, "line\nbreak"):
        with pytest.raises(UsageError, match="cannot be published|does not decode"):
            make().publish(advert(instance=name), TTL_S)
    for ttl_s in (0, -1, 3601, 1e9):
        with pytest.raises(UsageError, match="a lease of"):
            make().publish(advert(), ttl_s)


def test_who_decodes_is_listed_for_people_and_not_looked_up(make):
    one, prefill = make(), advert()
    decode = msgspec.structs.replace(prefill, role="decode", incarnation=2)
    for each in (prefill, decode):
        one.publish(each, TTL_S)
    assert make().lookup() == [prefill]
    assert sorted(json.loads(make().instances())) == ["decode:p0", "p0"]
    one.withdraw(decode)
    (shown,) = json.loads(make().instances()).pop("p0")
    assert 0 < shown["expires_in_s"] <= TTL_S
    assert shown["advert"]["endpoint"] == prefill.endpoint


def test_any_history_ends_as_the_table_ends(make):
    """Ranks of two instances come, come again as other processes, and go: all directories tell the same."""
    rng, table = random.Random(7), Embedded(Directory(time.monotonic))
    nodes, reader = {incarnation: make() for incarnation in (1, 2, 3)}, make()
    for _ in range(60):
        one = advert(rng.randrange(2), tp=2, incarnation=rng.randrange(1, 4), instance=rng.choice(["a", "b"]))
        node, what = nodes[one.incarnation], rng.choice(["publish", "publish", "withdraw"])
        ended, outcomes = rng.randrange(4), []
        for place in (table, node):
            try:
                getattr(place, what)(*(one, 3600.0, ended) if what == "publish" else (one,))
                outcomes.append("")
            except PdstageError as error:
                outcomes.append(error.what)
        assert outcomes[0] == outcomes[1], one
    for name in ("a", "b"):
        settled(reader, lambda name=name: found(reader, instance=name) == found(table, instance=name))

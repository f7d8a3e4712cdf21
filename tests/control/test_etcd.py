"""The directory in etcd: real servers, killed, stopped, full, compacted, with users and certificates."""

from __future__ import annotations

import base64
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack

import msgspec
import pytest

from pdstage import PdstageError, PeerError, TransportError, UsageError, cli, environment
from pdstage.bench.etcd_servers import ETCD, Servers
from pdstage.control import etcd, operate
from pdstage.control.bootstrap import BootstrapServer, client_of
from pdstage.control.directory import Conflict, Held, Incomplete
from pdstage.control.etcd import EtcdAddress, EtcdClient
from tests.control.test_directory import advert
from tests.manager.conftest import Site
from tests.manager.engine import Rank, decode_node, drive, prefill_node
from tests.manager.test_lifecycle import lost_peer
from tests.processes import python, stop, until

pytestmark = pytest.mark.skipif(ETCD is None, reason="there is no etcd (apt-get install etcd-server)")
WAIT_S = 60.0


def found(client, **asked):
    """What a look-up finds; nothing while ranks are missing."""
    try:
        return client.lookup(**asked)
    except Incomplete:
        return []


def revision_of(servers):
    return servers.ask("kv/range", {"key": "AA=="})["header"]["revision"]


def encoded(text):
    return base64.b64encode(text.encode()).decode()


def let_in(servers, user, password):
    """Whom docs/kubernetes.md makes, who may write the prefix and nothing else; then authentication is enabled."""
    low, high = encoded("pdstage/"), encoded("pdstage0")
    perm = {"permType": "READWRITE", "key": low, "range_end": high}
    for name, its, role in ((user, password, "pdstage"), ("root", "r", "root")):
        servers.ask("auth/role/add", {"name": role})
        servers.ask("auth/user/add", {"name": name, "password": its})
        servers.ask("auth/user/grant", {"user": name, "role": role})
    servers.ask("auth/role/grant", {"name": "pdstage", "perm": perm})
    servers.ask("auth/enable")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Servers(tmp_path_factory.mktemp("etcd")) as servers:
        yield servers.ready()


@pytest.fixture
def make(server, request):
    """Clients of one prefix, each as of a node of its own."""
    made = []

    def one():
        made.append(EtcdClient(server.address(f"tests/{request.node.name}")))
        return made[-1]

    yield one
    for client in made:
        client.close()


def test_an_instance_has_one_shape_also_of_two_that_come_at_once(make):
    """The other had read before the first was there: the transaction sees it."""
    one, other = make(), make()
    read = other._read("later/")
    one.publish(advert(0, tp=2, instance="later"))
    late = advert(0, tp=4, instance="later")
    assert not other._put(Held(late), read, 15.0)


def test_renewing_costs_no_revision_and_a_lost_lease_is_published_anew(make, server):
    """As of a process that was stopped for longer than its lease."""
    client, reader = make(), make()
    client.publish(advert())
    before = revision_of(server)
    assert found(reader)
    copy, asked_at = reader._copy, reader.watched[0]
    for _ in range(5):
        client.publish(advert())
    assert revision_of(server) == before
    until(lambda: reader.watched[0] > asked_at, "it asks again")
    assert reader._copy is copy, "and reads the table only if it has changed"
    ((_, lease),) = client._leases.values()
    server.ask("lease/revoke", {"ID": lease})
    until(lambda: not found(reader), "the lease is gone")
    client.publish(advert())
    until(lambda: bool(found(reader)), "it is back")


def test_who_was_replaced_hears_it_though_its_lease_goes_on(make, monkeypatch):
    """The newer process ended before it could end the older one's lease."""
    older, newer, reader = make(), make(), make()
    one, two = (advert(incarnation=n) for n in (1, 2))
    older.publish(one)
    monkeypatch.setattr(newer, "_revoke", lambda lease: None)
    newer.publish(two, after=1)
    with pytest.raises(Conflict, match="taken over by a newer process"):
        older.publish(one)
    monkeypatch.undo()
    newer.withdraw(two)
    until(lambda: not found(reader), "it is gone")
    older.publish(one)
    until(lambda: found(reader) == [one], "its place is free")


def test_a_place_that_goes_on_changing_is_said(make, monkeypatch):
    client = make()
    monkeypatch.setattr(client, "_put", lambda *_: False)
    with pytest.raises(PeerError, match="its place in etcd changed 8 times"):
        client.publish(advert())


def test_without_its_library_the_remedy_is_named(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(UsageError, match="etcd needs httpx2") as caught:
        client_of(server.address())
    assert "pdstage[etcd]" in caught.value.remedy


def test_requests_are_in_no_log(make, caplog):
    """A node follows its directory with one a second, in an engine that logs all of INFO."""
    with caplog.at_level(logging.DEBUG):
        make().publish(advert())
    assert not [one for one in caplog.records if "http" in one.name and one.levelno >= logging.INFO]


def test_a_strangers_key_is_left_out(make, server, caplog):
    client = make()
    client.publish(advert())
    for key, value in (("p0/1.1.1.1/0x", "{}"), ("p0/1.1.1.1/1", "no JSON"), ("else", "")):
        server.ask("kv/put", {"key": encoded(f"{client._prefix}{key}"), "value": encoded(value)})
    assert make().lookup() == [advert()]
    assert "is left out" in caplog.text


def at(endpoint, rank=0, tp=2, **fields):
    return msgspec.structs.replace(advert(rank, tp=tp, **fields), endpoint=endpoint)


def lose(server, client, one=None):
    """Ends the lease of a rank, or of all of the client's prefix, as if its process had been killed."""
    for kv in server.ask("kv/range", etcd._range(client._prefix)).get("kvs", ()):
        key = base64.b64decode(kv["key"]).decode().removeprefix(client._prefix)
        if not key.startswith("!") and (one is None or key == etcd._rank_key(one)):
            server.ask("lease/revoke", {"ID": kv["lease"]})


def test_a_host_that_ended_is_fenced_once_and_every_node_hears_it(make, server):
    node, operator, readers = make(), make(), [make(), make()]
    there = [at(f"tcp://10.0.0.1:{rank + 1}", rank, incarnation=rank + 1) for rank in range(2)]
    elsewhere = at("tcp://10.0.0.11:1", tp=1, incarnation=7, instance="p1")
    for one in (*there, elsewhere):
        node.publish(one)
    assert all(found(reader, instance="p0") == there for reader in readers)
    with pytest.raises(Conflict, match=r"2 of 2 processes at 10\.0\.0\.1 are registered, first p0 rank 0 tcp://10"):
        operator.fence("10.0.0.1")
    lose(server, node, there[0])
    with pytest.raises(Conflict, match="1 of 2 processes at 10"):
        operator.fence("10.0.0.1")
    assert list(operator.fence(there[0].endpoint)) == [1], "one endpoint alone"
    lose(server, node)
    assert list(operator.fence("10.0.0.1")) == [2]
    assert operator.fence("10.0.0.1") == {}, "once"
    for reader in readers:
        until(lambda reader=reader: reader.has_ended(1) and reader.has_ended(2), "the watch tells")
        assert not reader.has_ended(7)
    node.publish(once := at("tcp://10.0.0.2:1", incarnation=5))
    lose(server, node, once)
    n_keys = int(server.ask("kv/range", etcd._range(node._prefix))["count"])
    until(lambda: readers[0]._copy.n_keys == n_keys, "the reader knows that")
    readers[0]._copy.revision += 10**6  # of etcd before it was restored from a snapshot
    assert list(operator.fence("10.0.0.2")) == [5]
    until(lambda: readers[0].has_ended(5), "what is older is read anew")
    late = make()
    with pytest.raises(Incomplete):
        late.lookup(instance="p0")
    assert late.has_ended(1), "read, where the watch begins later"
    with pytest.raises(Conflict, match="was fenced"):
        node.publish(there[0])
    fresh = at("tcp://10.0.0.1:1", incarnation=3)
    node.publish(fresh)  # the host is back
    assert not readers[0].has_ended(3)
    node.withdraw(fresh)
    node.publish(fresh := at("tcp://10.0.0.1:1", incarnation=4))
    lose(server, node)
    node.withdraw(fresh)
    assert operator.fence("10.0.0.1") == {}, "what was withdrawn is not fenced, nor what withdrew without its lease"


def test_a_process_that_comes_back_before_it_is_fenced_stays(make, server, monkeypatch):
    """Its host was not ended: it was cut off, and its lease lost."""
    node, operator = make(), make()
    one = at("tcp://10.0.0.3:5", tp=1, incarnation=6)
    node.publish(one)
    lose(server, node)
    ask = operator._cluster.ask

    def meanwhile(method, body):
        if method == "kv/txn":
            node.publish(one)
        return ask(method, body)

    monkeypatch.setattr(operator._cluster, "ask", meanwhile)
    with pytest.raises(Conflict, match="has changed meanwhile"):
        operator.fence("10.0.0.3")
    assert found(make()) == [one]


def test_a_process_that_comes_to_the_address_while_fencing_waits_is_neither_fenced_nor_waited_for(
    make, monkeypatch, capsys
):
    """An address is used again: a pod's, by the next pod. The lease of who was there ends while the call waits."""
    node, newer, operator = make(), make(), make()
    node.publish(at("tcp://10.0.0.7:5", tp=1, incarnation=10), ttl_s=1.0)
    assert cli.main(["fence", node.given, "10.0.0.7", "--wait", "0.1"]) == 1
    assert "1 of 1 processes at 10.0.0.7 are registered" in capsys.readouterr().err
    with pytest.raises(UsageError, match="wait_s"):
        operator.fence("10.0.0.7", wait_s="long")
    read, n_reads = operator._read, []

    def and_the_next_comes():
        n_reads.append(1)
        if len(n_reads) == 2:
            newer.publish(at("tcp://10.0.0.7:5", tp=1, incarnation=11, instance="p1"))
        return read()

    monkeypatch.setattr(operator, "_read", and_the_next_comes)
    assert list(operator.fence("10.0.0.7", wait_s=WAIT_S)) == [10]
    with pytest.raises(Conflict, match="1 of 1 processes at 10"):
        make().fence("10.0.0.7")


def test_what_fencing_in_etcd_gives_back(server, monkeypatch):
    """I14: decode keeps what a lost writer may still write, until the operator says in etcd that its host has ended."""
    client = EtcdClient(server.address("fenced"))
    with ExitStack() as stack:
        site = Site(stack)
        site.address = server.address("fenced")
        with lost_peer(site, monkeypatch) as (decode, receiver):
            for _ in range(100):
                decode.turn()
            assert not receiver.released
            assert decode.unfenced()
            lose(server, client)
            command = ["-m", "pdstage", "fence", site.address, "127.0.0.1", "--wait", "60"]
            assert "fenced " in python(*command, check=True).stdout
            drive([decode], lambda: receiver.released)
            assert not decode.unfenced()
            assert decode.core.idle
        assert "nothing to fence" in python(*command, check=True).stdout
    client.close()


def test_a_node_that_is_listed_in_etcd_hears_of_a_process_that_it_found_elsewhere(server, monkeypatch):
    """I14: as nodes in vLLM do, whose look-ups are vLLM's."""
    client = EtcdClient(server.address("listed"))
    with ExitStack() as stack, lost_peer(Site(stack), monkeypatch) as (decode, receiver):
        decode.list_in(client.given, instance="d0")
        (lost,) = decode.sessions.lost
        client.publish(at("tcp://10.0.0.9:1", tp=1, incarnation=lost.id.writer), ttl_s=1.0)
        assert list(client.fence("p0", wait_s=WAIT_S)) == [lost.id.writer]
        drive([decode], lambda: receiver.released)
        assert operate.fence(client, "10.0.0.9") == ([], {}), "whoever comes there next is not meant"
    client.close()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_each_of_three_members_goes_in_turn_under_load(tmp_path, how):
    """Ranks go on renewing and coming, and a reader sees each within a bound; none is lost."""
    with Servers(tmp_path, 3) as servers:
        servers.ready()
        publisher, reader = (EtcdClient(servers.address(), timeout_s=1.0) for _ in range(2))
        over, failures = threading.Event(), []

        def renew():
            while not over.wait(0.05):
                try:
                    publisher.publish(advert(instance="steady"), ttl_s=WAIT_S)
                except PdstageError as error:
                    failures.append(error)

        publisher.publish(advert(instance="steady"), ttl_s=WAIT_S)
        assert found(reader, instance="steady")
        renewing = threading.Thread(target=renew)
        renewing.start()
        try:
            for number, member in enumerate(servers.members):
                assert member.process is not None
                pid = member.process.pid
                member.kill() if how == "killed" else stop(pid)
                name = f"came with {number} away"
                until(lambda name=name: published(publisher, advert(instance=name)), "published meanwhile")
                until(lambda name=name: bool(found(reader, instance=name)), "seen meanwhile")
                assert found(reader, instance="steady")
                member.start() if how == "killed" else os.kill(pid, signal.SIGCONT)
                servers.ready()
        finally:
            over.set()
            renewing.join()
        assert all(isinstance(error, TransportError | PeerError) for error in failures), failures
        assert sorted(json.loads(EtcdClient(servers.address()).instances())) == [
            "came with 0 away", "came with 1 away", "came with 2 away", "steady",
        ]  # fmt: skip
        for client in (publisher, reader):
            client.close()


def published(client, one):
    """Whether etcd took it now; an election may be under way."""
    try:
        client.publish(one, ttl_s=WAIT_S)
    except (TransportError, PeerError):
        return False
    return True


def test_while_etcd_is_away_the_copy_answers_and_nodes_count(tmp_path, monkeypatch):
    monkeypatch.setattr("pdstage.manager.lookup._TTL_S", 1.5)
    with Servers(tmp_path) as servers:
        address = servers.ready().address()
        reader = EtcdClient(address, timeout_s=1.0)
        with prefill_node(Rank(), address) as prefill, decode_node(Rank()) as decode:
            decode.receive(1, address).abort()
            until(lambda: decode.status().directory["lookups_answered"] == 1, "it is found")
            assert prefill.status().directory["lease_s"] > 0
            known = found(reader)
            for n_ended in (1, 2):
                servers.members[0].kill()
                with pytest.raises(TransportError, match="no member of etcd answers at etcd://127.0.0.1"):
                    reader.publish(advert())
                with pytest.raises(TransportError, match="no member"):
                    EtcdClient(address, timeout_s=1.0).lookup()
                until(lambda: prefill.status().directory["lease_s"] == 0, "its lease ended")
                assert prefill.status().directory["publications_failed"] > 0
                until(lambda n=n_ended: decode.status().directory["watches_restarted"] == n, "once for each end")
                age_s = decode.status().directory["watch_age_s"]
                until(lambda s=age_s: decode.status().directory["watch_age_s"] > s + 1, "it is away")
                assert found(reader) == known
                servers.members[0].start()
                servers.ready()
                until(lambda: decode.status().directory["watch_age_s"] < 1, "it answers again")
                until(lambda: prefill.status().directory["lease_s"] > 0, "it is registered again")
                until(lambda: found(reader) == known, "and found")
            decode.receive(2, address, instance="none", deadline_s=0.5)
            until(lambda: decode.status().directory["lookups_failed"] == 1, "nobody is there")
        reader.close()


def test_a_full_etcd_is_said_and_ranks_that_are_there_stay(tmp_path):
    with Servers(tmp_path, 1, "--quota-backend-bytes", str(1 << 20)) as servers:
        servers.ready()
        client = EtcdClient(servers.address())
        client.publish(advert())
        filler = encoded("x" * (256 << 10))
        with pytest.raises(AssertionError, match="exceeded"):
            for _ in range(40):
                servers.ask("kv/put", {"key": encoded("filler"), "value": filler})
        with pytest.raises(PeerError, match="space exceeded") as caught:
            client.publish(advert(1, tp=2, instance="late"))
        assert "defragment" in caught.value.remedy
        client.publish(advert())  # a renewal takes no room
        client.close()


def test_users_and_their_rights(tmp_path, monkeypatch):
    with Servers(tmp_path) as servers:
        servers.ready()
        with pytest.raises(UsageError, match="does not let user 'writer' in .*not enabled") as caught:
            EtcdClient(servers.address(user="writer")).publish(advert())
        early = caught.value
        assert "enable authentication" in early.remedy
        servers.ask("auth/user/add", {"name": "nobody", "password": "n"})
        let_in(servers, "writer", "w")
        monkeypatch.setenv(environment.ETCD_PASSWORD.name, "w")
        writer = EtcdClient(servers.address(user="writer"))
        writer.publish(advert())
        assert found(writer)
        writer._cluster._token = "expired.1"
        writer.publish(advert())
        reader = EtcdClient(servers.address(user="writer"))
        assert found(reader)
        reader._cluster._token = "expired.2"  # what it asks next is refused
        writer.publish(advert(incarnation=2), after=1)
        until(lambda: found(reader) == [advert(incarnation=2)], "it is seen")
        reader.close()
        with pytest.raises(UsageError, match="does not let user 'nobody' in") as caught:
            EtcdClient(servers.address(user="nobody")).publish(advert())
        assert environment.ETCD_PASSWORD.name in caught.value.remedy
        monkeypatch.setenv(environment.ETCD_PASSWORD.name, "n")
        with pytest.raises(PeerError, match="permission denied") as caught:
            EtcdClient(servers.address(user="nobody")).publish(advert())
        denied = caught.value
        assert "grant" in denied.remedy
        writer.close()


def test_certificates(tmp_path):
    ca, cert, key = (str(tmp_path / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=etcd", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert], capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl makes no certificate here")
    (tmp_path / "ca.pem").write_bytes((tmp_path / "cert.pem").read_bytes())
    options = ("--cert-file", cert, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", ca)
    with Servers(tmp_path, 1, *options) as servers:
        client = EtcdClient(servers.address(options=f"?ca={ca}&cert={cert}&key={key}"))
        until(lambda: published(client, advert()), "it has started")
        assert found(client)
        for address in (servers.address(), servers.address(options="?ca=system"), servers.address(options=f"?ca={ca}")):
            with pytest.raises(TransportError, match="no member of etcd answers"):
                EtcdClient(address).publish(advert())
        with pytest.raises(UsageError, match="certificates of etcd://.* cannot be read"):
            EtcdClient(servers.address(options="?ca=/nowhere"))
        client.close()


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("etcd://127.0.0.1:2379", "no prefix"),
        ("etcd://u:secret@127.0.0.1:2379/p", "holds a password"),
        ("etcd://127.0.0.1:2379/p?tls=1", "no option 'tls'"),
        ("etcd://127.0.0.1:2379/p?cert=a", "go together"),
        ("etcd://127.0.0.1/p", "no valid port"),
        ("etcd:///p", "no valid port"),
    ],
)
def test_bad_addresses_are_named(address, problem):
    with pytest.raises(UsageError, match=problem):
        client_of(address)


def test_an_address_and_its_parts():
    parsed = EtcdAddress.parse("etcd://me@a:1,[::1]:2/team/pd?ca=system")
    assert (parsed.prefix, parsed.user, parsed.ca) == ("team/pd/", "me", "system")
    assert [str(member) for member in parsed.members] == ["a:1", "[::1]:2"]
    assert str(parsed) == "etcd://a:1,[::1]:2/team/pd"


def test_something_else_there_is_said():
    with BootstrapServer() as other, pytest.raises(TransportError, match="is not etcd's gateway"):
        EtcdClient(f"etcd://{other.address}/p").publish(advert())

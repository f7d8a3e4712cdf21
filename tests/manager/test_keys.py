"""Nodes with keys: rooms between processes and over a wiretap, and strangers that are told why they get none."""

from __future__ import annotations

import os
import time

import pytest

from pdstage import Config, Keys, PdstageError, PeerError, State, Topology, UsageError
from pdstage.control.bootstrap import Advert, BootstrapClient
from tests.manager.engine import Rank, drive
from tests.processes import python
from tests.rows import usable

PATIENT = Config(retry_s=0.05, hello_s=60.0, drain_s=1.0)


def key_file(path):
    Keys.make(path)
    return path


@pytest.fixture
def keys(tmp_path):
    return key_file(tmp_path / "cluster.key")


def failed_room(pair, address: str = "") -> PdstageError:
    """The error with which a room fails, long before the Hello's deadline."""
    started_at = time.monotonic()
    receiver = pair.d.receive(404, address or pair.p.directory_address)
    receiver.bind([0], 4)
    drive(pair.nodes, lambda: receiver.released)
    assert receiver.state is State.FAILED
    assert time.monotonic() - started_at < PATIENT.hello_s
    return receiver.error


def test_a_decode_that_is_not_let_in(site, tmp_path):
    """Prefill's list lacks it: its rooms fail at once and in words, prefill names it, and others are served."""
    server, _ = Keys.make(tmp_path / "p"), Keys.make(tmp_path / "d")
    known = tmp_path / "known"
    known.write_text(f"{server.public.hex()}\n")
    known.chmod(0o644)
    decode = {"keys": Keys.load(tmp_path / "d", known), "config": PATIENT}
    pair = site.pair(prefill={"directory": None, "keys": tmp_path / "p"}, decode=decode)
    p, d = pair.nodes
    told = Advert(instance="p", topology=Topology(), endpoint=p.socket.endpoint, incarnation=1, layout="")
    BootstrapClient(site.address).publish(told)  # which knows no keys, so that the node itself must refuse
    d.directory._keys = None
    error = failed_room(pair, site.address)
    assert isinstance(error, PeerError)
    assert "refuses this node's key" in str(error)
    drive([p, d], lambda: p.stats()["peers_refused"] > 0)
    assert d.stats()["peers_refused"] == 1
    assert not p.core.sessions
    pair.d = site.decode(pair.dst, keys=tmp_path / "p")
    pair.move(1)


def test_the_directory_is_refused_first(site, tmp_path, keys):
    pair = site.pair(
        prefill={"directory": None, "keys": keys},
        decode={"keys": key_file(tmp_path / "other.key"), "config": PATIENT},
    )
    with pytest.raises(UsageError, match="is not let in here"):
        pair.receive(1)
    without_key = pair.p.directory_address.partition("@")[2]
    assert "does not prove that it holds the key" in str(failed_room(pair, without_key))


@pytest.mark.parametrize("transport", usable("local", "nixl"))
def test_nothing_listens_but_what_was_asked_for(keys, transport):
    """Sockets and directory on the given address, and UCX on the interface that holds it."""
    code = (
        "import sys; from tests.manager.engine import *; from tests.wiretap import listeners\n"
        "options = {'keys': sys.argv[1], 'transport': sys.argv[2]}\n"
        "p = prefill_node(Rank(), None, bind='tcp://127.0.0.2:0', **options)\n"
        "d = decode_node(Rank(), bind='tcp://127.0.0.3:0', **options)\n"
        "print(*sorted(host for host, port in listeners()))\n"
        "asked = [p.socket.endpoint, d.socket.endpoint, p.directory_address]\n"
        "assert {int(one.rpartition(':')[2]) for one in asked} <= {port for _, port in listeners()}\n"
        "p.close(0.1); d.close(0.1)\n"
        "print(*(host for host, port in listeners() if not host.startswith('127.0.0.1')))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "UCX_NET_DEVICES"} | {"UCX_TLS": "tcp,self"}
    done = python("-c", code, str(keys), transport, check=True, env=env)
    listening, left = done.stdout.splitlines()[-2:]
    by_ucx = {"127.0.0.1"} if transport == "nixl" else set()
    assert set(listening.split()) - by_ucx == {"127.0.0.2", "127.0.0.3"}
    assert listening.split().count("127.0.0.2") == 2, "the control socket and the embedded directory"
    assert listening.split().count("127.0.0.3") == 1
    assert not left.split()


def test_a_plain_directory_between_nodes_with_keys(site, tmp_path, keys):
    """An engine's own server may keep the directory: rooms are as safe, for what it says opens no door."""
    where = f"plain://{site.address}"
    pair = site.pair(keys=keys, prefill={"directory": where}, decode={"config": PATIENT})
    pair.move(1)
    for node in pair.nodes:
        node.close()
    own = key_file(tmp_path / "stranger")
    pair.p, pair.d = site.prefill(Rank(), directory=where, keys=own), site.decode(Rank(), keys=keys, config=PATIENT)
    assert Keys.load(own).public.hex() in pair.p.socket.endpoint
    assert "is not let in here" in str(failed_room(pair, where))

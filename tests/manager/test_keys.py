"""Nodes with keys: rooms between processes and over a wiretap, and strangers that are told why they get none."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import pytest

from pdstage import Config, DeadlineExceeded, Keys, PdstageError, PeerError, State, Topology, UsageError
from pdstage.control.address import Address
from pdstage.control.bootstrap import Advert, BootstrapClient, BootstrapServer
from pdstage.transport import available
from tests import descriptors
from tests.manager.engine import Rank, decode_node, drive, prefill_node
from tests.manager.test_processes import Remote
from tests.manager.workers import TOKENS
from tests.wiretap import Wiretap

MARKER = b"the quick brown fox jumps over the lazy dog"
PATIENT = Config(retry_s=0.05, hello_s=60.0, drain_s=1.0)


@pytest.fixture
def keys(tmp_path):
    Keys.make(tmp_path / "cluster.key")
    return tmp_path / "cluster.key"


def one_room(p, d, src: Rank, dst: Rank, room: int = 1) -> None:
    receiver = d.receive(room, p.bootstrap_address)
    pages = dst.allocate(12)
    receiver.bind(pages, 12)
    held = src.allocate(12)
    src.write(room, 12, held)
    sender = p.send(room)
    sender.chunk(held, 12)
    sender.finish(aux=MARKER)
    drive([p, d], lambda: receiver.released and sender.released)
    receiver.wait(0)
    assert receiver.aux == MARKER
    assert dst.holds(room, 12, pages)


def failed_room(p, d, address: str = "") -> PdstageError:
    """The error with which a room fails, long before the Hello's deadline."""
    started_at = time.monotonic()
    receiver = d.receive(404, address or p.bootstrap_address)
    receiver.bind([0], 4)
    drive([p, d], lambda: receiver.released)
    assert receiver.state is State.FAILED
    assert time.monotonic() - started_at < PATIENT.hello_s
    return receiver.error


@pytest.mark.parametrize("progress", ["inline", "thread"])
def test_a_room_between_two_nodes(keys, progress):
    src, dst = Rank(), Rank(page=8, hnd=True)
    with (
        prefill_node(src, None, keys=keys, progress=progress) as p,
        decode_node(dst, keys=keys, progress=progress) as d,
    ):
        public = Keys.load(keys).public.hex()
        assert p.bootstrap_address.startswith(public)
        assert public in p.socket.endpoint
        for room in range(3):
            one_room(p, d, src, dst, room)
        assert p.stats()["peers_refused"] == d.stats()["peers_refused"] == 0


@pytest.mark.parametrize("path", ["staged", "direct"])
def test_rooms_between_processes(keys, path):
    rooms, dst = 4, Rank(page=8, hnd=True, n_pages=128)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(BootstrapServer(keys=keys))
        d = stack.enter_context(decode_node(dst, keys=keys, path=path))
        with Remote(server.address, 2, "local", path, rooms, keys=str(keys)) as remote:
            receivers, into = [], []
            for room in range(rooms):
                into.append(dst.allocate(TOKENS))
                receivers.append(d.receive(room, server.address))
                receivers[-1].bind(into[-1], TOKENS)
            drive([d], lambda: all(receiver.released for receiver in receivers))
            for room, (receiver, pages) in enumerate(zip(receivers, into, strict=True)):
                assert receiver.wait(0) is State.SUCCESS
                assert dst.holds(room, TOKENS, pages)
            drive([d], lambda: all(pipe.poll() for pipe in remote.pipes))
            for pipe in remote.pipes:
                pipe.send("end")


def test_a_pair_for_each_node(tmp_path):
    pairs = [Keys.make(tmp_path / name) for name in ("p", "d")]
    allow = tmp_path / "allow"
    allow.write_text("".join(f"{one.public.hex()}\n" for one in pairs))
    allow.chmod(0o644)
    src, dst = Rank(), Rank()
    with (
        prefill_node(src, None, keys=Keys.load(tmp_path / "p", allow)) as p,
        decode_node(dst, keys=Keys.load(tmp_path / "d", allow)) as d,
    ):
        one_room(p, d, src, dst)


def test_a_decode_that_is_not_let_in(tmp_path):
    """Prefill's list lacks it: its rooms fail at once and in words, prefill names it, and others are served."""
    server = Keys.make(tmp_path / "p")
    Keys.make(tmp_path / "d")
    known = tmp_path / "known"
    known.write_text(f"{server.public.hex()}\n")
    known.chmod(0o644)
    src, dst = Rank(), Rank()
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(BootstrapServer())  # knows no keys, so that the node itself must refuse
        p = stack.enter_context(prefill_node(src, None, keys=tmp_path / "p"))
        d = stack.enter_context(decode_node(Rank(), keys=Keys.load(tmp_path / "d", known), config=PATIENT))
        told = Advert(instance="p", topology=Topology(), endpoint=p.socket.endpoint, incarnation=1, layout="")
        BootstrapClient(directory.address).publish(told)
        d.directory._keys = None
        error = failed_room(p, d, directory.address)
        assert isinstance(error, PeerError)
        assert "refuses this node's key" in str(error)
        drive([p, d], lambda: p.stats()["peers_refused"] > 0)
        assert d.stats()["peers_refused"] == 1
        assert not p.core.sessions
        good = stack.enter_context(decode_node(dst, keys=tmp_path / "p"))
        one_room(p, good, src, dst)


def test_the_directory_is_refused_first(tmp_path, keys):
    other = tmp_path / "other.key"
    Keys.make(other)
    with prefill_node(Rank(), None, keys=keys) as p:
        with decode_node(Rank(), keys=other, config=PATIENT) as d:
            with pytest.raises(UsageError, match="is not let in here"):
                d.receive(1, p.bootstrap_address)
            without_key = p.bootstrap_address.partition("@")[2]
            assert "does not prove that it holds the key" in str(failed_room(p, d, without_key))
        with decode_node(Rank(), config=Config(retry_s=0.05, hello_s=0.5, drain_s=1.0)) as plain:
            with pytest.raises(UsageError, match="is encrypted, and this node has no keys"):
                plain.receive(1, p.bootstrap_address)
            error = failed_room(p, plain, without_key)
            assert isinstance(error, PeerError | DeadlineExceeded)
            assert "pass keys= (--keys)" in str(error)


@pytest.mark.parametrize("keyed", [True, False])
def test_what_a_wiretap_sees_of_a_room(keys, keyed):
    options = {"keys": keys} if keyed else {}
    src, dst = Rank(), Rank()
    with contextlib.ExitStack() as stack:
        p = stack.enter_context(prefill_node(src, None, **options))
        tap = stack.enter_context(Wiretap(Address.parse(p.socket.endpoint, "tcp").port))
        d = stack.enter_context(decode_node(dst, **options))
        endpoint = p.socket.endpoint.rpartition(":")[0] + f":{tap.port}"
        told = Advert(
            instance="prefill", topology=Topology(), endpoint=endpoint, incarnation=p.incarnation, layout="",
            transports=("local",),
        )  # fmt: skip
        BootstrapClient(p.bootstrap_address, **options).publish(told)
        one_room(p, d, src, dst)
        assert len(tap.seen) > 1000
        assert (MARKER not in tap.seen) == keyed
        assert (b"kv_head" not in tap.seen) == keyed, "nor the layout"


def test_bad_keys_make_no_node(tmp_path):
    before = descriptors.kinds()
    (tmp_path / "k").write_text("rubbish")
    (tmp_path / "k").chmod(0o600)
    for make in (lambda: prefill_node(Rank(), None, keys=tmp_path / "k"), lambda: decode_node(Rank(), keys="absent")):
        with pytest.raises(UsageError, match="pdstage keys FILE"):
            make()
    assert not descriptors.left(before)


@pytest.mark.parametrize("transport", [name for name in ("local", "nixl") if not available().get(name, "unknown")])
def test_nothing_listens_but_what_was_asked_for(keys, transport):
    """Sockets and directory on the given address, and UCX on the interface that holds it."""
    code = (
        "import sys; from tests.manager.engine import *; from tests.wiretap import listeners\n"
        "options = {'keys': sys.argv[1], 'transport': sys.argv[2]}\n"
        "p = prefill_node(Rank(), None, bind='tcp://127.0.0.2:0', **options)\n"
        "d = decode_node(Rank(), bind='tcp://127.0.0.3:0', **options)\n"
        "print(*sorted(host for host, port in listeners()))\n"
        "asked = [p.socket.endpoint, d.socket.endpoint, p.bootstrap_address]\n"
        "assert {int(one.rpartition(':')[2]) for one in asked} <= {port for _, port in listeners()}\n"
        "p.close(0.1); d.close(0.1)\n"
        "print(*(host for host, port in listeners() if not host.startswith('127.0.0.1')))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "UCX_NET_DEVICES"} | {"UCX_TLS": "tcp,self"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(keys), transport], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    listening, left = done.stdout.splitlines()[-2:]
    by_ucx = {"127.0.0.1"} if transport == "nixl" else set()
    assert set(listening.split()) - by_ucx == {"127.0.0.2", "127.0.0.3"}
    assert listening.split().count("127.0.0.2") == 2, "the control socket and the embedded directory"
    assert listening.split().count("127.0.0.3") == 1
    assert not left.split()


def test_a_plain_directory_between_nodes_with_keys(tmp_path, keys):
    """An engine's own server may keep the directory: rooms are as safe, for what it says opens no door."""
    stranger = Keys.make(tmp_path / "stranger")
    src, dst = Rank(), Rank()
    with BootstrapServer() as directory:
        where = f"plain://{directory.address}"
        with prefill_node(src, where, keys=keys) as p, decode_node(dst, keys=keys, config=PATIENT) as d:
            one_room(p, d, src, dst)
        own = tmp_path / "stranger"
        with prefill_node(src, where, keys=own) as p, decode_node(dst, keys=keys, config=PATIENT) as d:
            assert stranger.public.hex() in p.socket.endpoint
            assert "is not let in here" in str(failed_room(p, d, where))

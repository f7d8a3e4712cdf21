"""At the limit of open files: told as what it is, nothing ends for good, and libzmq is never asked for what it has not.

Each in a process of its own, with a limit of its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import socket
import time
from itertools import product

import pytest

from pdstage import Keys, State, TransportError
from pdstage.control.address import Address
from pdstage.control.bootstrap import BootstrapClient, BootstrapServer, Incomplete
from pdstage.manager import lookup
from tests.manager.engine import Rank, decode_node, drive, fails, prefill_node
from tests.rows import rows


@pytest.fixture
def key(tmp_path):
    """The path of a key file."""
    Keys.make(tmp_path / "key")
    return str(tmp_path / "key")


@contextlib.contextmanager
def only(n_left):
    """All descriptors but `n_left` are taken meanwhile."""
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.eventfd(0))
    for _ in range(n_left):
        os.close(held.pop())
    try:
        yield
    finally:
        for fd in held:
            os.close(fd)


def run(work, *given):
    process = multiprocessing.get_context("spawn").Process(target=_limited, args=(work, *given))
    process.start()
    process.join()
    assert process.exitcode == 0, "see its traceback"


def _limited(work, *given):
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    work(*given)


def ask_with_few_left(key):
    for n_left, keys in ((0, None), *product((0, 1, 2, 5, 10), (Keys.load(key),))):
        with BootstrapServer(keys=keys) as server:
            client = BootstrapClient(server.address, keys=keys)
            assert client.instances()
            with only(n_left), pytest.raises(TransportError, match="descriptors are left|Too many open files"):
                client.instances()
            assert client.instances()


def test_a_look_up_with_few_descriptors_left(key):
    """With two left libzmq aborted the process."""
    run(ask_with_few_left, key)


def test_a_directory_goes_on_after_an_error(key, monkeypatch, caplog):
    """Its thread ended, and with it every look-up of the cluster."""
    keys, failures = Keys.load(key), iter([OSError("too many open files")])
    with BootstrapServer(keys=keys) as server:
        plain = server._server._serve

        def serve(wait_s):
            if (error := next(failures, None)) is not None:
                raise error
            plain(wait_s)

        monkeypatch.setattr(server._server, "_serve", serve)
        assert BootstrapClient(server.address, keys=keys).instances()
        assert BootstrapClient(server.address, keys=keys).instances()
    assert next(failures, None) is None
    assert "too many open files" in caplog.text


def _is_listed(client):
    with contextlib.suppress(Incomplete):
        return len(client.lookup()) == 1
    return False


def lease_at_the_limit(key):
    lookup._TTL_S = 1.5
    src, dst, keys = Rank(), Rank(), Keys.load(key)
    p = prefill_node(src, None, keys=keys, progress="thread")
    d = decode_node(dst, keys=keys)
    client = BootstrapClient(p.directory_address, keys=keys)
    with only(2):
        receiver = d.receive("early", p.directory_address, deadline_s=3.0)
        fails(d, receiver)
        assert "descriptors are left" in str(receiver.error) or "did not end" in str(receiver.error)
    receiver = d.receive("late", p.directory_address)
    drive([d], lambda: receiver.state is State.WAITING_FOR_INPUT)
    drive([d], lambda: _is_listed(client))
    d.close()
    p.close()


def test_a_lease_outlives_a_lack_of_descriptors(key):
    """A keyed prefill node lost the thread that renews, and its advert for ever."""
    run(lease_at_the_limit, key)


def _turned(nodes, done):
    until = time.monotonic() + 0.5
    while not done() and time.monotonic() < until:
        for node in nodes:
            node.turn(0.005)


def _meets_a_peer(p, d, keys):
    receiver = d.receive("early", p.directory_address, deadline_s=0.4)
    _turned([p, d], lambda: receiver.state is State.FAILED)


def _is_connected_to(p, d, keys):
    port = Address.parse(p.socket.endpoint, "tcp").port
    for stranger in p.strangers:
        stranger.connect_ex(("127.0.0.1", port))
    _turned([p, d], lambda: False)


def _renews(p, d, keys):
    d.socket.renew(d.socket.connect(p.socket.endpoint))
    _turned([p, d], lambda: False)


def _closes(p, d, keys):
    d.close()
    p.close()


def go_on_after(doing, key):
    """Whatever is done with so few left, with keys or without: it ends in a typed error at most, and a node that is
    open serves on.
    """
    src, dst = Rank(), Rank()
    for keys, n_left in product((None, Keys.load(key)), (0, 1, 2, 3, 4, 6, 10)):
        p, d = prefill_node(src, None, keys=keys), decode_node(dst, keys=keys)
        p.strangers = [socket.socket() for _ in range(4)]
        for stranger in p.strangers:
            stranger.setblocking(False)
        with only(n_left):
            doing(p, d, keys)
        for stranger in p.strangers:
            stranger.close()
        if not p.closed:
            receiver = d.receive("late", p.directory_address)
            drive([p, d], lambda receiver=receiver: receiver.state is State.WAITING_FOR_INPUT)
            receiver.abort()
        d.close(0.1)
        p.close(0.1)


_DOINGS = [_meets_a_peer, _is_connected_to, _renews, _closes]


@pytest.mark.parametrize("doing", rows(_DOINGS, full={_meets_a_peer, _closes}))
def test_a_node_with_few_descriptors_left(doing, key):
    """Where the transport could not open a socket for its peer, the node ended."""
    run(go_on_after, doing, key)

"""What only the local transport promises: identity, permission, writing at the edge of mapped memory, order of tags."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import socket

import msgspec
import numpy as np
import pytest
from transport.conftest import as_root
from transport.endpoint import NBYTES, Endpoint, Log, Remote, altered, described, meet, sends

from pdstage import PeerError, Region, TransportError, native
from pdstage.transport import _peer
from pdstage.transport.local import _Description
from tests import descriptors

WRITERS = [pytest.param(_peer._write_peer, id="numpy")]
if native.ext is not None:
    WRITERS.append(pytest.param(native.ext.write_peer, id="c++"))


@pytest.fixture
def ends():
    """Connected, and as much of `b` prepared as it has."""
    a, b = Endpoint("local"), Remote("local")
    meet(a, b)
    yield a, b
    b.shut()
    a.close()


def forged(b, **changes):
    """What `b` says of itself, but of another process."""
    identity = msgspec.structs.replace(described(b, _Description).identity, **changes)
    return altered(b, _Description, identity=identity)


def fills_the_queue(a, b):
    return [sends(a, b, 8, b"%04d" % i + bytes(i % 5 * 9000)) for i in range(1500)]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"boot_id": "00000000"}, PeerError, "another host"),
        ({"namespaces": {"pid": "pid:[1]"}}, PeerError, "another pid namespace"),
        *(({"pid": pid}, PeerError, "not one") for pid in (0, -1, 1 << 31, (1 << 64) - 1)),
        ({"started": 1}, TransportError, "has ended"),
    ],
)
def test_a_process_that_is_not_in_reach_is_refused_in_words(ends, changes, error, said):
    """Row of local: another container or host. Row of local: peer restarted."""
    a, b = ends
    if "namespaces" in changes:
        changes = {"namespaces": a.transport.identity.namespaces | changes["namespaces"]}
    with pytest.raises(error, match=said):
        a.connect("it", forged(b, **changes))


def test_a_process_that_never_offered_its_memory_is_not_written(ends):
    """A peer may name any process of this host; it is believed only of one that holds the inbox it names."""
    a, b = ends
    with Remote("local") as c:
        told = described(c, _Description).identity
        meet(a, c, "c")
        for label in ("it", "c"):
            with pytest.raises(PeerError, match="does not hold the socket"):
                a.connect(label, forged(b, pid=told.pid, started=told.started))
        a.prepare("c", [c.region()])  # the old connection stands


@pytest.mark.parametrize(("name", "code"), [("os.pidfd_open", errno.EMFILE), ("_started", errno.ENOENT)])
def test_a_process_that_cannot_be_looked_at_is_not_proved_dead(ends, monkeypatch, name, code):
    """I2: it lives, and may write. No descriptor is free, or /proc hides it (hidepid)."""
    a, b = ends
    said = b.describe()

    def fails(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(f"{_peer.__name__}.{name}", fails)
    with pytest.raises(TransportError, match=f"'met' cannot be identified: {os.strerror(code)}"):
        a.identify("met", said)
    assert not a.proved_dead("met")
    b.kill()
    monkeypatch.undo()
    with pytest.raises(TransportError, match="has ended"):
        a.identify("met", said)
    assert a.proved_dead("met")


def test_peers_forgotten_hold_no_descriptors(ends):
    """I14: each session with one process that lives on is met under a name of its own."""
    a, b = ends
    before = descriptors.count("pidfd")
    for i in range(10):
        a.connect(str(i), b.describe())
        a.disconnect(str(i))
        a.identify(f"met {i}", b.describe())
    assert descriptors.count("pidfd") == before + 20
    for i in range(10):
        a.forget(str(i))
        a.forget(f"met {i}")
    assert descriptors.count("pidfd") == before
    a.forget("never met")


def test_tags_to_one_peer_keep_their_order_though_its_queue_was_full(ends):
    a, b = ends
    tickets = fills_the_queue(a, b)
    log = Log(a, b)
    while a.readable(0):
        a.poll()
    tags = [event.tag for event in b.poll()]
    assert a.readable(30), "room in the queue wakes the sender"
    log.until(lambda: len(tags) + len(log.tags(b)) == len(tickets))
    assert [int(tag[:4]) for tag in tags + log.tags(b)] == list(range(1500))
    assert tickets == sorted(tickets)


def test_tags_for_a_stopped_peer_wait_for_it_and_fail_if_it_dies(ends):
    """Row of local: peer stopped. Row of local: peer killed."""
    a, b = ends
    b.stop()
    tickets = fills_the_queue(a, b)
    log = Log(a)
    for _ in range(100):
        log.poll()
    assert 0 < len(log.done(a)) == len(log.ended(a)) < len(tickets)
    assert not a.proved_dead("b")
    b.kill()
    log.until_ended(a, len(tickets))
    assert sorted(event.ticket for event in log.ended(a)) == tickets
    assert len(log.done(a)) < len(tickets)


@as_root
def test_of_another_user_it_is_said_what_allows_it():
    """Row of local: writing forbidden later. Row of local: another user."""
    with Remote("local") as a, contextlib.closing(Endpoint("local")) as b:
        meet(a, b)
        a.become_user(65534)
        with pytest.raises(TransportError, match=r"EPERM.*ptrace_scope"):
            sends(a, b, 8)
        with pytest.raises(PeerError, match="does not hold the socket.*as one user"):
            a.connect("again", b.describe())
        assert b.poll() == []


@as_root
def test_tags_of_another_user_are_dropped():
    b = Endpoint("local")
    address = "\0" + b.transport._inbox.name
    child = os.fork()
    if not child:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(b"forged", address)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert b.poll() == []
    assert not b.readable(0), "it was read"
    b.close()


def test_memory_that_the_peer_unmapped_fails_the_post_and_nothing_else(ends):
    """Row of local: memory unmapped.

    The peer lies about its region: the kernel stops the write at the first page that is not there.
    """
    a, b = ends
    far = b.base + (1 << 42)
    a.connect("b", altered(b, _Description, regions=[(b.base, NBYTES), (far, 4096)]))
    a.prepare("b", [b.region(), Region(far, 4096)])
    with pytest.raises(TransportError, match="EFAULT"):
        a.post("b", [(0, far, 8)], b"nothing landed")
    ticket = a.post("b", [(0, b.base, 8), (0, far, 8)], b"a part landed")
    (failed,) = a.poll()
    assert failed.ticket == ticket
    assert "EFAULT" in str(failed.error)
    assert b.poll() == []


@pytest.mark.parametrize("write_peer", WRITERS)
@pytest.mark.parametrize("n_before", [0, 1, 1030])
def test_write_peer_stops_at_unmapped_memory_and_counts_what_landed(write_peer, n_before):
    pages = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(base + mmap.PAGESIZE), mmap.PAGESIZE, mmap.PROT_READ) == 0
    source = np.full(2 * mmap.PAGESIZE, 7, np.uint8)
    dst = np.array([*range(base, base + n_before), base + mmap.PAGESIZE - 100, base], np.int64)
    nbytes = np.array([*[1] * n_before, 200, 1], np.int64)
    src = np.full(len(dst), source.ctypes.data, np.int64)
    assert write_peer(os.getpid(), src, dst, nbytes) == (n_before + 100, errno.EFAULT)
    assert pages[mmap.PAGESIZE - 100 : mmap.PAGESIZE + 1] == b"\7" * 100 + b"\0"

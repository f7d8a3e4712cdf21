"""What only the local transport promises: identity, permission, writing at the edge of mapped memory, order of tags."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport.endpoint import Endpoint, Log, Remote

from pdstage import native
from pdstage.errors import PeerError, TransportError
from pdstage.transport import _peer
from pdstage.transport.base import read_description, write_description
from pdstage.transport.local import LocalTransport, _Description
from tests import descriptors

WRITERS = [pytest.param(_peer._write_peer, id="numpy")]
if native.ext is not None:
    WRITERS.append(pytest.param(native.ext.write_peer, id="c++"))
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture
def ends() -> object:
    a, b = Endpoint("local"), Remote("local")
    yield a, b
    b.shut()
    a.close()


def altered(description: bytes, **changes: object) -> bytes:
    told = read_description("b", description, _Description, LocalTransport.traits)
    identity = {name: value for name, value in changes.items() if name in _peer.Identity.__struct_fields__}
    told = msgspec.structs.replace(told, identity=msgspec.structs.replace(told.identity, **identity))
    return write_description(told)


def test_a_process_that_took_over_the_pid_is_not_written(ends):
    """Row of local: peer restarted."""
    a, b = ends
    told = read_description("b", b.describe(), _Description, LocalTransport.traits)
    with pytest.raises(TransportError, match="has ended"):
        a.connect("b", altered(b.describe(), started=told.identity.started - 1))


def test_another_host_and_another_container_are_refused_in_words(ends):
    """Row of local: another container or host."""
    a, b = ends
    with pytest.raises(PeerError, match="another host"):
        a.connect("b", altered(b.describe(), boot_id="00000000"))
    spaces = a.transport._identity.namespaces
    with pytest.raises(PeerError, match="another pid namespace"):
        a.connect("b", altered(b.describe(), namespaces=spaces | {"pid": "pid:[1]"}))


def test_a_process_that_never_offered_its_memory_is_not_written(ends):
    """A peer may name any process of this host; it is believed only of one that holds the inbox it names."""
    a, b = ends
    c = Remote("local")
    try:
        told = read_description("c", c.describe(), _Description, LocalTransport.traits)
        forged = altered(b.describe(), pid=told.identity.pid, started=told.identity.started)
        with pytest.raises(PeerError, match="does not hold the socket"):
            a.connect("b", forged)
        a.connect("c", c.describe())
        with pytest.raises(PeerError, match="does not hold the socket"):
            a.connect("c", forged)
        a.prepare("c", [c.region()])  # the old connection stands
    finally:
        c.shut()


@pytest.mark.parametrize("pid", [0, -1, 1 << 31, (1 << 64) - 1])
def test_a_process_number_that_is_none_is_refused(ends, pid):
    a, b = ends
    with pytest.raises(PeerError, match="not one"):
        a.connect("b", altered(b.describe(), pid=pid))


def test_a_description_that_is_no_text_is_refused(ends):
    a, b = ends
    body = b.describe()[4:].replace(b"pdstage.", b"pdstage\xff", 2)
    told = zlib.crc32(body).to_bytes(4, "little") + body
    with pytest.raises(PeerError, match="not one"):
        a.connect("b", told)


def test_death_is_proved_after_disconnect_and_not_before_it_happens(ends):
    a, b = ends
    a.connect("b", b.describe())
    a.disconnect("b")
    assert not a.proved_dead("b")
    b.kill()
    assert a.proved_dead("b")
    assert a.proved_dead("b")
    assert not a.proved_dead("never met")


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
    a.connect("b", b.describe())
    a.prepare("b", [b.region()])
    tags = [b"%04d" % i + bytes(i % 5 * 9000) for i in range(1500)]
    tickets = [a.post("b", [(0, b.base, 8)], tag) for tag in tags]
    log = Log(a)
    log.poll()
    assert len(log.done(a)) < len(tags), "the queue was not full: the test shows nothing"
    log = Log(a, b)
    log.until(lambda: len(log.tags(b)) == len(tags))
    assert log.tags(b) == tags
    assert tickets == sorted(tickets)


def test_room_in_a_full_queue_wakes_the_sender(ends):
    a, b = ends
    a.connect("b", b.describe())
    a.prepare("b", [b.region()])
    for i in range(1500):
        a.post("b", [(0, b.base, 8)], b"%04d" % i)
    log = Log(a, b)
    while a.readable(0):
        a.poll()
    b.poll()
    assert a.readable(30)
    log.until(lambda: log.tags(b)[-1:] == [b"1499"])


def test_tags_of_a_peer_that_died_with_a_full_queue_fail(ends):
    """Row of local: peer killed."""
    a, b = ends
    a.connect("b", b.describe())
    a.prepare("b", [b.region()])
    tickets = [a.post("b", [(0, b.base, 8)], b"%04d" % i) for i in range(1500)]
    log = Log(a)
    log.poll()
    b.kill()
    log.until(lambda: len(log.ended(a)) == len(tickets))
    assert sorted(event.ticket for event in log.ended(a)) == tickets
    assert 0 < len(log.done(a)) < len(tickets)


@as_root
def test_without_permission_the_error_names_the_remedy():
    """Row of local: writing forbidden later."""
    a, b = Remote("local"), Endpoint("local")
    try:
        a.connect("b", b.describe())
        a.prepare("b", [b.region()])
        a.become_user(65534)
        with pytest.raises(TransportError, match=r"EPERM.*ptrace_scope"):
            a.post("b", [(0, b.base, 8)], b"tag")
        assert b.poll() == []
    finally:
        a.shut()
        b.close()


@as_root
def test_a_peer_of_another_user_is_refused_when_it_connects():
    """Row of local: another user."""
    a, b = Remote("local"), Endpoint("local")
    try:
        a.become_user(65534)
        with pytest.raises(PeerError, match="does not hold the socket") as refused:
            a.connect("b", b.describe())
        assert "as one user" in refused.value.remedy
    finally:
        a.shut()
        b.close()


def test_tags_for_a_stopped_peer_wait_for_it(ends):
    """Row of local: peer stopped."""
    a, b = ends
    a.connect("b", b.describe())
    a.prepare("b", [b.region()])
    b.stop()
    tickets = [a.post("b", [(0, b.base, 8)], b"%04d" % i) for i in range(1500)]
    log = Log(a)
    for _ in range(100):
        log.poll()
    assert len(log.done(a)) < len(tickets)
    assert not a.proved_dead("b")
    b.resume()
    log = Log(a, b)
    log.until(lambda: b"1499" in log.tags(b))


@as_root
def test_tags_of_another_user_are_dropped_and_counted():
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
    assert b.transport._inbox.n_foreign == 1
    b.close()


def test_memory_that_the_peer_unmapped_fails_the_post_and_nothing_else(ends):
    """Row of local: memory unmapped.

    The peer lies about its region: the kernel stops the write at the first page that is not there.
    """
    a, b = ends
    told = read_description("b", b.describe(), _Description, LocalTransport.traits)
    far = b.base + (1 << 42)
    a.connect("b", write_description(msgspec.structs.replace(told, regions=[*told.regions, (far, 4096)])))
    a.prepare("b", [b.region(), type(b.region())(far, 4096)])
    with pytest.raises(TransportError, match="EFAULT"):
        a.post("b", [(0, far, 8)], b"nothing landed")
    ticket = a.post("b", [(0, b.base, 8), (0, far, 8)], b"a part landed")
    (failed,) = a.poll()
    assert failed.ticket == ticket
    assert "EFAULT" in str(failed.error)
    assert b.poll() == []


def test_memory_that_a_transport_of_this_process_unregistered_is_not_written():
    """Row of local: region unregistered and mapped; of another process it is in test_failures.py."""
    a, b = Endpoint("local"), Endpoint("local")
    a.connect("b", b.describe())
    a.prepare("b", [b.region()])
    b.unregister([b.region()])
    a.fill(0, b"stray")
    with pytest.raises(TransportError, match="unregistered"):
        a.post("b", [(0, b.base, 5)], b"")
    assert b.read(0, 5) == bytes(5)
    a.close()
    b.close()


@pytest.mark.parametrize("write_peer", WRITERS)
@given(data=st.data())
def test_write_peer_copies_in_order(write_peer, data):
    spans = data.draw(
        st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200), st.integers(0, 56)), min_size=1, max_size=40)
    )
    repeat = data.draw(st.sampled_from([1, 1, 40]))  # 40 times 40 is more than one call of the kernel takes
    src = np.arange(256, dtype=np.uint8)
    dst, want = np.zeros(256, np.uint8), np.zeros(256, np.uint8)
    rows = np.array(spans * repeat, np.int64)
    for s, d, n in rows:
        want[d : d + n] = src[s : s + n]
    columns = rows[:, 0] + src.ctypes.data, rows[:, 1] + dst.ctypes.data, rows[:, 2].copy()
    assert write_peer(os.getpid(), *columns) == (rows[:, 2].sum(), 0)
    assert dst.tobytes() == want.tobytes()


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


@pytest.mark.parametrize("write_peer", WRITERS)
def test_write_peer_to_no_process(write_peer):
    one = np.array([np.zeros(8).ctypes.data], np.int64)
    assert write_peer(1 << 22, one, one, np.array([8], np.int64)) == (0, errno.ESRCH)

"""Memory of a peer that is mapped here: its caller writes it, also where no process may write another."""

from __future__ import annotations

import ctypes
import errno
import resource

import numpy as np
import pytest
from transport.conftest import as_root
from transport.endpoint import NBYTES, Endpoint, Remote, altered, delivers, described, meet

from pdstage import PeerError, Region, UsageError
from pdstage.transport.local import _Description
from tests import descriptors


@pytest.fixture(scope="module")
def stock():
    with Remote("local+shared") as b:
        yield b


@pytest.fixture
def ends(stock):
    a = Endpoint("local")
    meet(a, stock.renew())
    yield a, stock
    a.close()


@pytest.mark.parametrize(("limit", "n_faults"), [(1 << 30, range(64)), (NBYTES // 2, range(NBYTES >> 16, NBYTES))])
def test_its_pages_are_mapped_at_once_up_to_a_limit(request, monkeypatch, limit, n_faults):
    """Else the first writes to them, in the midst of a room, wait for the kernel."""
    monkeypatch.setattr("pdstage.transport._peer._AT_ONCE_NBYTES", limit)
    a, b = request.getfixturevalue("ends")
    address = a.mapped("b", b.base, NBYTES).address
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    ctypes.memset(address, 1, NBYTES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before in n_faults


def test_only_what_was_prepared_is_mapped_and_only_while_connected(ends):
    a, b = ends
    a.prepare("b", [Region(b.base, 4096), Region(b.base + 8192, 64)])
    mapped = a.mapped
    assert mapped("b", b.base, 4096)
    assert mapped("b", b.base + 8192, 64)
    for address, nbytes in ((b.base, 4097), (b.base + 4096, 1), (b.base - 1, 2), (b.base + 8192, 65)):
        assert mapped("b", address, nbytes) is None
    assert mapped("c", b.base, 1) is None
    a.disconnect("b")
    assert mapped("b", b.base, 1) is None
    with pytest.raises(UsageError, match="not connected"):
        a.notify("b", b"tag")


def test_memory_that_is_not_shared_is_not_mapped(ends):
    a, b = ends
    region = b.register_more()
    meet(a, b, more=[region])
    assert a.write_mapped("b", region.base, b"no", b"") is None
    a.fill(0, b"post")
    a.post("b", [(0, region.base, 4)], b"")
    assert b.read_more(4) == b"post"


def test_a_copy_under_way_when_the_peer_is_let_go_harms_nobody(ends):
    """It is the caller's write, and in flight: the mapping stays until its value goes."""
    a, b = ends
    mapped = a.mapped("b", b.base, NBYTES)
    n_mapped = descriptors.count("memfd")
    a.disconnect("b")
    ctypes.memset(mapped.address, 1, NBYTES)
    b.renew()
    ctypes.memset(mapped.address, 2, NBYTES)
    assert not np.frombuffer(b.read(0, NBYTES), np.uint8).any()
    del mapped
    assert descriptors.count("memfd") < n_mapped


def test_a_peer_that_lies_about_its_memory_is_written_as_if_it_shared_none(ends, caplog):
    """Row of local: told of memory not there."""
    a, b = ends
    ((base, backing),) = described(b, _Description).shared
    for lie in (backing._replace(fd=0), backing._replace(inode=7), backing._replace(nbytes=1 << 40)):
        a.connect("b", altered(b, _Description, shared=[(base, lie)]))
        a.prepare("b", [b.region()])
        assert a.write_mapped("b", b.base, b"x", b"") is None
    delivers(a, b)


@pytest.mark.parametrize(("native", "code"), [("", errno.EPERM), ("no", errno.EPERM), ("", errno.ENOSYS)])
def test_shared_memory_is_written_where_no_process_may_write_another(stock, native, code):
    """Row of local: writing forbidden and all shared. Row of local: writing forbidden."""
    b = stock.renew()
    with Remote("local", {"PDSTAGE_NATIVE": native} if native else {}) as a:
        a.forbid_writing_to_processes(code)
        meet(a, b)
        delivers(a, b)
        assert a.write_mapped("b", b.base, b"x", b"") is not None
        region = b.register_more()
        with pytest.raises(PeerError, match=rf"neither shared nor writable.*{errno.errorcode[code]}.*path=.staged"):
            meet(a, b, more=[region])
        delivers(a, b)  # what was prepared before stands


@as_root
def test_two_processes_of_a_user_without_capabilities():
    with Remote("local") as a, Remote("local+shared") as b:
        for end in (b, a):
            end.become_user(65534)
        meet(a, b)
        assert a.write_mapped("b", b.base, b"x", b"") is not None
        delivers(a, b)

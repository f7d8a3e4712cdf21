"""What mori.py makes of posts and of MORI-IO's answers, over the double; the contract suite runs over it too."""

from __future__ import annotations

import gc
import sys
from unittest import mock

import msgspec
import pytest
from transport import mori_double
from transport.endpoint import NBYTES, Endpoint, Log, delivers, described, ended, meet, sends

from pdstage import PeerError, Region, TransportError, UsageError
from pdstage.transport import PostFailed, available, open_transport
from pdstage.transport.base import write_description


@pytest.fixture
def fabric(monkeypatch):
    fabric = mori_double.Fabric()
    monkeypatch.setattr(mori_double.IOEngine, "fabric", fabric)
    return fabric


@pytest.fixture
def ends(fabric):
    a, b = Endpoint("mori-double"), Endpoint("mori-double")
    meet(a, b)
    yield a, b
    a.close()
    b.close()
    gc.collect()
    assert not fabric.up


def test_a_post_is_one_batch_a_pair_of_memories(ends, fabric):
    a, b = ends
    theirs = b.register_more()
    ours = a.register_more()
    meet(a, b, more=[theirs])
    a.more[-1][:] = 7
    rows = [(i * 64, b.base + i * 64, 64) for i in range(100)]
    rows += [(ours.base - a.base + i * 64, theirs.base + i * 128, 64) for i in range(10)]
    fabric.held = True
    a.post("b", rows, b"")
    assert sorted(transfer.n_descriptors for transfer in fabric.transfers) == [10, 100]
    assert fabric.n_sessions == 2
    fabric.held = False
    log = Log(a)
    log.until(lambda: log.done(a))
    assert b.read_more(64) == bytes([7]) * 64
    a.post("b", rows, b"")
    assert fabric.n_batches == 4
    assert fabric.n_sessions == 2, "a pair's session is kept"
    log.until(lambda: len(log.done(a)) == 2)


def test_labels_of_one_engine_share_its_send_queue(ends, fabric):
    """As sessions of one node's two lives do, or of two. What waits for a label that goes never begins, and what waits
    for the others does. Row of mori: disconnected in flight.
    """
    a, b = ends
    for label in ("again", "third"):
        meet(a, b, label)
    fabric.held = True
    a.fill(0, b"\1" * NBYTES)
    rows = [(i * 128, b.base + i * 128, 64) for i in range(1000)]
    last = [(0, b.base + NBYTES - 64, 64)] * 1000
    labels = {"b": rows, "again": rows, "third": last}
    tickets = [a.post(label, labels[label], b"") for label in ("b", "again", "third", "b", "again", "third")]
    assert a.poll() == []
    assert fabric.most_in_flight == 2000 <= mori_double.SEND_QUEUE_DEPTH
    a.disconnect("third")
    gone = a.poll()
    assert [(one.ticket, type(one), one.settled) for one in gone] == [(tickets[i], PostFailed, True) for i in (2, 5)]
    fabric.held = False
    log = Log(a)
    log.until_ended(a, 4)
    assert sorted(log.done(a)) == [tickets[i] for i in (0, 1, 3, 4)]
    assert fabric.most_in_flight == 2000
    assert b.read(NBYTES - 64, 64) == bytes(64), "not a byte of the third has left"


def test_a_post_fails_when_all_its_batches_have_ended_and_is_not_settled(ends, fabric):
    """Row of mori: peer killed. It says what MORI-IO said of the batch that failed."""
    a, b = ends
    theirs = b.register_more()
    meet(a, b, more=[theirs])
    fabric.held = True
    ticket = a.post("b", [(0, b.base, 64), (0, theirs.base, 64)], b"")
    fabric.end(fabric.transfers[0], mori_double.StatusCode.ERR_RDMA_OP, "transport retry counter exceeded")
    assert a.poll() == [], "the other batch still reads our memory"
    fabric.held = False
    (failed,) = ended(a, ticket)
    assert (failed.ticket, failed.settled) == (ticket, False)
    assert "retry counter exceeded" in str(failed.error)
    a.disconnect("b")
    assert not a.transport._targets


def test_a_peer_that_is_gone_is_refused_at_the_first_write(ends):
    """Row of mori: peer gone."""
    a, b = ends
    b.close()
    with pytest.raises(TransportError, match=r"'b' cannot be reached.*refused"):
        sends(a, b, 64, b"")
    assert list(a.transport.users.values()) == [1], "the refused post holds nothing"


def test_memory_registered_anew_gets_a_session_of_its_own(ends, fabric):
    """Row of mori: offered no more. Until then nothing is prepared any more."""
    a, b = ends
    delivers(a, b, tag=b"")
    for end in (a, b):
        end.unregister([end.region()])
    a.register([a.region()])
    a.connect("b", b.describe())
    with pytest.raises(UsageError, match="prepared"):
        sends(a, b, 64, b"")
    b.register([b.region()])
    meet(a, b)
    delivers(a, b, b"anew", b"")
    assert fabric.n_sessions == 2
    b.unregister([b.region()])
    a.connect("b", b.describe())
    b.register([b.region()])
    meet(a, b)
    delivers(a, b, b"of the peer alone", b"")
    assert fabric.n_sessions == 3


@pytest.mark.parametrize("lie", ["memory of another", "another's engine", "no msgpack", "too little", "wrong size"])
def test_descriptions_that_contradict_themselves_are_refused(ends, lie):
    a, b = ends
    told, other = (described(end, mori_double.module._Description) for end in (b, a))
    changed = {
        "memory of another": {"memory": other.memory},
        "another's engine": {"engine": other.engine},
        "no msgpack": {"engine": b"\xc1"},
        "too little": {"memory": []},
        "wrong size": {"regions": [(b.base, NBYTES + 64)]},
    }[lie]
    with pytest.raises(PeerError, match="'liar'"):
        a.connect("liar", write_description(msgspec.structs.replace(told, **changed)))
        region = Region(*changed.get("regions", [(b.base, NBYTES)])[0])
        a.prepare("liar", [region])
        a.post("liar", [(0, b.base, 64)], b"")


def test_device_memory_is_registered_where_it_is(fabric):
    with open_transport("mori-double") as transport:
        transport.register([Region(1 << 40, 4096, "cuda", 3)])
        ((descriptor,),) = [engine.memory.values() for engine in fabric.up.values()]
        assert (descriptor.device_id, descriptor.loc.name) == (3, "GPU")


def test_what_it_says_when_it_is_opened(fabric, monkeypatch, caplog):
    """Row of mori: another backend. Row of mori: no device."""
    open_transport("mori-double").close()
    assert "never run on hardware by this project" in caplog.text
    refused = mock.Mock(side_effect=RuntimeError("no active RDMA device on this host"))
    monkeypatch.setattr(mori_double.IOEngine, "create_backend", refused)
    with pytest.raises(TransportError, match="no active RDMA device"):
        open_transport("mori-double")
    monkeypatch.setenv("MORI_DISABLE_AUTO_XGMI", "0")
    with pytest.raises(UsageError, match="XGMI"):
        open_transport("mori-double")


def test_the_double_does_not_pass_for_the_library():
    """Row of mori: library missing."""
    assert "mori" not in sys.modules or "mori_double" not in str(sys.modules["mori.io"])
    assert available()["mori"] == "" or 'pip install "pdstage[mori]"' in available()["mori"]

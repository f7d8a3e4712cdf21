"""What mori.py makes of posts and of MORI-IO's answers, over the double; the contract suite runs over it too."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transport import mori_double
from transport.endpoint import NBYTES, Endpoint, Log

from pdstage.errors import PeerError, TransportError, UsageError
from pdstage.layout import Region
from pdstage.transport import PostFailed, Spans, available, open_transport
from pdstage.transport._batches import batches
from pdstage.transport.base import Ranges, write_description


@pytest.fixture
def fabric(monkeypatch) -> mori_double.Fabric:
    fabric = mori_double.Fabric()
    monkeypatch.setattr(mori_double.IOEngine, "fabric", fabric)
    return fabric


@pytest.fixture
def ends(fabric) -> object:
    a, b = Endpoint("mori-double"), Endpoint("mori-double")
    a.connect("b", b.describe())
    a.prepare("b", [b.region()])
    yield a, b
    a.close()
    b.close()
    gc.collect()
    assert not fabric.up


def test_a_post_is_one_batch_a_pair_of_memories_in_runs(ends, fabric):
    a, b = ends
    theirs = b.register_more()
    ours = a.register_more()
    a.connect("b", b.describe())
    a.prepare("b", [b.region(), theirs])
    a.more[-1][:] = 7
    rows = [(i * 64, b.base + i * 64, 64) for i in range(100)]  # one run
    rows += [(ours.base - a.base + i * 64, theirs.base + i * 128, 64) for i in range(10)]  # no two of them join
    fabric.held = True
    a.post("b", rows, b"")
    assert sorted(transfer.n_descriptors for transfer in fabric.transfers) == [1, 10]
    assert fabric.n_sessions == 2
    fabric.held = False
    log = Log(a)
    log.until(lambda: log.done(a))
    assert b.read_more(64) == bytes([7]) * 64
    a.post("b", rows, b"")
    assert fabric.n_batches == 4
    assert fabric.n_sessions == 2, "a pair's session is kept"
    log.until(lambda: len(log.done(a)) == 2)


def test_no_more_descriptors_are_under_way_than_a_send_queue_takes(ends, fabric):
    a, b = ends
    fabric.held = True
    rows = [(i * 128, b.base + i * 128, 64) for i in range(1000)]
    tickets = [a.post("b", rows, b"") for _ in range(9)]
    assert a.poll() == []
    assert fabric.most_in_flight == 2000 <= mori_double.SEND_QUEUE_DEPTH
    fabric.held = False
    log = Log(a)
    log.until(lambda: len(log.ended(a)) == 9)
    assert log.done(a) == tickets
    assert fabric.most_in_flight == 2000


def test_labels_of_one_engine_share_its_send_queue(ends, fabric):
    """As sessions of one node's two lives do, or of two. The posts of one that goes leave those of the other alone."""
    a, b = ends
    for label in ("again", "third"):
        a.connect(label, b.describe())
        a.prepare(label, [b.region()])
    fabric.held = True
    rows = [(i * 128, b.base + i * 128, 64) for i in range(1000)]
    tickets = [a.post(label, rows, b"") for label in ("b", "again", "third", "b", "again")]
    assert a.poll() == []
    assert fabric.most_in_flight == 2000 <= mori_double.SEND_QUEUE_DEPTH
    a.disconnect("third")
    (gone,) = a.poll()
    assert (gone.ticket, type(gone), gone.settled) == (tickets[2], PostFailed, True)
    fabric.held = False
    log = Log(a)
    log.until(lambda: len(log.ended(a)) == 4)
    assert sorted(log.done(a)) == [tickets[i] for i in (0, 1, 3, 4)]
    assert fabric.most_in_flight == 2000


def test_posts_that_wait_when_their_peer_is_disconnected_never_begin(ends, fabric):
    """Row of mori: disconnected in flight."""
    a, b = ends
    fabric.held = True
    a.fill(0, b"\1" * NBYTES)
    rows = [(i * 128, b.base + i * 128, 64) for i in range(1000)]
    begun = [a.post("b", rows, b"") for _ in range(2)]
    waiting = [a.post("b", [(0, b.base + NBYTES - 64, 64)] * 1000, b"") for _ in range(2)]
    a.disconnect("b")
    (one, other) = a.poll()
    assert [one.ticket, other.ticket] == waiting
    assert one.settled and other.settled, "not a byte of them has left"
    fabric.held = False
    log = Log(a)
    log.until(lambda: len(log.ended(a)) == 2)
    assert log.done(a) == begun
    assert b.read(NBYTES - 64, 64) == bytes(64)


def test_a_failure_says_what_mori_said_and_is_not_settled(ends, fabric):
    """Row of mori: peer killed."""
    a, b = ends
    fabric.held = True
    ticket = a.post("b", [(0, b.base, 64)], b"")
    fabric.end(fabric.transfers[0], mori_double.StatusCode.ERR_RDMA_OP, "transport retry counter exceeded")
    (failed,) = a.poll()
    assert isinstance(failed, PostFailed)
    assert failed.ticket == ticket
    assert not failed.settled
    assert "retry counter exceeded" in str(failed.error)
    a.disconnect("b")
    assert not a.transport._targets


def test_one_failed_batch_of_two_fails_the_post_when_both_have_ended(ends, fabric):
    a, b = ends
    theirs = b.register_more()
    a.connect("b", b.describe())
    a.prepare("b", [b.region(), theirs])
    fabric.held = True
    a.post("b", [(0, b.base, 64), (0, theirs.base, 64)], b"")
    fabric.end(fabric.transfers[0], mori_double.StatusCode.ERR_RDMA_OP, "flushed")
    assert a.poll() == [], "the other batch still reads our memory"
    fabric.held = False
    log = Log(a)
    log.until(lambda: log.ended(a))
    assert [type(event) for event in log.ended(a)] == [PostFailed]


def test_a_peer_that_is_gone_is_refused_at_the_first_write(ends):
    """Row of mori: peer gone."""
    a, b = ends
    b.close()
    with pytest.raises(TransportError, match=r"'b' cannot be reached.*refused"):
        a.post("b", [(0, b.base, 64)], b"")
    assert [target.n_users for target in a.transport._targets.values()] == [1], "the refused post holds nothing"


def test_memory_registered_anew_gets_a_session_of_its_own(ends, fabric):
    a, b = ends
    log = Log(a)
    a.post("b", [(0, b.base, 64)], b"")
    log.until(lambda: log.done(a))
    for end in (a, b):
        end.unregister([end.region()])
        end.register([end.region()])
    a.connect("b", b.describe())
    a.fill(0, b"anew")
    a.post("b", [(0, b.base, 64)], b"")
    log.until(lambda: len(log.done(a)) == 2)
    assert fabric.n_sessions == 2
    assert b.read(0, 4) == b"anew"


def test_what_a_peer_offers_no_more_is_not_prepared_any_more(ends):
    """Row of mori: offered no more."""
    a, b = ends
    b.register_more()
    b.unregister([b.region()])
    a.connect("b", b.describe())
    with pytest.raises(UsageError, match="prepared"):
        a.post("b", [(0, b.base, 64)], b"")


@pytest.mark.parametrize("lie", ["memory of another", "another's engine", "no msgpack", "too little", "wrong size"])
def test_descriptions_that_contradict_themselves_are_refused(ends, lie):
    a, b = ends
    told = a.transport._read("b", b.describe())
    other = a.transport._read("a", a.describe())
    changed = {
        "memory of another": {"memory": other.memory},
        "another's engine": {"engine": other.engine},
        "no msgpack": {"engine": b"\xc1"},
        "too little": {"memory": []},
        "wrong size": {"regions": [(b.base, NBYTES + 64)]},
    }[lie]
    fields = {name: getattr(told, name) for name in told.__struct_fields__}
    with pytest.raises(PeerError, match="'liar'"):
        a.connect("liar", write_description(type(told)(**(fields | changed))))
        region = Region(*changed.get("regions", [(b.base, NBYTES)])[0])
        a.prepare("liar", [region])
        a.post("liar", [(0, b.base, 64)], b"")


def test_device_memory_is_registered_where_it_is(fabric):
    transport = open_transport("mori-double")
    transport.register([Region(1 << 40, 4096, "cuda", 3)])
    ((descriptor,),) = [engine.memory.values() for engine in fabric.up.values()]
    assert (descriptor.device_id, descriptor.loc.name) == (3, "GPU")
    transport.close()


@pytest.mark.parametrize(("options", "culprit"), [({"max_in_flight": 10}, "max_in_flight=10"), ({"wings": 2}, "wings")])
def test_options(fabric, options, culprit):
    with pytest.raises(UsageError, match=culprit):
        open_transport("mori-double", **options)


def test_the_backend_whose_end_cannot_be_polled_is_refused(fabric, monkeypatch):
    """Row of mori: another backend."""
    monkeypatch.setenv("MORI_DISABLE_AUTO_XGMI", "0")
    with pytest.raises(UsageError, match="XGMI"):
        open_transport("mori-double")


def test_without_a_device_it_says_so(fabric, monkeypatch):
    """Row of mori: no device."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no active RDMA device on this host")

    monkeypatch.setattr(mori_double.IOEngine, "create_backend", refuse)
    with pytest.raises(TransportError, match="no active RDMA device"):
        open_transport("mori-double")


def test_whoever_opens_it_is_told_that_it_was_never_run(fabric, caplog):
    open_transport("mori-double").close()
    assert "never run on hardware by this project" in caplog.text


def test_the_double_does_not_pass_for_the_library():
    """Row of mori: library missing."""
    assert "mori" not in sys.modules or "mori_double" not in str(sys.modules["mori.io"])
    assert available()["mori"] == "" or 'pip install "pdstage[mori]"' in available()["mori"]


@st.composite
def scattered(draw) -> tuple[Ranges, Ranges, Spans]:
    """Regions of 64 units, some of them neighbours, and spans that each lie in one of them on both sides."""
    sides = []
    for _ in range(2):
        bases = np.cumsum(draw(st.lists(st.sampled_from([64, 64, 100]), min_size=1, max_size=4))) + 1000
        sides.append(Ranges("these", [Region(int(base), 64) for base in bases]))
    rows = []
    for _ in range(draw(st.integers(1, 12))):
        nbytes = draw(st.integers(1, 8))
        src, dst = (draw(st.sampled_from(side.regions)).base + draw(st.integers(0, 56)) for side in sides)
        run = draw(st.integers(1, 4))
        rows += [
            (src + i * nbytes, dst + i * nbytes, nbytes)
            for i in range(run)
            if all(side.holds(at + i * nbytes, nbytes) for side, at in zip(sides, (src, dst), strict=True))
        ]
    columns = np.array(rows or [(sides[0].regions[0].base, sides[1].regions[0].base, 1)], np.int64).T
    return (*sides, Spans(*(column.copy() for column in columns)))


@given(scattered())
def test_batches_move_the_same_bytes_in_the_same_order_within_each_pair(case):
    local, remote, spans = case
    want: dict[tuple[Region, Region], list[tuple[int, int]]] = {}
    for src, dst, nbytes in zip(*map(np.ndarray.tolist, spans), strict=True):
        pair = (
            next(r for r in local.regions if r.base <= src < r.base + 64),
            next(r for r in remote.regions if r.base <= dst < r.base + 64),
        )
        want.setdefault(pair, []).extend((src + i, dst + i) for i in range(nbytes))
    made = list(batches(spans, local, remote))
    got = {
        (batch.local, batch.remote): [
            (batch.local.base + src + i, batch.remote.base + dst + i)
            for src, dst, nbytes in zip(*batch[2:], strict=True)
            for i in range(nbytes)
        ]
        for batch in made
    }
    assert len(got) == len(made), "one batch a pair"
    assert got == want
    for batch in made:
        joins = [
            (src + n, dst + n) == after
            for src, dst, n, after in zip(
                *batch[2:], list(zip(batch.local_offsets, batch.remote_offsets, strict=True))[1:], strict=False
            )
        ]
        assert not any(joins), "neighbours are joined"

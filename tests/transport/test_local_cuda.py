"""Device memory over `local`, on the double of CUDA: what CUDA IPC asks for, and what is said where it cannot be."""

from __future__ import annotations

import ctypes
import gc
import logging

import msgspec
import numpy as np
import pytest
from transport.endpoint import (
    NBYTES,
    Endpoint,
    Log,
    Remote,
    altered,
    arrives,
    delivers,
    described,
    ended,
    meet,
    sends,
    until_dead,
)

from pdstage import PeerError, Region, TransportError, UsageError
from pdstage.kernels import driver
from pdstage.kernels.virtual_memory import DESCRIPTOR, FABRIC
from pdstage.transport import Done, PostFailed, Spans, _cuda_ipc, _device
from pdstage.transport.local import LocalTransport, _Description
from tests import cuda_double, descriptors
from tests.cuda_double import MANAGED, POOL

pytestmark = pytest.mark.skipif(bool(cuda_double.missing()), reason=cuda_double.missing())
SIZES = [NBYTES // 4, NBYTES, NBYTES // 2, NBYTES // 4]


@pytest.fixture(scope="module")
def stock():
    """Processes with device memory of cuMemAlloc and of cuMemCreate, and with host memory beside a device."""
    kept = {kind: Remote(f"local+{kind}") for kind in ("cuda", "segments", "beside")}
    yield kept
    for one in kept.values():
        one.shut()


@pytest.fixture
def gpu():
    """This process's GPUs, as at its start."""
    with cuda_double.use() as gpu:
        gc.collect()  # what another file's tests left, in flight too
        gpu.reset()
        _device.reap()
        gpu["strict"], n_streams = 1, gpu["n_streams"]
        yield gpu
        gc.collect()
        broken, left = gpu.broken(), (gpu["n_open"], gpu["n_streams"])
        gpu.reset()
        assert not broken
        assert left == (0, n_streams), "a mapping was not closed, a stream not given back"


@pytest.fixture
def a(gpu):
    end = Endpoint("local+cuda")
    yield end
    end.close()


@pytest.fixture
def b(gpu, stock):
    return stock["cuda"].renew()


@pytest.fixture
def segments(gpu, stock):
    return stock["segments"].renew()


def of(end):
    """What it says of its one region."""
    (region,) = described(end, _Description).devices
    return region


def lying(b, **changes):
    """The description of `b`, of its one region some fields changed."""
    return altered(b, _Description, devices=[msgspec.structs.replace(of(b), **changes)])


def refuses(a, b, said, described=None, region=None):
    a.connect("b", described or b.describe())
    with pytest.raises(PeerError, match=said):
        a.prepare("b", [region or b.region()])


def region_of(memory):
    return Region(memory.address, memory.nbytes, "cuda", memory.device)


def one(src, dst, nbytes):
    return Spans(*(np.array([value], np.int64) for value in (src, dst, nbytes)))


def n_files():
    return descriptors.count("memfd:cuda-double")


def leaves_nothing(gpu):
    assert not gpu.new("n_handles")
    assert not gpu.new("n_reserved")


def thirds(b):
    return [(at, b.base + at, 4) for at in (0, 4, 8)]


def test_a_post_is_over_when_its_event_is_and_the_tag_leaves_then(a, b, gpu):
    meet(a, b)
    gpu["held"] = 1
    a.fill(0, b"device")
    ticket = a.post("b", [(0, b.base + 64, 6)], b"tag")
    assert not a.filenos(), "nothing announces the end of a copy: the transport must be asked"
    assert a.poll() == [] == b.poll()
    assert b.read(64, 6) == bytes(6)
    gpu["held"] = 0
    log = arrives(a, b, ticket)
    assert (log.ended(a), log.tags(b)) == ([Done(ticket)], [b"tag"])
    assert b.read(63, 8) == b"\0device\0"
    assert len(a.filenos()) == 1


def test_a_copy_in_flight_ends_after_disconnect_and_its_mapping_stays_so_long(a, b, gpu):
    meet(a, b)
    assert not a.traits_of("b").stops_reads
    gpu["held"] = 1
    a.fill(0, b"late")
    tickets = [sends(a, b, 4, tag) for tag in (b"told", b"")]
    a.disconnect("b")
    assert gpu["n_open"] == 1
    assert not a.traits_of("b").stops_reads
    assert a.poll() == []
    gpu["held"] = 0
    failed, done = ended(a, *tickets)
    assert (type(failed), failed.settled, failed.ticket) == (PostFailed, True, tickets[0])
    assert done == Done(tickets[1])
    assert b.read(0, 4) == b"late"
    assert not gpu["n_open"]
    a.forget("b")
    assert a.traits_of("b").stops_reads


def test_what_a_closed_transport_left_in_flight_is_given_back_when_it_has_ended(a, b, gpu):
    meet(a, b)
    gpu["held"] = 1
    sends(a, b, 4)
    a.close()
    assert gpu["n_open"] == 1, "closed while a copy writes it"
    gpu["held"] = 0
    for _ in range(3):
        other = Endpoint("local+cuda")
        meet(other, b)
        other.close()
        gc.collect()
    assert not gpu["n_open"]


def test_a_gather_may_go_straight_into_a_peers_memory(a, b, gpu):
    meet(a, b)
    mapped = a.mapped("b", b.base + 128, 64)
    assert mapped.kind == "cuda"
    ctypes.memset(mapped.address, 7, 64)  # as a kernel would
    arrives(a, b, a.notify("b", b"tag"))
    assert b.read(127, 66) == b"\0" + b"\7" * 64 + b"\0"
    a.disconnect("b")
    assert a.mapped("b", b.base, 1) is None
    assert gpu["n_open"] == 1, "it is being written"
    ctypes.memset(mapped.address, 8, 1)
    del mapped
    assert not gpu["n_open"]


@pytest.mark.parametrize("types", [None, DESCRIPTOR, FABRIC, DESCRIPTOR | FABRIC])
def test_regions_of_one_block_or_of_segments_are_mapped_in_order_and_copied_exactly(gpu, b, types):
    """Torch hands out parts of larger blocks: a handle is of the whole. Of expandable segments two regions share an
    allocation, and the copies cross from one allocation to the next.
    """
    memory = gpu.allocate(sum(SIZES)) if types is None else gpu.expandable(SIZES, types)
    half = NBYTES // 2
    parts = [Region(memory.address + 64, half, "cuda"), Region(memory.address + half + 64, NBYTES, "cuda")]
    with LocalTransport() as transport:
        transport.register(parts)
        handles = {type(one) for each in described(transport, _Description).devices for one in each.export.handles}
        assert handles == ({int if types & DESCRIPTOR else bytes} if types else set()), "what needs no fabric"
        b.connect("a", transport.describe())
        b.prepare("a", parts)
        source = np.random.default_rng(1).integers(1, 256, half, np.uint8)
        b.fill(0, source.tobytes())
        want = memory.view.copy()
        for dst in (NBYTES // 4 - 1000, NBYTES + NBYTES // 4 - 5000):  # across an end each, within a region
            b.post("a", [(0, memory.address + dst, 10_000)], b"tag")
            want[dst : dst + 10_000] = source[:10_000]
        log = Log(b, transport)
        log.until(lambda: log.tags(transport) == [b"tag"] * 2)
        np.testing.assert_array_equal(memory.view, want)
        b.disconnect("a")
    gpu.free(memory.address)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (None, "without handles for other processes.*PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"),
        (MANAGED, "cudaMallocManaged.*cudaMalloc"),
        (POOL, "cudaMallocAsync.*cudaMalloc"),
    ],
)
def test_memory_that_cannot_be_exported_is_read_and_not_written(gpu, b, how, said):
    memory = gpu.expandable([NBYTES], 0) if how is None else gpu.allocate(NBYTES, how=how)
    with LocalTransport() as transport:
        transport.register([region_of(memory)])
        refuses(b, transport, f"not mapped.*{said}", region=region_of(memory))
        meet(transport, b)
        memory.view[:4] = 1
        ended(transport, transport.post("b", one(memory.address, b.base, 4), b""))
        assert b.read(0, 5) == b"\1\1\1\1\0"


def test_what_is_exported_of_segments_is_given_back_whole(gpu):
    """No handle is left, and no descriptor after `close`."""
    before = n_files()
    memory = gpu.expandable(SIZES)
    held, region = n_files(), region_of(memory)
    with LocalTransport() as transport:
        transport.register([region])
        assert n_files() == held + len(SIZES)
        transport.unregister([region])
        assert n_files() == held + len(SIZES), "a number that is given again would be another allocation's"
    assert n_files() == held
    gpu.fail("cuMemExportToShareableHandle", 3)
    with pytest.raises(UsageError, match=r"allocation 3 of 4 .* failed with 304.*ulimit -n"):
        _cuda_ipc.here().export(memory.address, memory.nbytes)
    assert n_files() == held
    assert not gpu.new("n_handles")
    gpu.free(memory.address)
    assert n_files() == before


def test_what_is_mapped_of_segments_is_given_back_whole(gpu, segments):
    before = n_files()
    for _ in range(2):
        a = Endpoint("local+cuda")
        for name in ("b", "again", "b"):
            meet(a, segments, name)
        assert gpu["n_open"] == 1
        a.close()
        gc.collect()
        assert not gpu["n_open"]
    leaves_nothing(gpu)
    assert n_files() == before + 1, "of the last endpoint's own memory"


@pytest.mark.parametrize(
    ("name", "nth"),
    [
        ("cuMemAddressReserve", 1),
        ("cuMemImportFromShareableHandle", 3),
        ("cuMemMap", 2),
        ("cuMemSetAccess", 1),
        ("cuStreamCreateWithPriority", 1),
    ],
)
def test_segments_that_the_driver_refuses_midway_leave_nothing_behind(a, segments, gpu, name, nth):
    gpu.fail(name, nth)
    refuses(a, segments, f"not mapped: .*{name} failed with 304")
    leaves_nothing(gpu)
    gpu.fail(name, 0)
    a.prepare("b", [segments.region()])
    assert gpu["n_open"] == 1


def test_segments_that_say_nonsense_are_refused(a, segments, gpu, monkeypatch):
    told = of(segments).export
    for wrong, said in (
        ({"sizes": [*told.sizes, 4096]}, "outside its allocation"),
        ({"handles": []}, "outside its allocation"),
        ({"sizes": told.sizes[:1], "handles": told.handles[:1]}, "outside its allocation"),
        ({"sizes": [*told.sizes[:3], (1 << 48) - 1]}, "outside its allocation"),
        ({"sizes": [2 << 20] * 4}, "driver does not map it: cuMemMap failed with 1"),
        ({"handles": [0, *told.handles[1:]]}, "cuMemImportFromShareableHandle failed with 1"),
        ({"handles": [9999, *told.handles[1:]]}, r"taking over descriptor 9999 .*EBADF"),
    ):
        refuses(a, segments, said, lying(segments, export=told._replace(**wrong)))
    monkeypatch.setattr("pdstage.transport._peer._PIDFD_GETFD", 100_000)
    refuses(a, segments, r"taking over descriptor \d+ .*ENOSYS.*allow pidfd_getfd in the container's")
    leaves_nothing(gpu)


def test_over_two_allocations_and_under_mps_nothing_is_exported(gpu, tmp_path, monkeypatch):
    """The server of MPS goes on with what a killed client began. No device is touched that nothing lies on: a context
    takes hundreds of MiB, of a GPU that is another rank's at that.
    """
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    memory, export = gpu.allocate(NBYTES, device=1), _cuda_ipc.here().export
    with pytest.raises(UsageError, match="more than one allocation"):
        export(memory.address + 1, NBYTES)
    assert export(memory.address, NBYTES)
    assert gpu["contexts"] == 0b10
    (tmp_path / "control").touch()
    with pytest.raises(UsageError, match="MPS"):
        export(memory.address, NBYTES)


def test_under_mps_a_writers_death_proves_nothing_of_device_memory(a, tmp_path, monkeypatch):
    """I2: over NIXL, too, what a killed writer began may be a copy that the server goes on with."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    c = Remote("local")
    a.identify("c", c.describe())
    c.kill()
    until_dead(a, "c")
    (tmp_path / "control").touch()
    assert not a.proved_dead("c")


def test_a_handle_of_a_peer_that_has_ended_is_not_opened(a, gpu):
    c = Remote("local+cuda")
    a.connect("c", c.describe())
    region = c.region()
    c.kill()
    with pytest.raises(TransportError, match="ended|gone"):
        a.prepare("c", [region])
    assert not gpu["n_open"]


def test_a_peer_that_tells_of_another_allocation_is_refused_in_words(a, b):
    meet(a, b)
    export, longer = of(b).export, NBYTES + 4096
    freed = export.name[:8] + bytes([export.name[8] ^ 1]) + export.name[9:]
    said = "not mapped: the driver does not map it: cuIpcOpenMemHandle failed with 400"
    refuses(a, b, said, lying(b, export=export._replace(name=freed)))
    delivers(a, b, b"as before")
    beyond = Region(b.base, longer, "cuda")
    refuses(a, b, "outside its allocation", lying(b, nbytes=longer), beyond)
    a.disconnect("b")
    refuses(a, b, "the driver maps", lying(b, nbytes=longer, export=export._replace(sizes=[longer])), beyond)


@pytest.mark.parametrize(
    ("seen", "apart", "said"),
    [
        ((1, 0), True, "device 0 cannot access device 1"),  # its device 0 is another GPU than the peer's
        # With CUDA_VISIBLE_DEVICES of one a rank, no rank sees the other's: only the driver knows.
        ((1,), True, "cuIpcOpenMemHandle failed with 217"),
        ((1,), False, ""),
    ],
)
def test_without_peer_access_it_is_said_once_and_nothing_is_opened(b, gpu, caplog, seen, apart, said):
    gpu.see(*seen)
    gpu["apart"] = apart
    a = Endpoint("local+cuda")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            refuses(a, b, said) if said else meet(a, b)
    assert len(caplog.records) == bool(said)
    assert gpu["n_open"] == (not said)
    a.close()


def within(*memories):
    """Two transports of this process, of which the first may write the second's memory."""
    a, b = ends = [LocalTransport() for _ in memories]
    for end, memory in zip(ends, memories, strict=True):
        end.register([region_of(memory)])
    a.connect("b", b.describe())
    a.prepare("b", [region_of(memories[1])])
    return a, b


@pytest.mark.parametrize("segments", [False, True])
def test_within_a_process_kernels_of_one_gpu_are_let_into_the_others(gpu, segments):
    """Into segments one by one: what enables a peer's access holds for memory of cudaMalloc alone."""
    mine = gpu.allocate(NBYTES)
    theirs = gpu.expandable(SIZES, types=0, device=1) if segments else gpu.allocate(NBYTES, device=1)
    gpu["apart"] = 1
    with pytest.raises(PeerError, match="device 0 cannot access device 1"):
        within(mine, theirs)
    gpu["apart"] = 0
    a, b = within(mine, theirs)
    a.connect("again", b.describe())
    a.prepare("again", [region_of(theirs)])
    assert (gpu.has_peer(0, 1), gpu.has_peer(1, 0)) == (True, False)
    assert gpu.is_allowed(theirs.address, 0) == gpu.is_allowed(theirs.address, 1) == segments
    assert a.mapped("b", theirs.address + 8, 8).address == theirs.address + 8
    b.unregister([region_of(theirs)])
    assert a.mapped("b", theirs.address + 8, 8) is None
    with pytest.raises(TransportError, match="unregistered"):
        a.post("b", one(mine.address, theirs.address, 4), b"")
    a.close()
    b.close()
    gpu.free(theirs.address)


def test_host_and_device_memory_do_not_meet(a, b, stock):
    host = stock["beside"].renew()
    refuses(a, host, "device memory there")
    refuses(host, b, "device here")
    meet(a, b)
    array = np.zeros(64, np.uint8)
    a.register([Region(array.ctypes.data, 64)])
    with pytest.raises(UsageError, match="between host and device"):
        a.post_raw("b", one(array.ctypes.data, b.base, 8), b"")


@pytest.mark.parametrize("in_batch", [False, True])
def test_a_failed_device_ends_every_post_and_settles_none(a, b, gpu, in_batch):
    """Also a batch in whose midst it fails: some of that may have begun, so that it is no post that never began."""
    meet(a, b)
    gpu["held"] = 1
    tickets = [sends(a, b, 4) for _ in range(3)]
    if in_batch:
        gpu["batch_status"] = gpu["breaks_in_batch"] = 700
        tickets.append(a.post("b", thirds(b), b"tag"))
    gpu["broken"] = 700
    ended = a.poll()
    assert [event.ticket for event in ended] == tickets
    assert not any(event.settled for event in ended)
    assert {"failed with 700" in str(event.error) for event in ended} == {True}
    with pytest.raises(TransportError, match="failed with 700"):
        sends(a, b, 4)
    gpu["broken"] = gpu["held"] = 0
    gpu.drop_work()


def test_a_fault_in_the_middle_of_a_post_is_told_when_what_had_begun_is_over(a, b, gpu):
    meet(a, b)
    gpu["batch_status"] = 801
    log = Log(a, b)
    a.post("b", thirds(b), b"")  # the driver refuses a batch, and is not asked for one again
    log.until(lambda: log.done(a))
    gpu.fail("cuMemcpyAsync", 3, 1)
    a.fill(0, b"\1" * 12)
    ticket = a.post("b", thirds(b), b"tag")
    log.until_ended(a, 2)
    failed = log.ended(a)[1]
    assert (failed.ticket, failed.settled) == (ticket, True)
    assert b.read(0, 12) == b"\1" * 8 + bytes(4)
    assert log.tags(b) == []
    gpu.fail("cuMemcpyAsync", 1, 1)
    with pytest.raises(TransportError, match="cuMemcpyAsync failed with 1"):
        sends(a, b, 4)


@pytest.mark.parametrize("batches", ["taken", "refused", "unknown", "off"])
def test_many_copies_are_one_call_of_the_driver_or_go_one_by_one(b, gpu, batches, monkeypatch, caplog):
    if batches == "unknown":
        monkeypatch.setattr(driver.Cuda, "has_batches", False)
    if batches == "off":
        monkeypatch.setenv("PDSTAGE_COPY_BATCHES", "no")
    gpu["batch_status"] = 801 * (batches == "refused")
    a = Endpoint("local+cuda")
    meet(a, b)
    a.fill(0, bytes(range(13)))
    with caplog.at_level(logging.INFO):
        tickets = [a.post("b", spans, b"") for spans in (thirds(b), thirds(b), [(12, b.base + 12, 1)])]
    assert ended(a, *tickets) == [Done(ticket) for ticket in tickets]
    assert b.read(0, 13) == bytes(range(13))
    assert gpu.calls("cuMemcpyBatchAsync") == {"taken": 2, "refused": 1}.get(batches, 0), "one goes by itself"
    assert ("one by one" in caplog.text) == (batches == "refused")
    a.close()


def test_a_batch_has_at_most_512_copies_and_one_that_does_not_return_is_named(b, gpu, monkeypatch, caplog):
    monkeypatch.setattr(_cuda_ipc, "STUCK_S", 0.01)
    gpu["us:cuMemcpyBatchAsync"] = 50_000
    a = Endpoint("local+cuda")
    meet(a, b)
    a.fill(0, bytes(range(250)) * 5)
    with caplog.at_level(logging.ERROR):
        ticket = a.post("b", [(at, b.base + at, 1) for at in range(0, 1250, 2)], b"")
    assert ended(a, ticket) == [Done(ticket)]
    assert b.read(0, 1250) == bytes(n % 250 if n % 2 == 0 else 0 for n in range(1250))
    assert gpu.calls("cuMemcpyBatchAsync") == 2
    assert "PDSTAGE_COPY_BATCHES=no" in caplog.text
    a.close()

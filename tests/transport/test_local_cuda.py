"""Device memory over `local`, on the double of CUDA: what CUDA IPC asks for, and what is said where it cannot be."""

from __future__ import annotations

import ctypes
import gc
import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from transport.endpoint import NBYTES, Endpoint, Log, Remote
from transport.postbox import Postbox

from pdstage.errors import PeerError, TransportError, UsageError
from pdstage.kernels import driver
from pdstage.kernels.virtual_memory import DESCRIPTOR, FABRIC
from pdstage.layout import Region
from pdstage.transport import Done, PostFailed, Spans, _cuda_ipc, _peer
from pdstage.transport._auto import AutoTransport
from pdstage.transport.base import read_description, write_description
from pdstage.transport.local import LocalTransport, _Description
from tests import cuda_double, descriptors
from tests.cuda_double import MANAGED, POOL

DEVICE = "local+cuda"
pytestmark = pytest.mark.skipif(bool(cuda_double.missing()), reason=cuda_double.missing())


@pytest.fixture(scope="module")
def stock() -> object:
    b = Remote(DEVICE)
    yield b
    b.shut()


@pytest.fixture
def gpu() -> object:
    """This process's GPUs, as at its start."""
    with cuda_double.use() as gpu:
        gpu.reset()
        gpu["strict"], n_streams = 1, gpu["n_streams"]
        yield gpu
        gc.collect()
        broken, left = gpu.broken(), (gpu["n_open"], gpu["n_streams"])
        gpu.reset()
        assert not broken
        assert left == (0, n_streams), "a mapping was not closed, a stream not given back"


@pytest.fixture
def ends(gpu, stock) -> object:
    stock.renew()
    a = Endpoint(DEVICE)
    a.connect("b", stock.describe())
    a.prepare("b", [stock.region()])
    yield a, stock
    a.close()


def altered(b, **changes) -> bytes:
    """The description of `b`, one field of its one region changed."""
    told = read_description("b", b.describe(), _Description, LocalTransport.traits)
    (region,) = told.devices
    return write_description(msgspec.structs.replace(told, devices=[msgspec.structs.replace(region, **changes)]))


def block_of(b):
    (region,) = read_description("b", b.describe(), _Description, LocalTransport.traits).devices
    return region.block


def test_a_post_is_over_when_its_event_is_and_the_tag_leaves_then(ends, gpu):
    a, b = ends
    gpu["held"] = 1
    a.fill(0, b"device")
    ticket = a.post("b", [(0, b.base + 64, 6)], b"tag")
    assert not a.n_filenos(), "nothing announces the end of a copy: the transport must be asked"
    assert a.poll() == []
    assert b.poll() == []
    assert b.read(64, 6) == bytes(6)
    gpu["held"] = 0
    log = Log(a, b)
    log.until(lambda: log.ended(a) == [Done(ticket)] and log.tags(b) == [b"tag"])
    assert b.read(63, 8) == b"\0device\0"
    assert a.n_filenos() == 1


def test_a_copy_in_flight_ends_after_disconnect_and_its_mapping_stays_so_long(ends, gpu):
    a, b = ends
    assert not a.traits("b").stops_reads
    gpu["held"] = 1
    a.fill(0, b"late")
    tickets = [a.post("b", [(0, b.base, 4)], tag) for tag in (b"told", b"")]
    a.disconnect("b")
    assert gpu["n_open"] == 1
    assert not a.traits("b").stops_reads
    assert a.poll() == []
    gpu["held"] = 0
    log = Log(a)
    log.until(lambda: len(log.ended(a)) == 2)
    failed, done = log.ended(a)
    assert isinstance(failed, PostFailed)
    assert [failed.ticket, done.ticket] == tickets
    assert failed.settled
    assert isinstance(done, Done)
    assert b.read(0, 4) == b"late"
    assert not gpu["n_open"]
    a.transport.forget("b")
    assert a.traits("b").stops_reads


def test_what_a_closed_transport_left_in_flight_is_given_back_when_it_has_ended(ends, gpu):
    a, b = ends
    gpu["held"] = 1
    a.post("b", [(0, b.base, 4)], b"tag")
    a.close()
    assert gpu["n_open"] == 1, "closed while a copy writes it"
    gpu["held"] = 0
    for _ in range(3):
        other = Endpoint(DEVICE)
        other.transport._devices.copies(0)
        other.close()
    assert not gpu["n_open"]


def test_a_gather_may_go_straight_into_a_peers_memory(ends, gpu):
    a, b = ends
    mapped = a.transport.mapped("b", b.base + 128, 64)
    assert mapped.kind == "cuda"
    ctypes.memset(mapped.address, 7, 64)  # as a kernel would
    ticket = a.transport.notify("b", b"tag")
    log = Log(a, b)
    log.until(lambda: log.done(a) == [ticket] and log.tags(b) == [b"tag"])
    assert b.read(127, 66) == b"\0" + b"\7" * 64 + b"\0"
    for address, nbytes in ((b.base, NBYTES + 1), (b.base - 1, 2), (b.base + NBYTES, 1)):
        assert a.transport.mapped("b", address, nbytes) is None
    a.disconnect("b")
    assert a.transport.mapped("b", b.base, 1) is None
    assert gpu["n_open"] == 1, "it is being written"
    ctypes.memset(mapped.address, 8, 1)
    del mapped
    assert not gpu["n_open"]


def test_a_handle_is_opened_once_in_a_process(ends, gpu):
    """Older drivers refuse the second time; the double does."""
    a, b = ends
    other = Endpoint(DEVICE)
    other.connect("its b", b.describe())
    other.prepare("its b", [b.region()])
    a.connect("again", b.describe())
    a.prepare("again", [b.region()])
    a.prepare("b", [b.region()])
    assert gpu["n_open"] == 1
    a.close()
    assert gpu["n_open"] == 1
    other.fill(0, b"other")
    ticket = other.post("its b", [(0, b.base, 5)], b"")
    log = Log(other)
    log.until(lambda: log.done(other) == [ticket])
    assert b.read(0, 5) == b"other"
    other.close()


def test_regions_of_one_block_and_what_lies_beside_them(gpu, stock):
    """Torch hands out parts of larger blocks: a handle is of the whole."""
    stock.renew()
    memory = gpu.allocate(4 * NBYTES)
    a = LocalTransport()
    parts = [Region(memory.address + NBYTES * i, NBYTES, "cuda") for i in (1, 3)]
    a.register(parts)
    told = read_description("a", a.describe(), _Description, LocalTransport.traits).devices
    assert {one.block.base for one in told} == {memory.address}
    assert {one.block.handle for one in told} == {gpu.driver.ipc_handle(memory.address)}
    stock.connect("a", a.describe())
    stock.prepare("a", parts)
    stock.fill(0, b"part")
    stock.post("a", [(0, parts[1].base + 5, 4)], b"tag")
    log = Log(stock, a)
    log.until(lambda: log.tags(a))
    at = 3 * NBYTES + 5
    assert bytes(memory.view[at : at + 4]) == b"part"
    assert np.count_nonzero(memory.view) == 4
    stock.disconnect("a")
    gpu.free(memory.address)
    a.close()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (None, "without handles for other processes.*PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"),
        (MANAGED, "cudaMallocManaged.*cudaMalloc"),
        (POOL, "cudaMallocAsync.*cudaMalloc"),
    ],
)
def test_memory_that_cannot_be_exported_is_read_and_not_written(gpu, stock, how, said, caplog):
    stock.renew()
    memory = gpu.expandable([NBYTES], 0) if how is None else gpu.allocate(NBYTES, how=how)
    region = Region(memory.address, NBYTES, "cuda")
    a = LocalTransport()
    a.register([region])
    with pytest.raises(PeerError, match=f"not mapped.*{said}"):
        stock.connect("a", a.describe())
        stock.prepare("a", [region])
    a.connect("b", stock.describe())
    a.prepare("b", [stock.region()])
    memory.view[:4] = 1
    src, dst, nbytes = (np.array([at], np.int64) for at in (memory.address, stock.base, 4))
    a.post("b", Spans(src, dst, nbytes), b"")
    log = Log(a)
    log.until(lambda: log.ended(a))
    assert stock.read(0, 5) == b"\1\1\1\1\0"
    a.close()


SIZES = [NBYTES // 4, NBYTES, NBYTES // 2, NBYTES // 4]


def segments_of(transport):
    told = read_description("a", transport.describe(), _Description, LocalTransport.traits).devices
    return [one.segments for one in told]


def n_files():
    return descriptors.count("memfd:cuda-double")


@pytest.mark.parametrize("types", [DESCRIPTOR, FABRIC, DESCRIPTOR | FABRIC])
def test_a_pool_of_expandable_segments_is_mapped_in_their_order_and_copied_exactly(gpu, stock, types):
    """Two regions of it, that share an allocation; the copies cross from one allocation to the next."""
    stock.renew()
    memory = gpu.expandable(SIZES, types)
    at = NBYTES // 2
    parts = [Region(memory.address + 64, at, "cuda"), Region(memory.address + at + 64, NBYTES, "cuda")]
    a = LocalTransport()
    a.register(parts)
    told = segments_of(a)
    assert [one.sizes for one in told] == [SIZES[:2], SIZES[1:3]]
    assert all(bool(one.fabric) is (types == FABRIC) and bool(one.descriptors) is bool(types & 1) for one in told)
    stock.connect("a", a.describe())
    stock.prepare("a", parts)
    source = np.random.default_rng(1).integers(1, 256, NBYTES // 2, np.uint8)
    stock.fill(0, source.tobytes())
    want = memory.view.copy()
    for dst in (NBYTES // 4 - 1000, NBYTES + NBYTES // 4 - 5000):  # across an end each, within a region
        stock.post("a", [(0, memory.address + dst, 10_000)], b"tag")
        want[dst : dst + 10_000] = source[:10_000]
    log = Log(stock, a)
    log.until(lambda: log.tags(a) == [b"tag"] * 2)
    np.testing.assert_array_equal(memory.view, want)
    stock.disconnect("a")
    a.close()
    gpu.free(memory.address)


def test_what_is_mapped_of_segments_is_given_back_whole(gpu, stock):
    """In the process that maps them; in their owner's no handle is left, and no descriptor after `close`."""
    stock.renew()
    before = n_files()
    memory = gpu.expandable(SIZES)
    held = n_files()
    gpu.forget_calls()
    a = LocalTransport()
    a.register([Region(memory.address, memory.nbytes, "cuda")])
    assert n_files() == held + len(SIZES)
    a.unregister([Region(memory.address, memory.nbytes, "cuda")])
    assert n_files() == held + len(SIZES), "a number that is given again would be another allocation's"
    a.close()
    assert n_files() == held
    assert not gpu.new("n_handles")
    names = "RetainAllocationHandle", "ExportToShareableHandle", "Release"
    assert [gpu.calls(f"cuMem{name}") for name in names] == [4, 4, 4]
    gpu.free(memory.address)
    assert n_files() == before

    b = Remote("local+segments")
    try:
        before = n_files()
        gpu.forget_calls()
        for _ in range(2):
            a = Endpoint(DEVICE)
            for name in ("b", "again"):
                a.connect(name, b.describe())
                a.prepare(name, [b.region()])
                a.prepare(name, [b.region()])
            assert gpu["n_open"] == 1
            a.close()
            gc.collect()
            assert not gpu["n_open"]
        n = 4 * 2
        wanted = {
            "AddressReserve": 2,
            "ImportFromShareableHandle": n,
            "Map": n,
            "Release": n,
            "SetAccess": 2,
            "Unmap": n,
        }
        assert {name: gpu.calls(f"cuMem{name}") for name in wanted} == wanted
        assert not gpu.new("n_handles")
        assert not gpu.new("n_reserved")
        assert n_files() == before + 1, "of the last endpoint's own memory"
    finally:
        b.shut()


@pytest.mark.parametrize(
    "call",
    [("cuMemAddressReserve", 1), ("cuMemImportFromShareableHandle", 3), ("cuMemMap", 2), ("cuMemSetAccess", 1)],
)
def test_segments_that_the_driver_refuses_midway_leave_nothing_behind(gpu, stock, call):
    b = Remote("local+segments")
    a = Endpoint(DEVICE)
    try:
        gpu.fail(*call)
        a.connect("b", b.describe())
        with pytest.raises(PeerError, match=f"not mapped: the driver does not map it: {call[0]} failed with 304"):
            a.prepare("b", [b.region()])
        assert not gpu.new("n_handles")
        assert not gpu.new("n_reserved")
        gpu.fail(call[0], 0)
        a.prepare("b", [b.region()])
        assert gpu["n_open"] == 1
    finally:
        a.close()
        b.shut()


def test_an_export_that_stops_midway_is_refused_in_words_and_leaves_nothing_open(gpu):
    memory = gpu.expandable(SIZES)
    before = n_files()
    gpu.fail("cuMemExportToShareableHandle", 3)
    with pytest.raises(UsageError, match=r"allocation 3 of 4 .* failed with 304.*ulimit -n"):
        _cuda_ipc.here().export(memory.address, memory.nbytes)
    assert n_files() == before
    assert not gpu.new("n_handles")
    gpu.free(memory.address)


def test_segments_that_say_nonsense_are_refused_before_anything_is_mapped(gpu, stock):
    b = Remote("local+segments")
    a = Endpoint(DEVICE)
    try:
        (told,) = read_description("b", b.describe(), _Description, LocalTransport.traits).devices
        segments = told.segments
        for wrong in (
            {"sizes": [*segments.sizes, 4096]},
            {"descriptors": []},
            {"sizes": segments.sizes[:1], "descriptors": segments.descriptors[:1]},
            {"sizes": [*segments.sizes[:3], (1 << 48) - 1]},
        ):
            a.connect("b", altered(b, segments=segments._replace(**wrong)))
            with pytest.raises(PeerError, match="outside its allocation"):
                a.prepare("b", [b.region()])
        a.connect("b", altered(b, segments=segments._replace(sizes=[2 << 20] * 4)))
        with pytest.raises(PeerError, match="driver does not map it: cuMemMap failed with 1"):
            a.prepare("b", [b.region()])
        a.connect("b", altered(b, segments=segments._replace(descriptors=[0, *segments.descriptors[1:]])))
        with pytest.raises(PeerError, match="cuMemImportFromShareableHandle failed with 1"):
            a.prepare("b", [b.region()])
        a.connect("b", altered(b, segments=segments._replace(descriptors=[9999, *segments.descriptors[1:]])))
        with pytest.raises(PeerError, match=r"taking over descriptor 9999 .*EBADF"):
            a.prepare("b", [b.region()])
        assert not gpu.new("n_handles")
        assert not gpu.new("n_reserved")
    finally:
        a.close()
        b.shut()


def test_where_descriptors_of_others_may_not_be_taken_over_it_is_said_what_allows_it(stock, monkeypatch):
    b = Remote("local+segments")
    a = Endpoint(DEVICE)
    try:
        a.connect("b", b.describe())
        monkeypatch.setattr(_peer, "_PIDFD_GETFD", 100_000)
        with pytest.raises(
            PeerError, match=r"taking over descriptor \d+ .*ENOSYS.*allow pidfd_getfd in the container's"
        ):
            a.prepare("b", [b.region()])
    finally:
        a.close()
        b.shut()


def test_a_peer_without_segments_says_why_none_are_mapped(stock):
    """What an older one reads of the same description."""
    b = Remote("local+segments")
    a = Endpoint(DEVICE)
    try:
        a.connect("b", altered(b, segments=None))
        with pytest.raises(PeerError, match="not mapped: .*use the same release on both sides"):
            a.prepare("b", [b.region()])
    finally:
        a.close()
        b.shut()


def test_a_region_over_two_allocations_cannot_be_exported(gpu):
    memory = gpu.allocate(NBYTES)
    with pytest.raises(UsageError, match="more than one allocation"):
        _cuda_ipc.here().export(memory.address + 1, NBYTES)


def test_under_mps_nothing_is_exported(gpu, tmp_path, monkeypatch):
    """The server goes on with what a killed client began."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    memory = gpu.allocate(NBYTES)
    assert _cuda_ipc.here().export(memory.address, NBYTES)
    (tmp_path / "control").touch()
    with pytest.raises(UsageError, match="MPS"):
        _cuda_ipc.here().export(memory.address, NBYTES)


def test_a_handle_of_another_life_is_not_opened(ends, gpu):
    a, b = ends
    stale, region = b.describe(), b.region()
    b.renew()
    a.disconnect("b")
    with pytest.raises((PeerError, TransportError)):
        a.connect("b", stale)
        a.prepare("b", [region])
    c = Remote(DEVICE)
    a.connect("c", c.describe())
    region = c.region()
    c.kill()
    with pytest.raises(TransportError, match="ended|gone"):
        a.prepare("c", [region])
    assert not gpu["n_open"]


def test_an_allocation_that_was_freed_since_is_refused_in_words(ends, gpu):
    a, b = ends
    block = block_of(b)
    handle = block.handle[:8] + bytes([block.handle[8] ^ 1]) + block.handle[9:]
    a.connect("b", altered(b, block=block._replace(handle=handle)))
    with pytest.raises(PeerError, match="not mapped: the driver does not map it: cuIpcOpenMemHandle failed with 400"):
        a.prepare("b", [b.region()])
    a.fill(0, b"as before")
    a.post("b", [(0, b.base, 9)], b"")
    log = Log(a)
    log.until(lambda: log.done(a))
    assert b.read(0, 9) == b"as before"


def test_a_peer_that_tells_of_more_than_its_allocation_is_refused(ends):
    a, b = ends
    block = block_of(b)
    longer = {"nbytes": NBYTES + 4096}
    beyond = Region(b.base, NBYTES + 4096, "cuda")
    a.connect("b", altered(b, **longer))
    with pytest.raises(PeerError, match="outside its allocation"):
        a.prepare("b", [beyond])
    a.disconnect("b")
    a.connect("b", altered(b, **longer, block=block._replace(nbytes=block.nbytes + 4096)))
    with pytest.raises(PeerError, match="the driver maps"):
        a.prepare("b", [beyond])


def test_without_peer_access_it_is_said_once_and_nothing_is_opened(gpu, stock, caplog):
    stock.renew()
    gpu.see(1, 0)  # its device 0 is another GPU than the peer's
    gpu["apart"] = 1
    a = Endpoint(DEVICE)
    with caplog.at_level(logging.WARNING):
        for peer in ("b", "c"):
            a.connect(peer, stock.describe())
            with pytest.raises(PeerError, match="device 0 cannot access device 1"):
                a.prepare(peer, [stock.region()])
    assert len(caplog.records) == 1
    a.close()


@pytest.mark.parametrize("apart", [False, True])
def test_a_gpu_that_only_the_peer_sees_is_for_the_driver_to_judge(gpu, stock, apart):
    """With CUDA_VISIBLE_DEVICES of one a rank, no rank sees the other's: both are device 0."""
    stock.renew()
    gpu.see(1)
    gpu["apart"] = apart
    a = Endpoint(DEVICE)
    a.connect("b", stock.describe())
    if apart:
        with pytest.raises(PeerError, match="cuIpcOpenMemHandle failed with 217"):
            a.prepare("b", [stock.region()])
    else:
        a.prepare("b", [stock.region()])
        assert a.transport.mapped("b", stock.base, 1)
    a.close()


def test_no_device_is_touched_that_nothing_lies_on(gpu):
    """A context takes hundreds of MiB, of a GPU that is another rank's at that."""
    memory = gpu.allocate(NBYTES, device=1)
    _cuda_ipc.here().export(memory.address, NBYTES)
    assert gpu["contexts"] == 0b10


def test_within_a_process_kernels_of_one_gpu_are_let_into_the_others(gpu):
    a, b = LocalTransport(), LocalTransport()
    memory = [gpu.allocate(NBYTES, device=device) for device in (0, 1)]
    regions = [Region(one.address, NBYTES, "cuda", one.device) for one in memory]
    for one, region in zip((a, b), regions, strict=True):
        one.register([region])
    for label in ("b", "again"):
        a.connect(label, b.describe())
        a.prepare(label, [regions[1]])
    assert gpu.has_peer(0, 1)
    assert not gpu.has_peer(1, 0)
    assert a.mapped("b", regions[1].base + 8, 8).address == regions[1].base + 8
    b.unregister([regions[1]])
    assert a.mapped("b", regions[1].base + 8, 8) is None
    src, dst, nbytes = (np.array([at], np.int64) for at in (regions[0].base, regions[1].base, 4))
    with pytest.raises(TransportError, match="unregistered"):
        a.post("b", Spans(src, dst, nbytes), b"")
    a.close()
    b.close()


def test_within_a_process_segments_are_let_in_one_by_one(gpu):
    """What enables a peer's access holds for memory of cudaMalloc alone."""
    a, b = LocalTransport(), LocalTransport()
    mine, theirs = gpu.allocate(NBYTES), gpu.expandable(SIZES, types=0, device=1)
    regions = [Region(mine.address, NBYTES, "cuda"), Region(theirs.address, NBYTES, "cuda", 1)]
    for one, region in zip((a, b), regions, strict=True):
        one.register([region])
    a.connect("b", b.describe())
    a.prepare("b", [regions[1]])
    assert gpu.is_allowed(theirs.address, 0)
    assert gpu.is_allowed(theirs.address, 1)
    a.close()
    b.close()
    gpu.free(theirs.address)


def test_host_and_device_memory_do_not_meet(ends, gpu):
    a, b = ends
    host = Remote("local+beside")
    try:
        a.connect("host", host.describe())
        with pytest.raises(PeerError, match="device memory there"):
            a.prepare("host", [host.region()])
        host.connect("b", b.describe())
        with pytest.raises(PeerError, match="device here"):
            host.prepare("b", [b.region()])
        array = np.zeros(64, np.uint8)
        a.transport.register([Region(array.ctypes.data, 64)])
        src, dst, nbytes = (np.array([at], np.int64) for at in (array.ctypes.data, b.base, 8))
        with pytest.raises(UsageError, match="between host and device"):
            a.post_raw("b", Spans(src, dst, nbytes), b"")
    finally:
        host.shut()


class Fabric(Postbox):
    """Of lower preference, and moves device memory as well: what nixl is to `local`."""

    traits = replace(Postbox.traits, name="fabric", kinds=frozenset({"cpu", "cuda"}))


@pytest.mark.parametrize("apart", [False, True])
def test_auto_takes_another_transport_where_a_gpu_cannot_reach_the_other(gpu, apart, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTBOX_DIR", str(tmp_path))
    gpu["apart"] = apart
    a, b = (AutoTransport([LocalTransport(), Fabric()]) for _ in range(2))
    memory = [gpu.allocate(4096, device=device) for device in (0, 1)]
    regions = [Region(one.address, 4096, "cuda", one.device) for one in memory]
    a.register(regions[:1])
    b.register(regions[1:])
    a.connect("b", b.describe())
    a.prepare("b", regions[1:])
    assert a.traits_of("b").name == ("fabric" if apart else "local")
    memory[0].view[:8] = 5
    a.post("b", Spans(*(np.array([at], np.int64) for at in (regions[0].base, regions[1].base, 8))), b"tag")
    log = Log(a, b)
    log.until(lambda: log.done(a) and log.tags(b) == [b"tag"])
    assert memory[1].view[:9].tolist() == [5] * 8 + [0]
    a.close()
    b.close()


def test_a_device_that_makes_no_stream_is_refused_like_one_out_of_reach(gpu, stock):
    stock.renew()
    gpu.fail("cuStreamCreateWithPriority", 1, 2)
    a = Endpoint(DEVICE)
    a.connect("b", stock.describe())
    with pytest.raises(PeerError, match="not mapped: cuStreamCreateWithPriority failed with 2"):
        a.prepare("b", [stock.region()])
    a.close()


def test_a_failed_device_ends_every_post_and_settles_none(ends, gpu):
    a, b = ends
    gpu["held"] = 1
    tickets = [a.post("b", [(0, b.base, 4)], b"tag") for _ in range(3)]
    gpu["broken"] = 700
    ended = a.poll()
    assert [event.ticket for event in ended] == tickets
    assert not any(event.settled for event in ended)
    assert "cuEventQuery failed with 700" in str(ended[0].error)
    with pytest.raises(TransportError, match="failed with 700"):
        a.post("b", [(0, b.base, 4)], b"tag")
    gpu["broken"] = gpu["held"] = 0
    gpu.drop_work()


def test_a_fault_in_the_middle_of_a_post_is_told_when_what_had_begun_is_over(ends, gpu):
    a, b = ends
    a.transport._load_cuda()._batches = False
    gpu.fail("cuMemcpyAsync", 3, 1)
    a.fill(0, b"\1" * 12)
    ticket = a.post("b", [(0, b.base, 4), (4, b.base + 4, 4), (8, b.base + 8, 4)], b"tag")
    log = Log(a, b)
    log.until(lambda: log.ended(a))
    (failed,) = log.ended(a)
    assert (failed.ticket, failed.settled) == (ticket, True)
    assert b.read(0, 12) == b"\1" * 8 + bytes(4)
    assert log.tags(b) == []
    gpu.fail("cuMemcpyAsync", 1, 1)
    with pytest.raises(TransportError, match="cuMemcpyAsync failed with 1"):
        a.post("b", [(0, b.base, 4)], b"tag")


def thirds(b):
    return [(at, b.base + at, 4) for at in (0, 4, 8)]


def test_many_copies_are_one_call_of_the_driver(ends, gpu):
    a, b = ends
    a.fill(0, bytes(range(12)))
    tickets = [a.post("b", thirds(b), b"tag"), a.post("b", [(0, b.base + 12, 1)], b"")]
    log = Log(a, b)
    log.until(lambda: log.done(a) == tickets and log.tags(b) == [b"tag"])
    assert b.read(0, 13) == bytes([*range(12), 0])
    assert gpu.calls("cuMemcpyBatchAsync") == 1, "and one copy goes by itself"


@pytest.mark.parametrize("refuses", [False, True])
def test_copies_go_one_by_one_without_batches(gpu, stock, refuses, monkeypatch, caplog):
    stock.renew()
    gpu["batch_status"] = 801
    if not refuses:
        monkeypatch.setattr(driver.Cuda, "has_batches", False)
    a = Endpoint(DEVICE)
    a.connect("b", stock.describe())
    a.prepare("b", [stock.region()])
    a.fill(0, bytes(range(12)))
    with caplog.at_level(logging.INFO):
        tickets = [a.post("b", thirds(stock), b"") for _ in range(2)]
    log = Log(a)
    log.until(lambda: log.done(a) == tickets)
    assert stock.read(0, 12) == bytes(range(12))
    assert gpu.calls("cuMemcpyBatchAsync") == int(refuses), "it is asked once"
    assert ("one by one" in caplog.text) == refuses
    a.close()


def test_a_batch_on_a_device_that_fails_settles_nothing(ends, gpu):
    """Some of it may have begun, so that it is no post that never began."""
    a, b = ends
    gpu["held"], gpu["batch_status"], gpu["breaks_in_batch"] = 1, 700, 700
    ticket = a.post("b", thirds(b), b"tag")
    (failed,) = a.poll()
    assert (failed.ticket, failed.settled) == (ticket, False)
    assert "failed with 700" in str(failed.error)
    gpu["broken"] = gpu["held"] = 0
    gpu.drop_work()


def test_host_memory_keeps_its_traits_beside_a_gpu(gpu):
    a, b = Endpoint("local"), Endpoint("local")
    a.connect("b", b.describe())
    a.prepare("b", [b.region()])
    assert a.traits("b") == LocalTransport.traits
    assert a.transport.traits.kinds == {"cpu", "cuda"}
    a.close()
    b.close()


def test_without_cuda_device_memory_is_refused_as_ever():
    if Path("/dev/nvidiactl").exists():
        pytest.skip("a GPU is here")
    with pytest.raises(UsageError, match="kind"):
        LocalTransport().register([Region(1 << 40, 64, "cuda")])

"""What only CUDA IPC brings: gathers straight into another process's memory, handles that go stale, rooms of nodes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")
pytest.importorskip("zmq")
pytest.importorskip("cupy")

from gpu import ranks  # noqa: E402  (needs torch)
from gpu.endpoint import GpuEndpoint  # noqa: E402
from gpu.plain import Plain, block  # noqa: E402
from transport.endpoint import NBYTES, Log, Remote, meet, sends  # noqa: E402

from pdstage.errors import PeerError, TransportError  # noqa: E402
from pdstage.layout import Region  # noqa: E402
from pdstage.probe import _bytes_of  # noqa: E402

ITEMS = [3, 60, 8, 8, 0]
TARGETS = [pytest.param("gpu:0", id="same-gpu"), pytest.param("gpu:1", id="peer-gpu", marks=pytest.mark.multigpu)]


@pytest.fixture(params=TARGETS)
def ends(request):
    """`a` here on GPU 0, and a process with memory on the target."""
    if request.param == "gpu:1" and not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("device 0 cannot access device 1")
    a, b = GpuEndpoint("local+gpu:0"), Remote(f"local+{request.param}")
    meet(a, b)
    yield a, b
    a.close()
    b.shut()


@pytest.mark.gpu
def test_one_pass_into_a_peers_memory_equals_two(ends, variant):
    """Gathered where it belongs, its event seen, its tag sent; and gathered into staging, then posted."""
    a, b = ends
    plain, stream, log = Plain(variant, n_views=5, width=384), torch.cuda.Stream(), Log(a, b)
    out = plain.staging(len(ITEMS))
    nbytes = out.numel()
    mapped = a.transport.mapped("b", b.base + 4096, nbytes)
    assert mapped.kind == "cuda"
    busy = block(stream)
    lists = plain.list(ITEMS, on_device=False), plain.tokens(len(ITEMS))
    plain.plan.gather(mapped.address, nbytes, *lists, stream=stream)
    done = stream.record_event()
    assert not busy.query()
    assert b.read(4096, nbytes) == bytes(nbytes), "the kernel cannot have run yet"
    log.until(done.query)
    one = a.transport.notify("b", b"one pass")
    torch.cuda.synchronize()
    plain.gather(out, ITEMS, on_device=False)
    torch.cuda.synchronize()
    a.memory[:nbytes] = out
    a.finish_work()
    two = a.post("b", [(0, b.base + NBYTES // 2, nbytes)], b"two passes")
    log.until(lambda: log.done(a) == [one, two] and log.tags(b) == [b"one pass", b"two passes"])
    staged = plain.expected(ITEMS).cpu().numpy().tobytes()
    assert b.read(4096, nbytes) == staged
    assert b.read(NBYTES // 2, nbytes) == staged
    assert b.read(0, 4096) == bytes(4096)
    assert b.read(4096 + nbytes, 4096) == bytes(4096)


@pytest.mark.gpu
def test_a_copy_to_a_process_that_is_killed_harms_nobody(ends):
    """The memory stays until what was mapped is given up, and this process's context is whole."""
    a, b = ends
    mapped = a.transport.mapped("b", b.base, NBYTES)
    stream = torch.cuda.Stream(0)
    busy = block(stream)
    b.kill()
    with pytest.raises(TransportError, match="peer 'b'"):
        sends(a, b, 64)
    log = Log(a)
    log.until(busy.query)
    a.disconnect("b")
    log.until(lambda: a.proved_dead("b"))
    assert mapped.address
    del mapped
    a.fill(0, b"whole")
    assert a.read(0, 5) == b"whole"


def write_across_allocations(a, b):
    """Copies, and a kernel's writes, over ends of allocations of 2 MiB; then all of the peer's memory is compared."""
    meet(a, b)
    want, log = bytearray(NBYTES), Log(a)
    data = bytes(range(1, 201)) * 30
    a.fill(0, data)
    tickets = []
    for number, end in enumerate(range(2 << 20, NBYTES, 2 << 20)):
        at = end - 1000 * (1 + number)
        tickets.append(a.post("b", [(0, b.base + at, len(data))], b""))
        want[at : at + len(data)] = data
    log.until(lambda: log.done(a) == tickets)
    at = (4 << 20) - 50_000
    mapped = a.transport.mapped("b", b.base + at, 80_000)
    _bytes_of(Region(mapped.address, 80_000, "cuda", a.device.index or 0)).fill_(7)
    a.finish_work()
    want[at : at + 80_000] = b"\7" * 80_000
    assert b.read(0, NBYTES) == want


@pytest.mark.gpu
def test_memory_of_cumemcreate_is_mapped_allocation_by_allocation():
    a, b = GpuEndpoint("local+gpu:0"), Remote("local+gpu:0", sizes=(2 << 20,) * (NBYTES >> 21))
    try:
        write_across_allocations(a, b)
        mapped = a.transport.mapped("b", b.base, 1)
        a.disconnect("b")
        assert mapped.address
        del mapped
        write_across_allocations(a, b)
    finally:
        a.close()
        b.shut()


@pytest.mark.gpu
def test_memory_of_expandable_segments_is_mapped_or_refused_in_words():
    """Whether it may be mapped is for torch to say, which makes it."""
    a = GpuEndpoint("local+gpu:0")
    b = Remote("local+gpu:0", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    try:
        write_across_allocations(a, b)
    except PeerError as error:
        assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False" in str(error)
    finally:
        b.shut()
        a.close()


@pytest.mark.gpu
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("transport", "memory", "path"),
    [
        ("local", "cudaMalloc", "staged"),
        ("local", "cudaMalloc", "direct"),
        ("local", "cuMemCreate", "staged"),
        ("auto", "cudaMalloc", "staged"),
    ],
)
def test_rooms_between_two_processes(target, transport, memory, path, monkeypatch):
    """Prefill here, decode in another process, on one GPU and on two; `auto` goes by `local` between them."""
    monkeypatch.setenv("PDSTAGE_DEVICE_MEMORY", memory)
    stats = ranks.between_processes(target.replace("gpu", "cuda"), transport, path)
    assert stats["sessions_over_local"] == 1
    assert bool(stats["chunks_direct"]) == (path == "direct")

"""Calls take their place in the caller's stream: they wait for nothing else, allocate nothing and can be captured."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import threading

import pytest

torch = pytest.importorskip("torch")

from gpu.plain import ITEMS, Plain, block  # noqa: E402  (needs torch)

from pdstage.bench import variants  # noqa: E402
from pdstage.errors import UsageError  # noqa: E402

pytestmark = pytest.mark.gpu

PLACES = pytest.mark.parametrize("on_device", [True, False], ids=["list-on-device", "list-on-host"])


@pytest.fixture
def plain(variant):
    """A pool whose kernels were compiled, loaded and run once: what comes after is the hot path."""
    held = Plain(variant)
    out = held.staging(len(ITEMS))
    for on_device in (True, False):
        held.gather(out, ITEMS, on_device=on_device)
        held.scatter(out, ITEMS, on_device=on_device)
    torch.cuda.synchronize()
    return held


@pytest.fixture
def out(plain):
    return plain.staging(len(ITEMS))


@pytest.fixture
def side(plain):
    """A stream beside the default one."""
    return torch.cuda.Stream()


@PLACES
@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_a_call_comes_after_what_its_stream_holds(plain, side, out, on_device, way):
    into = plain.memory if way == "gather" else out
    fresh = torch.randint_like(into, 256)
    torch.cuda.synchronize()
    block(side)
    with torch.cuda.stream(side):
        into.copy_(fresh)
    getattr(plain, way)(out, ITEMS, on_device=on_device, stream=side)
    with torch.cuda.stream(side):
        cells = plain.expected(ITEMS)
    side.synchronize()
    assert torch.equal(cells, out) and torch.equal(into, fresh)


@PLACES
def test_other_streams_are_not_waited_for(plain, side, out, on_device):
    """The default stream sleeps; a call on another stream is done before it wakes."""
    expected, index = plain.expected(ITEMS), plain.list(ITEMS, on_device=on_device)
    torch.cuda.synchronize()
    busy = block(torch.cuda.default_stream())
    for call in (plain.plan.gather, plain.plan.scatter):
        call(*plain.at(out, index), stream=side)
    side.synchronize()
    assert not busy.query(), "the default stream was waited for"
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@PLACES
@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_a_call_does_not_wait_for_its_own_stream(plain, side, out, on_device, way):
    expected = plain.expected(ITEMS)
    out.copy_(expected)
    torch.cuda.synchronize()
    busy = block(side)
    for _ in range(3):
        getattr(plain, way)(out, ITEMS, on_device=on_device, stream=side)
    after = side.record_event()
    assert not busy.query(), "the call returned only once its stream was idle"
    assert not after.query()
    side.synchronize()
    assert torch.equal(out, expected)
    assert torch.equal(plain.expected(ITEMS), expected)


def test_lists_on_the_host_may_change_once_the_call_returned(plain, side):
    """Several calls wait behind a sleeping kernel, each with a list of its own, which is overwritten meanwhile."""
    lists = [torch.randperm(64)[: len(ITEMS)] for _ in range(4)]
    expected = [plain.expected(one.tolist()) for one in lists]
    outs = [plain.staging(len(ITEMS)) for _ in lists]
    torch.cuda.synchronize()
    block(side)
    for one, out in zip(lists, outs, strict=True):
        given = one.clone()
        plain.gather(out, given, on_device=False, stream=side)
        given.fill_(0)
    side.synchronize()
    for out, wanted in zip(outs, expected, strict=True):
        assert torch.equal(out, wanted)


def allocated():
    """What grows with an allocation by torch, by cupy or by the driver."""
    counts = [torch.cuda.memory_stats().get(f"allocation.{kind}.allocated", 0) for kind in ("all",)]
    counts.append(torch.cuda.mem_get_info()[0])
    if importlib.util.find_spec("cupy"):
        import cupy  # noqa: PLC0415

        counts += [cupy.get_default_memory_pool().total_bytes(), cupy.get_default_memory_pool().used_bytes()]
        counts.append(cupy.get_default_pinned_memory_pool().n_free_blocks())
    return counts


@PLACES
def test_nothing_is_allocated(plain, side, out, on_device):
    """With few calls under way at once: the ring of host lists grows to the most there ever were."""
    at = plain.at(out, plain.list(ITEMS, on_device=on_device))
    for _ in range(3):
        plain.plan.gather(*at, stream=side)
    torch.cuda.synchronize()
    before = allocated()
    for _ in range(100):
        plain.plan.gather(*at, stream=side)
        plain.plan.scatter(*at, stream=side)
        assert allocated() == before
        side.synchronize()
    assert allocated() == before


def test_a_graph_replays_with_new_pages_and_new_bytes(plain, out):
    index = plain.list(torch.tensor(ITEMS, device="cuda:0"), on_device=True)
    at = index["kv"].keep
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain.plan.gather(*plain.at(out, index), stream=torch.cuda.current_stream())
    for _ in range(3):
        items = torch.randperm(64)[: len(ITEMS)]
        at.copy_(items)
        plain.memory.random_(0, 256)
        out.fill_(0xA5)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, plain.expected(items.tolist()))


@pytest.mark.parametrize("n_items", [len(ITEMS), 9000], ids=["short", "long"])
def test_a_list_on_the_host_is_captured_in_a_kernels_parameters_or_refused(variant, n_items):
    """A graph keeps parameters. A list that was uploaded lies in a slot, which is used again while the graph lives."""
    plain, items = Plain(variant, n_items=n_items), torch.randperm(n_items).tolist()
    out = plain.staging(n_items)
    plain.gather(out, items, on_device=False)
    graph, is_kept = torch.cuda.CUDAGraph(), variant != variants.TRITON and n_items == len(ITEMS)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out.fill_(1)
        with contextlib.nullcontext() if is_kept else pytest.raises(UsageError, match="captured in a graph"):
            plain.gather(out, items, on_device=False, stream=torch.cuda.current_stream())
    plain.memory.random_(0, 256)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, plain.expected(items) if is_kept else torch.ones_like(out))


def test_threads_share_a_plan(plain):
    wrong = []

    def work(seed):
        side, rng = torch.cuda.Stream(), torch.Generator().manual_seed(seed)
        for _ in range(50):
            items = torch.randperm(64, generator=rng)[: len(ITEMS)].tolist()
            with torch.cuda.stream(side):
                out = plain.staging(len(ITEMS))
                plain.gather(out, items, on_device=False, stream=side)
                good = torch.equal(out, plain.expected(items))
            if not good:
                wrong.append((seed, items))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_a_plan_may_go_while_its_copies_wait(plain, side, out):
    """Its tables are in memory that others get as soon as it is free."""
    index, expected = plain.list(ITEMS, on_device=True), plain.expected(ITEMS)
    torch.cuda.synchronize()
    block(side)
    plain.plan.gather(*plain.at(out, index), stream=side)
    del plain.plan
    gc.collect()
    others = [torch.full((nbytes,), 0xFF, dtype=torch.uint8, device="cuda:0") for nbytes in (512, 1024, 4096) * 16]
    side.synchronize()
    assert torch.equal(out, expected)
    assert all(bool((other == 0xFF).all()) for other in others)


def test_a_plan_is_made_run_and_dropped_while_the_device_is_busy(plain, side, out):
    """The default stream sleeps, which a copy to the device or a free in it would wait for."""
    index, expected = plain.list(ITEMS, on_device=True), plain.expected(ITEMS)
    plain.pool.runtime(plain.plan.backend).reserve()
    torch.cuda.synchronize()
    free, busy = torch.cuda.mem_get_info()[0], block(torch.cuda.default_stream())
    for _ in range(8):
        other = plain.again()
        other.gather(*plain.at(out, index), stream=side)
        del other
    side.synchronize()
    assert not busy.query(), "the default stream was waited for"
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] == free
    assert torch.equal(out, expected)


def test_a_plan_that_is_new_may_be_captured_at_once(plain, out):
    """Its tables may still be on their way."""
    index, graph = plain.list(ITEMS, on_device=True), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        new = plain.again()
        new.gather(*plain.at(out, index), stream=torch.cuda.current_stream())
        del new
    others = [plain.again() for _ in range(64)]
    for other in others:
        other.gather(*plain.at(out, index))
    out.fill_(0xA5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, plain.expected(ITEMS))


@pytest.mark.parametrize("max_sms", [1, 2, 10_000])
def test_any_number_of_multiprocessors_gives_the_same(variant, max_sms):
    large = Plain(variant, n_views=16, n_items=2048, width=512)
    items = torch.randperm(2048)[:1500].tolist()
    out = large.staging(len(items))
    large.gather(out, items, max_sms=max_sms)
    assert torch.equal(out, large.expected(items))
    large.memory.zero_()
    large.scatter(out, items, max_sms=max_sms)
    assert torch.equal(large.expected(items), out)

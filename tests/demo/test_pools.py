"""A paged pool holds what was stored, in either memory order, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from pdstage.tools.demo.pools import HND, NHD, PagedPool, PagedShape, SlotPool, Table, pages_for  # noqa: E402


def make(order, page_size=4, n_pages=8, heads=2, seed=0):
    widths = {"k": 3, "v": 3}
    shape = PagedShape(
        order=order, n_pages=n_pages, page_size=page_size, layers=(1, 3), heads=heads, total_heads=heads, widths=widths
    )
    return PagedPool(shape, seed)


@pytest.mark.parametrize("order", [NHD, HND])
def test_what_is_stored_is_rounded_to_the_pools_dtype(order):
    shape = PagedShape(
        order=order, n_pages=4, page_size=4, layers=(0,), heads=2, total_heads=2, widths={"k": 3}, dtype=torch.bfloat16
    )
    pool, values = PagedPool(shape, 0), torch.randn(6, 2, 3, dtype=torch.float64)
    table = pool.allocate(0, 6)
    pool.store(0, table, 0, values)
    (loaded,) = pool.load(0, table, 0, 6)
    assert loaded.dtype == torch.float64
    assert torch.equal(loaded, values.bfloat16().double())
    assert not torch.equal(loaded, values)
    put_back = pool.spoil(table, 1)
    assert not torch.equal(pool.load(0, table, 0, 6)[0], loaded)
    put_back()
    assert torch.equal(pool.load(0, table, 0, 6)[0], loaded)


def tensors_of(pool):
    return [held for tensors in pool.tensors.values() for held in tensors]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), order=st.sampled_from([NHD, HND]), page_size=st.integers(1, 7), seed=st.integers(0, 99))
def test_what_is_stored_in_any_chunks_is_loaded(data, order, page_size, seed):
    starts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    spans = [(start, start + data.draw(st.integers(1, 20))) for start in starts]
    kv = make(order, page_size, n_pages=sum(pages_for(stop, page_size) for _, stop in spans), seed=seed)
    rooms = [(kv.allocate(*span), torch.randn(2, 2, span[1] - span[0], 2, 3, dtype=torch.float64)) for span in spans]
    for table, (k, v) in rooms:
        n = k.shape[1]
        cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))})
        for i, layer in enumerate(kv.layers):
            for start, stop in pairwise(cuts):
                kv.store(layer, table, table.start + start, k[i, start:stop], v[i, start:stop])
    for table, (k, v) in rooms:
        assert table.first_token == table.start // page_size * page_size
        for i, layer in enumerate(kv.layers):
            held = kv.load(layer, table, table.start, table.stop)
            assert torch.equal(held[0], k[i])
            assert torch.equal(held[1], v[i])


@pytest.mark.parametrize("order", [NHD, HND])
def test_the_memory_order_is_the_engines(order):
    kv = make(order)
    table = Table(np.array([5, 2], dtype=np.int32), 8, 8, 16)
    kv.store(3, table, 14, torch.ones(1, 2, 3, dtype=torch.float64), torch.full((1, 2, 3), 2.0, dtype=torch.float64))
    where = (2 * 4 + 2,) if order == NHD else (2, slice(None), 2)
    assert torch.equal(kv.tensors["k"][1][where], torch.ones(2, 3, dtype=torch.float64))
    assert kv.tensors["k"][1].isnan().sum() == kv.tensors["k"][1].numel() - 6, "nothing else was touched"
    assert kv.tensors["k"][0].isnan().all()


def test_pages_are_shuffled_and_never_given_twice():
    kv = make(NHD, n_pages=64, seed=3)
    tables = [kv.allocate(0, 9), kv.allocate(7, 200)]
    taken = np.concatenate([table.items for table in tables])
    assert len(set(taken.tolist())) == len(taken) == 3 + 49
    assert (np.diff(taken) == 1).mean() < 0.2, "neighbours in the sequence are not neighbours in the pool"
    with pytest.raises(MemoryError, match="13 pages wanted, 12 free"):
        kv.allocate(0, 52)
    kv.free(tables[0])
    assert set(kv.allocate(0, 52).items.tolist()).isdisjoint(tables[1].items.tolist())


def changed_items(before, after, n_items):
    pages = [x.reshape(n_items, -1) for x in (before, after)]
    return (pages[0] != pages[1]).all(dim=1).tolist(), (pages[0] != pages[1]).any(dim=1).tolist()


@pytest.mark.parametrize("order", [NHD, HND])
def test_spoiling_changes_one_page_of_the_room_until_it_is_put_back(order):
    kv = make(order)
    for held in tensors_of(kv):
        held.normal_()
    before = [held.clone() for held in tensors_of(kv)]
    put_back = kv.spoil(Table(np.array([5, 3, 2], dtype=np.int32), 8, 9, 20), seed=1)
    for old, new in zip(before, tensors_of(kv), strict=True):
        wholly, partly = changed_items(old, new, 8)
        assert wholly == partly == [page == 3 for page in range(8)], "the middle of tokens 9..20 is in the second page"
        assert not new.isnan().any(), "noise, not NaN: the check must feel values that look plausible"
    put_back()
    assert all(torch.equal(old, new) for old, new in zip(before, tensors_of(kv), strict=True))


def slots(order):
    shapes = {"conv": ((6, 4), torch.float64), "ssm": ((2, 3, 3), torch.float32)}
    return SlotPool(order, 4, (0, 2), shapes=shapes, sections={}, seed=0)


@pytest.mark.parametrize("order", [NHD, HND])
def test_a_slot_holds_one_rooms_state_of_every_layer(order):
    pool = slots(order)
    tables = [pool.allocate() for _ in range(4)]
    assert sorted(int(table.items[0]) for table in tables) == [0, 1, 2, 3]
    states = {
        (i, layer): (torch.randn(6, 4, dtype=torch.float64), torch.randn(2, 3, 3)) for i in range(4) for layer in (0, 2)
    }
    for (i, layer), parts in states.items():
        pool.store(layer, tables[i], 0, *parts)
    for (i, layer), parts in states.items():
        assert all(torch.equal(held, part) for held, part in zip(pool.load(layer, tables[i], 0, 1), parts, strict=True))
    assert pool.tensors["conv"][0].stride() == ((24, 1, 6) if order == NHD else (24, 4, 1))
    pool.free(tables[2])
    assert pool.allocate().items.tolist() == tables[2].items.tolist()


def test_spoiling_changes_one_slot_until_it_is_put_back():
    pool = slots(HND)
    for held in tensors_of(pool):
        held.normal_()
    before = [held.clone() for held in tensors_of(pool)]
    put_back = pool.spoil(Table(np.array([2], dtype=np.int32), 0, 0, 1), seed=1)
    for old, new in zip(before, tensors_of(pool), strict=True):
        wholly, partly = changed_items(old, new, 4)
        assert wholly == partly == [slot == 2 for slot in range(4)]
    put_back()
    assert all(torch.equal(old, new) for old, new in zip(before, tensors_of(pool), strict=True))

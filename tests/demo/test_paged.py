"""A paged pool holds what was stored, in either memory order, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from pdstage.demo.paged import HND, NHD, PagedKV, PagedShape, pages_for  # noqa: E402


def make(order, page_size=4, n_pages=8, heads=2, seed=0):
    return PagedKV(
        PagedShape(order=order, n_pages=n_pages, page_size=page_size, layers=2, heads=heads, head_dim=3), seed
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data(), order=st.sampled_from([NHD, HND]), page_size=st.integers(1, 7), seed=st.integers(0, 99))
def test_what_is_stored_in_any_chunks_is_loaded(data, order, page_size, seed):
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    kv = make(order, page_size, n_pages=sum(pages_for(n, page_size) for n in lengths), seed=seed)
    rooms = [(kv.allocate(n), torch.randn(2, 2, n, 2, 3, dtype=torch.float64)) for n in lengths]
    for pages, (k, v) in rooms:
        n = k.shape[1]
        cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))})
        for layer in range(2):
            for start, stop in pairwise(cuts):
                kv.store(layer, pages, start, k[layer, start:stop], v[layer, start:stop])
    for pages, (k, v) in rooms:
        for layer in range(2):
            held = kv.load(layer, pages, k.shape[1])
            assert torch.equal(held[0], k[layer])
            assert torch.equal(held[1], v[layer])


@pytest.mark.parametrize("order", [NHD, HND])
def test_the_memory_order_is_the_engines(order):
    kv = make(order)
    pages = np.array([5, 2], dtype=np.int32)
    kv.store(1, pages, 6, torch.ones(1, 2, 3, dtype=torch.float64), torch.full((1, 2, 3), 2.0, dtype=torch.float64))
    where = (2 * 4 + 2,) if order == NHD else (2, slice(None), 2)
    assert torch.equal(kv.k[1][where], torch.ones(2, 3, dtype=torch.float64))
    assert kv.k[1].isnan().sum() == kv.k[1].numel() - 6, "nothing else was touched"
    assert kv.k[0].isnan().all()


def test_pages_are_shuffled_and_never_given_twice():
    kv = make(NHD, n_pages=64, seed=3)
    taken = np.concatenate([kv.allocate(9), kv.allocate(200)])
    assert len(set(taken.tolist())) == len(taken) == 3 + 50
    assert (np.diff(taken) == 1).mean() < 0.2, "neighbours in the sequence are not neighbours in the pool"
    with pytest.raises(MemoryError, match="12 pages wanted, 11 free"):
        kv.allocate(48)
    kv.free(taken[:1])
    assert set(kv.allocate(48).tolist()).isdisjoint(taken[1:].tolist())


@pytest.mark.parametrize("order", [NHD, HND])
def test_corruption_spoils_one_page_and_no_other(order):
    kv = make(order)
    for held in (*kv.k, *kv.v):
        held.normal_()
    before = [held.clone() for held in (*kv.k, *kv.v)]
    kv.corrupt(3, seed=1)
    for old, new in zip(before, (*kv.k, *kv.v), strict=True):
        pages = [x.reshape(8, -1) for x in (old, new)]
        changed = (pages[0] != pages[1]).all(dim=1)
        assert changed.tolist() == [page == 3 for page in range(8)]
        assert torch.equal(pages[0][~changed], pages[1][~changed])
        assert not new.isnan().any(), "noise, not NaN: the check must feel values that look plausible"

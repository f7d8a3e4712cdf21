"""A layout is proved by the writer of whoever owns the memory: what the views believe wrongly is refused by name.

The writers here stand for an engine's own; tests/engines and tests/e2e use the engines'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pdstage import Key, Layout, UsageError, View
from pdstage.probe import Cell, LayerProbe, Writer, prove_layout
from pdstage.tensors import build, mla, paged_hnd, paged_nhd

Cells, Told = Sequence[Cell], Mapping[Key, NDArray[np.uint8]]
N_PAGES, PAGE, HEADS, DIM = 6, 16, 4, 8
K, V = Key("kv", "k", 0), Key("kv", "v", 0)


def caches() -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[page, token, head, dim]` of one layer, full of noise."""
    noise = torch.randn(2, N_PAGES, PAGE, HEADS, DIM)
    return noise[0], noise[1]


def nhd(k: torch.Tensor, v: torch.Tensor) -> Layout:
    return build(paged_nhd([k], [v], total_heads=HEADS, tp=(1, 0)))


def writer(k: torch.Tensor, v: torch.Tensor) -> Writer:
    """Stores K and V `[token, head, dim]` as an engine with pages `[page, token, head, dim]` does, where they lie."""

    def write(cells: Cells, rng: np.random.Generator) -> Told:
        stored = {}
        for key, cache in ((K, k), (V, v)):
            values = torch.from_numpy(rng.standard_normal((len(cells), HEADS, DIM))).to(cache.dtype)
            slots = torch.tensor([cell.item * PAGE + cell.token for cell in cells], device=cache.device)
            cache.view(-1, HEADS, DIM)[slots] = values.to(cache.device)
            stored[key] = values.view(torch.uint8).numpy()
        return stored

    return write


@contextmanager
def left_as_it_was(*held: torch.Tensor) -> Iterator[None]:
    before = [one.clone() for one in held]
    yield
    assert all(map(torch.equal, held, before))


def prove(layout: Layout, write: Writer | None, keys: tuple[Key, ...] = (K, V), **more: object) -> object:
    return prove_layout(layout, [LayerProbe("layers.0", "SOME_ATTN", keys, write)], **more)


def test_what_is_right_is_proved_and_left_as_it_was() -> None:
    k, v = caches()
    with left_as_it_was(k, v):
        proved = prove(nhd(k, v), writer(k, v))
    assert proved == (("layers.0",), ())
    assert str(proved) == "1 layers proved by the engine's own writer"


def heads_alike(k: torch.Tensor, v: torch.Tensor) -> Layout:
    """Each of the heads is the first."""
    return _with(nhd(k, v), replace(nhd(k, v).by_key()[K], shard_stride=0))


def tokens_after_heads(k: torch.Tensor, v: torch.Tensor) -> Layout:
    order = [[cache.view(N_PAGES, HEADS, PAGE, DIM)] for cache in (k, v)]
    return build(paged_hnd(*order, total_heads=HEADS, tp=(1, 0)))


def transposed(k: torch.Tensor, v: torch.Tensor) -> Layout:
    turned = replace(nhd(k, v).by_key()[K], segs=DIM, seg_stride=4 * HEADS, width=4, shard_stride=4)
    return _with(nhd(k, v), turned)


def _with(layout: Layout, view: View) -> Layout:
    return Layout.of(layout.regions, [view, *(one for one in layout.by_key().values() if one.key != view.key)])


WRONG = {  # a layout that is not how `writer(k, v)` stores, and what the error says of it
    "K and V swapped": (lambda k, v: nhd(v, k), "that is what was written as v of page 0, token 0, kv_head 0"),
    "heads in another order": (heads_alike, "that is what was written as k of page 0, token 0, kv_head 0"),
    "heads before tokens": (tokens_after_heads, "given k of page 0, token 0, kv_head 1"),
    "elements transposed": (transposed, "the elements of a row are stored in another order, or encoded otherwise"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_by_name_and_left_as_it_was(name: str) -> None:
    k, v = caches()
    wrong, told = WRONG[name]
    words = "layer 'layers.0' .* attention backend SOME_ATTN"
    with left_as_it_was(k, v), pytest.raises(UsageError, match=words) as caught:
        prove(wrong(k, v), writer(k, v))
    assert told in str(caught.value)
    assert {"layer", "backend", "expected", "found", "item", "token", "shard"} <= set(caught.value.fields)


def test_bytes_that_no_view_covers_are_refused() -> None:
    k, v = caches()
    write = writer(k, v)

    def with_scales(cells: Cells, rng: np.random.Generator) -> Told:
        stored = write(cells, rng)
        v[0, 9] = torch.pi  # as a backend does that keeps a page's scales in the page
        return stored

    words = r"SOME_ATTN stores \d+ bytes of layer 'layers.0' that no view covers"
    with left_as_it_was(v), pytest.raises(UsageError, match=words):
        prove(nhd(k, v), with_scales)


def test_a_writer_that_raises_leaves_the_pages_as_they_were() -> None:
    k, v = caches()

    def fails(cells: Cells, rng: np.random.Generator) -> Told:
        writer(k, v)(cells, rng)
        raise RuntimeError("no kernel")

    with left_as_it_was(k), pytest.raises(RuntimeError, match="no kernel"):
        prove(nhd(k, v), fails)


def test_a_writer_must_tell_all_it_stored_and_values_that_differ() -> None:
    k, v = caches()
    with pytest.raises(UsageError, match="says it stored None bytes"):
        prove(nhd(k, v), lambda cells, rng: {})

    def constant(cells: Cells, rng: np.random.Generator) -> Told:
        k.fill_(1.0)
        v.fill_(1.0)
        ones = np.ones((len(cells), HEADS, DIM), np.float32).view(np.uint8)
        return {K: ones, V: ones}

    with pytest.raises(UsageError, match="the same bytes in two places"):
        prove(nhd(k, v), constant)


def test_without_a_writer_a_layer_needs_the_operators_word() -> None:
    k, v = caches()
    with pytest.raises(
        UsageError, match="nothing proves how attention backend SOME_ATTN keeps layer 'layers.0'"
    ) as caught:
        prove(nhd(k, v), None)
    error = caught.value
    assert "trust_layout" in str(error)
    assert prove(nhd(k, v), None, trust_layout=True).trusted == ("layers.0",)
    with pytest.raises(UsageError, match="is not laid out"):  # the operator's word does not outweigh a writer
        prove(nhd(v, k), writer(k, v), trust_layout=True)


def test_every_view_is_of_one_probe() -> None:
    k, v = caches()
    with pytest.raises(UsageError, match="is in 0 probes"):
        prove(nhd(k, v), writer(k, v), keys=(K,))
    with pytest.raises(UsageError, match="not in the layout"):
        prove(nhd(k, v), writer(k, v), keys=(K, V, Key("kv", "k", 1)))


def opaque(cache: torch.Tensor, step: int = 0) -> Writer:
    """Stores rows `[page, row, byte]` of an encoding of its own; with `step` not where their tokens are."""

    def write(cells: Cells, rng: np.random.Generator) -> None:
        for cell, row in zip(cells, rng.integers(1, 256, (len(cells), DIM), np.uint8), strict=True):
            cache[cell.item, (cell.token + step * cell.item) % cache.shape[1]] = torch.from_numpy(row ^ 0x5A)

    return write


def test_rows_of_an_unknown_encoding_are_proved_by_their_place() -> None:
    rows = torch.randint(0, 256, (N_PAGES, PAGE, DIM), dtype=torch.uint8)
    key = Key("kv", "latent", 0)
    layout = build(mla([rows], format="packed"))
    with left_as_it_was(rows):
        assert prove(layout, opaque(rows), (key,)) == (("layers.0",), ())
    with left_as_it_was(rows), pytest.raises(UsageError, match="no view covers"):
        prove(layout, opaque(rows, step=1), (key,))
    other = torch.randint(0, 256, (N_PAGES, PAGE, DIM), dtype=torch.uint8)
    with pytest.raises(UsageError, match="is not laid out"):
        prove(layout, opaque(other), (key,))


def test_pages_kept_for_padding_are_not_written() -> None:
    k, v = caches()
    seen: list[Cell] = []

    def watched(cells: Cells, rng: np.random.Generator) -> Told:
        seen.extend(cells)
        return writer(k, v)(cells, rng)

    prove_layout(nhd(k, v), [LayerProbe("layers.0", "SOME_ATTN", (K, V), watched, first_item=1)])
    assert {cell.item for cell in seen} == {1, (N_PAGES + 1) // 2, N_PAGES - 1}
    assert {cell.token for cell in seen if cell.item == 1} >= {0, 1, PAGE - 1}

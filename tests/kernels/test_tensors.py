"""The tensor level: every backend against torch indexing, and each argument that does not fit refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import HOST_CODES, host_code

from pdstage.errors import UsageError
from pdstage.kernels import backends, gather, scatter, staged_nbytes
from pdstage.kernels.buffers import _plan_of

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64]


def buffer(n_items, rows, shards, width, dtype, order, pad):
    """A tensor `[item, row, shard, width]` whose first three dimensions nest in memory in `order`."""
    sizes = (n_items, rows, shards)
    shape = [sizes[d] for d in order]
    whole = torch.randint(0, 256, (*shape, (width + pad) * dtype.itemsize), dtype=torch.uint8)
    back = [order.index(d) for d in range(3)]
    return whole.view(dtype)[..., :width].permute(*back, 3)


@st.composite
def cases(draw):
    n_items, shards = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    same_rows = draw(st.booleans())
    rows = draw(st.integers(1, 5))
    buffers = [
        buffer(
            n_items,
            rows if same_rows else draw(st.integers(1, 5)),
            shards,
            draw(st.integers(1, 20)),
            draw(st.sampled_from(DTYPES)),
            draw(st.permutations([0, 1, 2])),
            draw(st.integers(0, 3)),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    items = draw(st.lists(st.integers(0, n_items - 1), min_size=1, max_size=n_items, unique=True))
    tokens = None
    if same_rows:
        tokens = draw(st.none() | st.tuples(*[st.integers(0, len(items) * rows)] * 2).map(sorted).map(tuple))
    start = draw(st.integers(0, shards - 1))
    kind = draw(st.sampled_from([np.int32, np.int64]))
    items = np.array(items, kind)
    return (
        buffers,
        torch.from_numpy(items) if draw(st.booleans()) else items,
        slice(start, draw(st.integers(start + 1, shards))),
        tokens,
    )


def raw(tensor):
    return tensor.contiguous().view(torch.uint8)


def indexed(buffers, items, shards, tokens):
    """The bytes of every buffer by plain indexing."""
    chosen = torch.as_tensor(items).long()
    return [b[chosen].flatten(0, 1)[slice(*tokens) if tokens else slice(None)][:, shards] for b in buffers]


@pytest.mark.parametrize("code", [*HOST_CODES, "reference"])
@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_gather_and_scatter_are_indexing(code, case):
    buffers, items, shards, tokens = case
    backend = "reference" if code == "reference" else "host"
    n = staged_nbytes(buffers, len(items), shards, tokens)
    out = torch.full((n + 8,), 0xA5, dtype=torch.uint8)
    expected = indexed(buffers, items, shards, tokens)
    _plan_of.cache_clear()  # a plan keeps the host code it was made with
    with host_code(code):
        gather(buffers, items, shards, out, tokens=tokens, backend=backend)
    at = 0
    for want in expected:
        flat = raw(want).reshape(-1)
        assert torch.equal(out[at : at + flat.numel()], flat)
        padded = -(-flat.numel() // 128) * 128
        assert (out[at + flat.numel() : at + padded] == 0xA5).all()
        at += padded
    assert at == n

    fresh = torch.randint(0, 256, out.shape, dtype=torch.uint8)
    wanted = [raw(b).clone() for b in buffers]
    at = 0
    for want, gathered in zip(wanted, expected, strict=True):
        cells = fresh[at : at + raw(gathered).numel()].view(raw(gathered).shape)
        for t, cell in zip(range(*(tokens or (0, len(items) * want.shape[1]))), cells, strict=True):
            want[int(items[t // want.shape[1]]), t % want.shape[1], shards] = cell
        at += -(-cells.numel() // 128) * 128
    with host_code(code):
        scatter(fresh, buffers, items, shards, tokens=tokens, backend=backend)
    for b, want in zip(buffers, wanted, strict=True):
        assert torch.equal(raw(b), want)


def test_backends_of_host_memory_work_everywhere():
    """The others say what they miss."""
    assert [name for name, missing in backends().items() if not missing and name in ("host", "reference")] == [
        "host",
        "reference",
    ]
    assert set(backends()) == {"host", "reference", "cuda", "triton"}


GOOD = {"items": np.array([0, 2]), "shards": slice(0, 2), "tokens": None}


@pytest.mark.parametrize("backend", ["host", "reference"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"items": np.array([0, 4])}, "item 4 at position 1"),
        ({"items": np.array([0, -1])}, "item -1 at position 1"),
        ({"items": np.array([0.5])}, "dimensional array of float64"),
        ({"items": torch.zeros(2, 2, dtype=torch.int32)}, "2-dimensional array of int32"),
        ({"shards": slice(2, 2)}, "shards 2:2:None of the 2"),
        ({"shards": slice(0, 2, 2)}, "shards 0:2:2"),
        ({"tokens": (0, 7)}, "has 2 items where its tokens need 3"),
        ({"tokens": (4, 2)}, "tokens 4..2"),
        ({"out": torch.zeros(64, dtype=torch.uint8)}, "too small"),
        ({"out": torch.zeros(1024)}, "out is torch.float32"),
        ({"out": torch.zeros(1024, dtype=torch.uint8)[::2]}, "out is non-contiguous"),
        ({"buffers": []}, "there are no buffers"),
        ({"buffers": [torch.zeros(4, 3, 8)]}, "buffer 0 has shape (4, 3, 8)"),
        ({"buffers": [torch.zeros(4, 3, 2, 0)]}, "buffer 0 has shape"),
        ({"buffers": [torch.zeros(4, 3, 8, 2).transpose(2, 3)]}, "buffer 0 has width in steps of 2"),
        ({"buffers": [torch.zeros(4, 3, 2, 8), torch.zeros(4, 5, 2, 8)], "tokens": (0, 2)}, "different rows"),
        ({"buffers": [torch.zeros(4, 3, 2, 8, device="meta")]}, "no backend copies memory on 'meta'"),
    ],
)
def test_misuse_is_refused_by_name(backend, change, words):
    given_ = {"buffers": [torch.zeros(4, 3, 2, 8)], "out": torch.full((4096,), 7, dtype=torch.uint8)} | GOOD | change
    out = given_.pop("out")
    with pytest.raises(UsageError) as caught:
        gather(given_["buffers"], given_["items"], given_["shards"], out, tokens=given_["tokens"], backend=backend)
    assert words in str(caught.value)
    assert out.unique().numel() == 1


@pytest.mark.parametrize("backend", ["host", "reference"])
def test_scatter_refuses_an_item_twice(backend):
    target = torch.zeros(4, 3, 2, 8)
    with pytest.raises(UsageError, match="item 1 at position 2 .* is a destination twice"):
        scatter(torch.ones(4096, dtype=torch.uint8), [target], np.array([1, 0, 1]), slice(0, 2), backend=backend)
    assert not target.any()


def test_items_may_repeat_on_gather():
    pool = torch.arange(24, dtype=torch.uint8).reshape(3, 1, 1, 8)
    out = torch.zeros(128, dtype=torch.uint8)
    gather([pool], np.array([2, 0, 2], np.int32), slice(None), out)
    assert torch.equal(out[:24].view(3, 8), pool.view(3, 8)[[2, 0, 2]])

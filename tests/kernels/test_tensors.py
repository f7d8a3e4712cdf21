"""The tensor level: every backend against torch indexing, and each argument that does not fit refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs import HOST_CODES, host_code

from pdstage.errors import UsageError
from pdstage.kernels import backends, gather, scatter, staged_nbytes
from pdstage.kernels.buffers import Buffers, _plan_of, layout_of
from tests.rows import drawn

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
@settings(max_examples=drawn(50, full=100), deadline=None)
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


@pytest.mark.parametrize("backend", ["host", "reference"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_sum_out_is_added_to_and_is_the_same_both_ways(backend, dtype):
    src = [
        torch.randint(0, 256, (4, 3, 2, 8), dtype=torch.uint8),
        torch.randint(0, 256, (4, 5, 2, 20), dtype=torch.uint8),
    ]
    dst = [torch.zeros_like(b).transpose(1, 2).contiguous().transpose(1, 2) for b in src]
    out = torch.zeros(2048, dtype=torch.uint8)
    read, written = torch.tensor([7], dtype=dtype), torch.tensor([7], dtype=dtype)
    gather(src, np.array([3, 1]), slice(1, 2), out, backend=backend, sum_out=read)
    scatter(out, dst, torch.tensor([0, 2]), slice(1, 2), backend=backend, sum_out=written)
    assert read.item() == written.item() != 7
    again = torch.tensor([7], dtype=dtype)
    out[0] += 1
    scatter(out, dst, torch.tensor([0, 2]), slice(1, 2), backend=backend, sum_out=again)
    assert again.item() != read.item()


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int64, device="meta"),
    ],
)
def test_sum_out_is_one_integer_beside_the_buffers(wrong):
    out = torch.full((4096,), 7, dtype=torch.uint8)
    with pytest.raises(UsageError, match="sum_out is"):
        gather([torch.zeros(4, 3, 2, 8)], np.array([0]), slice(None), out, sum_out=wrong)
    assert (out == 7).all()


class Elsewhere:
    """A tensor that says it lies on a GPU: enough to see what is made of it, on a machine without one."""

    def __init__(self, tensor, device):
        self.tensor, self.device = tensor, torch.device(device)

    def __getattr__(self, name):
        return getattr(self.tensor, name)


def test_items_beside_the_buffers_are_passed_on_unread():
    buffers = [Elsewhere(torch.zeros(4, 3, 2, 8), "cuda:1")]
    items = torch.tensor([99, -1], dtype=torch.int32)  # the host never looks
    held = Buffers.of(buffers, Elsewhere(items, "cuda:1"), slice(0, 1), None)
    index = held.indexes()["000000"]
    assert index[:4] == (items.data_ptr(), 32, 2, 0)
    assert index.device == "cuda:1"
    assert held.ranges() == {"000000": (0, 6)}
    region = layout_of(held.geometry, slice(0, 1))[0].regions[0]
    assert (region.kind, region.device) == ("cuda", 1)
    assert Buffers.of(buffers, np.array([1, 2]), slice(0, 1), None).index.device == "cpu"


@pytest.mark.parametrize(
    ("items", "device", "words"),
    [
        (torch.zeros(2, dtype=torch.int32), "cuda:0", "items are on cuda:0, the buffers are on cuda:1"),
        (torch.zeros(2), "cuda:1", "tensor of float32"),
        (torch.zeros(4, dtype=torch.int64)[::2], "cuda:1", "non-contiguous tensor of int64"),
        (torch.zeros(2, 2, dtype=torch.int64), "cuda:1", "2-dimensional tensor"),
    ],
)
def test_items_elsewhere_are_refused_by_name(items, device, words):
    with pytest.raises(UsageError, match=words):
        Buffers.of([Elsewhere(torch.zeros(4, 3, 2, 8), "cuda:1")], Elsewhere(items, device), slice(0, 1), None)


def test_staging_and_sum_lie_beside_the_buffers():
    held = Buffers.of([Elsewhere(torch.zeros(4, 3, 2, 8), "cuda:1")], np.array([0]), slice(0, 1), None)
    out = torch.zeros(512, dtype=torch.uint8)
    with pytest.raises(UsageError, match="out is on cpu, the buffers are on cuda:1"):
        held.staging(out, "out")
    assert held.staging(Elsewhere(out, "cuda:1"), "out") == (out.data_ptr(), 512)
    with pytest.raises(UsageError, match="sum_out is 1 of int64 on cpu"):
        held.sum_ptr(torch.zeros(1, dtype=torch.int64))


ALONE = """
import sys
for name in ("msgspec", "zmq", "nixl", "torch", "triton", "cupy", "pdstage._native"):
    sys.modules[name] = None  # as if it were not installed
import numpy as np
from pdstage.kernels import Index, Pool, backends
from pdstage.layout import Key, Region, RowLevel, View
from pdstage.plan import Select
from pdstage.layout.topology import Axis
memory, out = np.arange(64, dtype=np.uint8), np.zeros(128, np.uint8)
view = View(key=Key("kv", "k", 0), region=0, offset=0, n_items=8, item_stride=8, tokens_per_item=1,
            rows=(RowLevel(1, 8),), shards=1, shard_stride=8, width=8, axis=Axis("head", 1, 0, 1), format="bytes")
plan = Pool([Region(memory.ctypes.data, 64)], [view]).plan([Select(view.key, 0, 1)])
plan.gather(out.ctypes.data, 128, {"kv": Index.of(np.array([3, 1]))}, {"kv": (0, 2)})
assert bytes(out[:16]) == bytes([*range(24, 32), *range(8, 16)])
assert not backends()["host"]
"""


def test_kernels_need_numpy_alone():
    subprocess.run([sys.executable, "-c", ALONE], check=True, cwd=Path(__file__).parents[2])

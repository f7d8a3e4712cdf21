"""Caches of which only addresses are known are the same layout as their tensors."""

from __future__ import annotations

import numpy as np
import pytest

from pdstage.errors import UsageError
from pdstage.layout.addresses import Buffers, kv_pages
from pdstage.layout.topology import Axis, shard_axis
from pdstage.tensors import build, sglang_mha

PAGE, PAGES, HEADS, DIM = 16, 8, 4, 32


def told(arrays, layers):
    item = [array[:PAGE].nbytes for array in arrays]
    return Buffers([array.ctypes.data for array in arrays], [array.nbytes for array in arrays], item, layers)


def views(layout):
    return {key: (view.offset + layout.regions[view.region].base, *view[2:]) if isinstance(view, tuple) else
            (view.offset + layout.regions[view.region].base, view.n_items, view.item_stride, view.tokens_per_item,
             view.rows, view.shards, view.shard_stride, view.segs, view.width, view.axis, view.format)
            for key, view in layout.by_key().items()}  # fmt: skip


@pytest.mark.parametrize("tp", [(4, 3), (2, 0), (8, 5), (1, 0)])
def test_pages_of_heads_are_those_of_tensors(tp):
    axis = shard_axis("kv_head", HEADS, *tp)
    k = [np.zeros((PAGES * PAGE, axis.count, DIM), np.float16) for _ in range(2)]
    v = [np.zeros((PAGES * PAGE, axis.count, DIM // 2), np.float16) for _ in range(2)]  # heads of K and V may differ
    by_address = kv_pages({"k": told(k, [3, 7]), "v": told(v, [3, 7])}, page_size=PAGE, axis=axis, format="fp16")
    by_tensor = sglang_mha(k, v, page_size=PAGE, total_heads=HEADS, tp=tp, layers=[3, 7])
    assert views(build(by_address)) == views(build(by_tensor))


def test_a_page_of_other_heads_is_refused_by_name():
    k = [np.zeros((PAGES * PAGE, 3, DIM), np.uint8)]
    with pytest.raises(UsageError, match=r"v\[0\] has pages of 1536 bytes for 16 tokens of 5 heads"):
        kv_pages({"v": told(k, [0])}, page_size=PAGE, axis=Axis("kv_head", 20, 0, 5), format="uint8")

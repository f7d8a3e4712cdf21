"""The cost of changing precision: a gather that encodes and a scatter that decodes beside plain ones of bf16 values.

GB/s count bf16 bytes, whatever was staged. One thread, heads of 128 values, pages of 16 tokens in random order from a
pool twice as big as the data. The baseline is the plain gather, or scatter, of the same cells in the same run. The last
rows are what engines would do instead: torch on the decode side after a plain transfer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pdstage.kernels import Pool
from pdstage.kernels.convert_reference import encode
from pdstage.layout import Layout
from pdstage.plan import Select
from pdstage.plan.convert import Encoding, fp8_tensor, fp8_token_head, mxfp8, pair, reformat
from pdstage.plan.tables import Index
from pdstage.tensors import build, paged_nhd

from .harness import Row, interleaved

PAGE, HEADS, DIM, LAYERS = 16, 8, 128, 4
FORMATS = {
    "tensor": fp8_tensor(0.1),
    "tensor, by way of bf16": fp8_tensor(0.1, "bf16"),
    "token_head": fp8_token_head(),
    "mxfp8": mxfp8(),
}


def run(quick: bool) -> list[Row]:
    torch.set_num_threads(1)
    nbytes = (16 if quick else 64) << 20
    return [row for name in FORMATS for row in _measure(name, nbytes, repeats=5 if quick else 11)]


def _measure(name: str, nbytes: int, *, repeats: int) -> list[Row]:
    n_pages = nbytes // (2 * LAYERS * PAGE * HEADS * DIM * 2)
    values = torch.randn(2 * LAYERS, 2 * n_pages, PAGE, HEADS, DIM).bfloat16()
    own = build(paged_nhd(list(values[:LAYERS]), list(values[LAYERS:]), total_heads=HEADS, tp=(1, 0)))
    offered = pair(own, _peer(own, FORMATS[name])).offered
    select = [Select(view.key, 0, HEADS) for view in own.views()]
    plain, coded = Pool.of(own).plan(select), Pool.of(own).plan(select, staged=offered)
    tokens = {"kv": (0, n_pages * PAGE)}
    items = np.random.default_rng(1).permutation(2 * n_pages)[:n_pages].astype(np.int32)
    index = {"kv": Index.of(items)}
    out = torch.empty(plain.nbytes(tokens), dtype=torch.uint8)
    small = torch.empty(coded.nbytes(tokens), dtype=torch.uint8)
    dense = torch.randn(nbytes // 2 // DIM, DIM).bfloat16()
    encoding = Encoding.parse(FORMATS[name])
    assert encoding is not None
    coded.gather(small.data_ptr(), small.numel(), index, tokens)
    plain.gather(out.data_ptr(), out.numel(), index, tokens)
    gather, encoded, scatter, decoded, eager = interleaved(
        [
            lambda: plain.gather(out.data_ptr(), out.numel(), index, tokens),
            lambda: coded.gather(small.data_ptr(), small.numel(), index, tokens),
            lambda: plain.scatter(out.data_ptr(), out.numel(), index, tokens),
            lambda: coded.scatter(small.data_ptr(), small.numel(), index, tokens),
            lambda: encode(encoding, dense),
        ],
        repeats=repeats,
    )
    speed = {f"gather to {name}": (encoded, gather), f"scatter from {name}": (decoded, scatter)}
    speed[f"torch to {name}"] = (eager, gather)
    return [
        Row(
            name=f"{what}, {nbytes >> 20} MiB of bf16",
            value=nbytes / s / 1e9,
            baseline=nbytes / plain_s / 1e9,
            unit="GB/s",
            detail="baseline: the same without conversion",
        )
        for what, (s, plain_s) in speed.items()
    ]


def _peer(own: Layout, format: str) -> Layout:
    encoding = Encoding.parse(format)
    assert encoding is not None
    width = encoding.nbytes(DIM)
    plain = reformat(own, {view.key: format for view in own.views()})
    components = tuple(
        replace(component, views=tuple(replace(view, width=width) for view in component.views))
        for component in plain.components
    )
    return Layout(own.regions, components)

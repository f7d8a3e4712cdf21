"""The cost of changing precision: bf16 in the pool, fp8 in staging, beside a plain gather or scatter of the cells.

GB/s counts the pool's bytes: staging has about half of them. Heads of 128 values, in random pages of 16 tokens of a
pool twice as big as the data. `pdstage bench gpu` measures it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from pdstage.errors import UsageError
from pdstage.kernels import Pool, backends
from pdstage.kernels.pool import choose
from pdstage.plan import Select
from pdstage.plan.convert import Encoding, fp8_tensor, fp8_token_head, mxfp8, pair
from pdstage.tensors import build, paged_nhd

from .gpu_kernels import CURVE_NBYTES, QUICK_REPEATS, REPEATS
from .harness import rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdstage.layout import Layout

    from .bed import Bed, Work
    from .harness import Row

LAYERS, PAGE, HEADS, DIM = 8, 16, 8, 128
TOKEN_NBYTES = 2 * LAYERS * HEADS * DIM * 2
FORMATS = {
    "tensor": fp8_tensor(0.1), "tensor, by way of bf16": fp8_tensor(0.1, "bf16"), "token_head": fp8_token_head(),
    "mx32": mxfp8("floor"),
}  # fmt: skip


def rows(bed: Bed, quick: bool, nbytes: int = 0) -> Iterator[Row]:
    """By backend and format, both ways."""
    n_pages = max(1, (nbytes or bed.sized(CURVE_NBYTES)) // TOKEN_NBYTES // PAGE)
    memory = torch.randn((2, LAYERS, 2 * n_pages, PAGE, HEADS, DIM), device=bed.device).bfloat16()
    own = build(paged_nhd(*map(list, memory), tp=(1, 0), total_heads=HEADS))
    pool, tokens = Pool.of(own, bed.device, keep=memory), {"kv": (0, n_pages * PAGE)}
    items = np.random.default_rng(0).permutation(2 * n_pages)[:n_pages].astype(np.int32)
    index, n = {"kv": bed.index(items)}, n_pages * PAGE * TOKEN_NBYTES
    for backend in _copying(bed):
        plain = pool.plan([Select(view.key, 0, view.shards) for view in own.views()], backend=backend)
        for name, format in FORMATS.items():
            staged = pair(own, _kept_as(format)).offered
            select = [Select(view.key, 0, view.shards) for view in staged.views()]
            try:
                plan = pool.plan(select, backend=backend, staged=staged)
            except UsageError as error:
                bed.left_out.append(f"convert, {backend}: {error}")
                break
            works: dict[str, Work] = {}
            for what, one in (("plain", plain), ("converting", plan)):
                out = bed.memory(one.nbytes(tokens), poison=0)
                for way in ("gather", "scatter"):
                    works[f"{what} {way}"] = partial(_copy, getattr(one, way), out, index, tokens, stream=bed.stream())
            times = bed.spreads(works, QUICK_REPEATS if quick else REPEATS)
            for way in ("gather", "scatter"):
                yield rate(
                    f"{way} that converts, {backend}, {name}", n, times[f"converting {way}"], times[f"plain {way}"],
                    f"{n / 2**20:.1f} MiB of bf16 to {format}; baseline: a plain {way} of them",
                    point={"table": "convert", "way": way, "backend": backend, "format": name},
                )  # fmt: skip


def _copy(call: Callable[..., object], staging: torch.Tensor, *given: object, stream: object) -> None:
    call(staging.data_ptr(), staging.numel(), *given, stream=stream)


def _copying(bed: Bed) -> list[str]:
    """The backends that copy memory on this device here, but for the reference."""
    found = []
    for name in backends():
        try:
            found += [choose(name, bed.device)] if name != "reference" else []
        except UsageError:
            continue
    return found


def _kept_as(format: str) -> Layout:
    """The layout of a peer that keeps `format`: of one page, whose formats and shards are all that counts."""
    encoding = Encoding.parse(format)
    assert encoding is not None
    cells = torch.zeros((2, LAYERS, 1, PAGE, HEADS, encoding.nbytes(DIM)), dtype=torch.uint8)
    return build(paged_nhd(*map(list, cells), total_heads=HEADS, tp=(1, 0), format=format))

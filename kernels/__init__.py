"""Gather scattered cells of a pool into dense staging bytes, and scatter them back.

Imports only the layers below; torch only inside functions that take tensors.

There are two levels. For tensors, in engines and microbenchmarks: `gather`, `scatter`, `staged_nbytes`. For raw memory,
in the manager: a `Pool` over a `Layout` makes a `Plan` for each selection once, and the plan gathers and scatters chunk
after chunk. All backends give equal bytes. `reference` is the definition of correct, and `backends()` lists those that
work here.

Read `reference` and `checksum` (what is correct); `pool`, `buffers` (what callers hold); `backend` (the interface of a
backend); `host_copy`. Then for GPUs `device` (tables), `arena` (their memory), `index_ring` (uploads of item lists),
`cuda_copy` with `cuda_tables`, `cuda_runtime` and `nvrtc`, and `triton_copy` with `triton_kernels`, `triton_device` and
`torch_runtime`. Both use `driver` (contexts, stream capture) and `device_memory` with `virtual_memory`. Change of
precision has its own modules: `convert_reference` (what is correct), `host_convert`, `cuda_convert`, and
`triton_convert` with `triton_convert_kernels` and `triton_sum_kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plan import Staging
from ..plan.tables import Index, integers
from . import reference
from .buffers import Buffers, geometry_of, layout_of
from .pool import Plan, Pool, backends, choose

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import torch
    from numpy.typing import NDArray

__all__ = ["Index", "Plan", "Pool", "backends", "gather", "scatter", "staged_nbytes"]


def gather(
    buffers: Sequence[torch.Tensor],
    items: torch.Tensor | NDArray[Any],
    shards: slice,
    out: torch.Tensor,
    *,
    tokens: tuple[int, int] | None = None,
    backend: str = "auto",
    stream: object = None,
    max_sms: int | None = None,
    sum_out: torch.Tensor | None = None,
) -> None:
    """Copies shards of the listed items of every buffer to `out`, densely.

    `buffers`: tensors `[item, row, shard, width]` of any strides and dtype with contiguous `width`; rows and widths may
    differ. `items`: int32 or int64, one list for all. `tokens`: a range of the flattened item*row axis, by default all
    of it; a range needs equal rows in all buffers. `out`: contiguous uint8, at least `staged_nbytes` long. Each
    buffer's bytes are `[token][shard][width]` and start at the next multiple of 128; the bytes between are not touched.

    Everything lies on one device, except that `items` may be in host memory, where each is checked. The host does not
    read items on a GPU: the kernel skips those outside the buffers. A copy on a GPU is done in the order of `stream` (a
    torch or cupy stream, an integer, None for the current one), and uses at most `max_sms` multiprocessors. The tensors
    must stay alive until then. `sum_out`, one int64 or uint64 beside the buffers, gets the checksum of the copied bytes
    added (modulo 2^64, see `kernels.checksum`). A cell is named by its buffer's place in the list, its token and its
    shard, so scattering the same elsewhere gives the same sum.

    Raises `UsageError`, and writes nothing, for arguments that do not fit.
    """
    held = Buffers.of(buffers, items, shards, tokens)
    if choose(backend, held.device) == "reference" and sum_out is None:
        held.check(out, "out", unique=False)
        reference.gather(buffers, integers(held.index), shards, out, held.tokens)
        return
    plan, sum_ptr = held.plan(backend, checksum=sum_out is not None), held.sum_ptr(sum_out)
    staging = held.staging(out, "out")
    plan.gather(*staging, held.indexes(), held.ranges(), stream=stream, max_sms=max_sms, sum_ptr=sum_ptr)


def scatter(
    src: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    items: torch.Tensor | NDArray[Any],
    shards: slice,
    *,
    tokens: tuple[int, int] | None = None,
    backend: str = "auto",
    stream: object = None,
    max_sms: int | None = None,
    sum_out: torch.Tensor | None = None,
) -> None:
    """Copies `src`, laid out as by `gather`, to shards of the listed items of every buffer: the inverse of `gather`.

    An item may be listed only once. Bytes outside the named items, shards and tokens are not touched.
    """
    held = Buffers.of(buffers, items, shards, tokens)
    if choose(backend, held.device) == "reference" and sum_out is None:
        held.check(src, "src", unique=True)
        reference.scatter(src, buffers, integers(held.index), shards, held.tokens)
        return
    plan, sum_ptr = held.plan(backend, checksum=sum_out is not None), held.sum_ptr(sum_out)
    staging = held.staging(src, "src")
    plan.scatter(*staging, held.indexes(), held.ranges(), stream=stream, max_sms=max_sms, sum_ptr=sum_ptr)


def staged_nbytes(
    buffers: Sequence[torch.Tensor], n_items: int, shards: slice, tokens: tuple[int, int] | None = None
) -> int:
    """Bytes that `gather` needs for `n_items` items, or for `tokens` of them; a multiple of 128."""
    layout, select = layout_of(geometry_of(buffers), shards)
    whole = {c.name: (0, n_items * c.tokens_per_item) for c in layout.components}
    return Staging(layout, select).nbytes(whole if tokens is None else dict.fromkeys(whole, tokens))

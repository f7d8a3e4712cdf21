"""Gather scattered cells of a pool into dense staging bytes, and scatter them back.

May import the layers below, and torch only inside the functions that take tensors.

Two levels. Tensors, for engines and microbenchmarks: `gather`, `scatter`, `staged_nbytes`. Raw memory, for the manager:
a `Pool` over a `Layout` makes a `Plan` for each selection once, and the plan gathers and scatters chunk after chunk.
Backends give equal bytes; `reference` is the definition of correct, and `backends()` says which of them work here.

To read: `reference`, `checksum` (what is right); `pool`, `buffers` (what callers hold); `backend` (what they ask of a
backend); `host_copy`; then for GPUs `device` (tables), `arena` (where those lie), `index_ring` (lists on their way
there), `cuda_copy` with `cuda_tables`, `cupy_runtime` and `nvrtc`, and `triton_copy` with `triton_kernels`,
`triton_device` and `torch_runtime`; for both are `driver` (contexts, stream capture) and `device_memory` with
`virtual_memory`.
Change of precision, the one thing that is more than moving bytes, has modules of its own: `convert_reference` (what is
right), `host_convert`, `cuda_convert`, and `triton_convert` with `triton_convert_kernels` and
`triton_sum_kernels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plan import Staging
from ..tables import Index, integers
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
    """Copies shards of the listed items of every buffer to `out`, dense.

    `buffers`: tensors `[item, row, shard, width]` of any strides and dtype with `width` contiguous; rows and widths
    may differ. `items`: int32 or int64, one list for all. `tokens`: a range of the flattened item*row axis, by default
    all of it; only where all buffers have as many rows. `out`: contiguous uint8, at least `staged_nbytes` long; each
    buffer's bytes are `[token][shard][width]` and start at the next 128-byte multiple, and the bytes between are left
    alone.

    Everything lies on one device; `items` may be in host memory too, where they are checked one by one. Those on a GPU
    are not read by the host: the kernel leaves out what lies outside the buffers. A copy on a GPU is done once `stream`
    (a torch or cupy stream, an integer, None for the current one) gets there, and uses at most `max_sms` of its
    multiprocessors; the tensors must stay alive until then. `sum_out`, one int64 or uint64 beside the buffers, has the
    checksum of what was copied added to it (modulo 2^64, see `kernels.checksum`; a buffer's place in the list, tokens
    and shards name a cell, so that scattering the same elsewhere sums to the same).

    Raises `UsageError`, and writes nothing, where an argument does not fit.
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
    """Copies `src`, laid out as `gather` leaves it, to shards of the listed items of every buffer: the way back.

    An item may be listed once only. Bytes outside the named items, shards and tokens are not touched.
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

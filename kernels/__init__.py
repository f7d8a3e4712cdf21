"""Gather scattered cells of a pool into dense staging bytes, and scatter them back.

Layer 3: may import the layers below, and torch only inside the functions that take tensors. Must not know rooms,
leases, peers or transports; moves bytes and has no idea of dtypes, heads or layers.

Two levels. Tensors, for engines and microbenchmarks: `gather`, `scatter`, `staged_nbytes`. Raw memory, for the manager:
a `Pool` over a `Layout` makes a `Plan` for each selection once, and the plan gathers and scatters chunk after chunk.
Backends give equal bytes; `reference` is the definition of correct, and `backends()` says which of them work here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..plan import Staging
from ..tables import Index
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
) -> None:
    """Copies shards of the listed items of every buffer to `out`, dense.

    `buffers`: tensors `[item, row, shard, width]` of any strides and dtype with `width` contiguous; rows and widths
    may differ. `items`: int32 or int64, one list for all. `tokens`: a range of the flattened item*row axis, by default
    all of it; only where all buffers have as many rows. `out`: contiguous uint8, at least
    `staged_nbytes` long; each buffer's
    bytes are `[token][shard][width]` and start at the next 128-byte multiple, and the bytes between are left alone.
    `stream` and `max_sms` are for devices that have them.

    Raises `UsageError`, and writes nothing, where an argument does not fit.
    """
    held = Buffers.of(buffers, items, shards, tokens)
    if choose(backend, held.device) == "reference":
        held.check(out, "out", unique=False)
        reference.gather(buffers, held.items, shards, out, held.tokens)
        return
    plan = held.plan(backend)
    plan.gather(*held.staging(out, "out"), held.indexes(), held.ranges(), stream=stream, max_sms=max_sms)


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
) -> None:
    """Copies `src`, laid out as `gather` leaves it, to shards of the listed items of every buffer: the way back.

    An item may be listed once only. Bytes outside the named items, shards and tokens are not touched.
    """
    held = Buffers.of(buffers, items, shards, tokens)
    if choose(backend, held.device) == "reference":
        held.check(src, "src", unique=True)
        reference.scatter(src, buffers, held.items, shards, held.tokens)
        return
    plan = held.plan(backend)
    plan.scatter(*held.staging(src, "src"), held.indexes(), held.ranges(), stream=stream, max_sms=max_sms)


def staged_nbytes(
    buffers: Sequence[torch.Tensor], n_items: int, shards: slice, tokens: tuple[int, int] | None = None
) -> int:
    """Bytes that `gather` needs for `n_items` items, or for `tokens` of them; a multiple of 128."""
    layout, select = layout_of(geometry_of(buffers), shards)
    whole = {c.name: (0, n_items * c.tokens_per_item) for c in layout.components}
    return Staging(layout, select).nbytes(whole if tokens is None else dict.fromkeys(whole, tokens))

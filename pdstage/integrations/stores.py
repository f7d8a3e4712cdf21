"""A writer for caches that only kernels of a GPU write: it stores into the tensors that the engine gives them.

It proves where an entry lies and in which order. What the parts of an entry mean is the adapters' to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from pdstage.layout import Key, View
    from pdstage.probe import Cell, Writer


def into(places: Sequence[tuple[View, torch.Tensor, int]], n_tokens: int = 1) -> Writer:
    """A writer of views: the first byte of each is in the first entry of its tensor, `[item times n_tokens, ...]`, at
    that offset.
    """

    def write(cells: Sequence[Cell], rng: np.random.Generator) -> Mapping[Key, NDArray[np.uint8]]:
        numbers = torch.tensor([cell.item * n_tokens + cell.token for cell in cells])
        stored = {}
        for view, tensor, offset in places:
            at = numbers.to(tensor.device)
            entries = tensor[at].cpu().contiguous()
            within = offset + _bytes_of(view)
            stored[view.key] = rng.integers(0, 256, (len(cells), *within.shape), np.uint8)
            entries.view(torch.uint8).reshape(len(cells), -1).numpy()[:, within] = stored[view.key]
            tensor[at] = entries.to(tensor.device)
        return stored

    return write


def _bytes_of(view: View) -> NDArray[np.int64]:
    """The position of each byte of a view in an entry, `[shard, byte]`."""
    shards, segs, width = (np.arange(n, dtype=np.int64) for n in (view.shards, view.segs, view.width))
    found = shards[:, None, None] * view.shard_stride + segs[:, None] * view.seg_stride + width
    return found.reshape(view.shards, -1)

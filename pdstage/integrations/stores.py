"""Writers that both adapters make: rows of K and V by the engine's own write, and a store into the engine's tensors.

The second is for caches that only kernels of a GPU write. It proves where an entry lies and in which order. What the
parts of an entry mean is the adapters' to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from pdstage.layout import Key, View
    from pdstage.probe import Cell, Writer

_NUDGE = 1 + 1 / 64
"""vLLM's CPU operators truncate to fp8. Values slightly above a code give the same code rounded and truncated."""


class Encoding(NamedTuple):
    """The dtype of the values given to a layer, and the dtype they are stored in."""

    given: torch.dtype
    stored: torch.dtype

    def draw(
        self, rng: np.random.Generator, shape: tuple[int, ...], scale: float
    ) -> tuple[torch.Tensor, NDArray[np.uint8]]:
        """Values for the engine's write, and the bytes they are stored as, `[..., byte]`."""
        drawn = torch.from_numpy(rng.uniform(0.5, 2.0, shape) * rng.choice([-1.0, 1.0], shape))
        stored = drawn.to(self.given).to(self.stored)
        given = stored if self.stored == self.given else (stored.float() * (_NUDGE * scale)).to(self.given)
        return given, stored.view(torch.uint8).numpy()


def rows_by(
    store: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
    views: Mapping[str, View],
    encoding: Encoding,
    *,
    heads: int,
    sizes: tuple[int, int],
    n_tokens: int,
    device: torch.device,
    scales: tuple[float, float] = (1.0, 1.0),
    is_plain: bool = True,
) -> Writer:
    """Tokens of one layer, as its engine writes them: `sizes` elements of two parts in each head. They are K and V, or
    a latent and its rotary key, which are one row. `scales` are those by which the engine divides each part.

    `store` is given slots, and both parts of their tokens. `views` are by role: "k", "v", "latent", or one for each
    piece of a part, such as "v.3" for the fourth. Rows that are not plain are proved by position.
    """

    def write(cells: Sequence[Cell], rng: np.random.Generator) -> Mapping[Key, NDArray[np.uint8]] | None:
        (k, k_bytes), (v, v_bytes) = (
            encoding.draw(rng, (len(cells), heads, size), scale) for size, scale in zip(sizes, scales, strict=True)
        )
        store(slots(cells, n_tokens, device), k.to(device), v.to(device))
        if not is_plain:
            return None
        parts, stored = {"k": k_bytes, "v": v_bytes, "latent": np.concatenate([k_bytes, v_bytes], -1)}, {}
        for role, view in views.items():
            whole, _, piece = role.partition(".")
            first = int(piece or 0) * view.shard_nbytes
            stored[view.key] = parts[whole][..., first : first + view.shard_nbytes]
        return stored

    return write


def slots(cells: Sequence[Cell], n_tokens: int, device: torch.device) -> torch.Tensor:
    """The engines' numbers of tokens: an item's number times its tokens, and the token."""
    return torch.tensor([cell.item * n_tokens + cell.token for cell in cells], device=device)


def into(places: Sequence[tuple[View, torch.Tensor, int]], n_tokens: int = 1) -> Writer:
    """A writer of views: the first byte of each is in the first entry of its tensor, `[item times n_tokens, ...]`, at
    that offset.
    """

    def write(cells: Sequence[Cell], rng: np.random.Generator) -> Mapping[Key, NDArray[np.uint8]]:
        stored = {}
        for view, tensor, offset in places:
            at = slots(cells, n_tokens, tensor.device)
            entries = tensor[at].cpu().contiguous()
            # The position of each byte of the view in an entry, `[shard, byte]`.
            shards, segs, width = (np.arange(n, dtype=np.int64) for n in (view.shards, view.segs, view.width))
            found = shards[:, None, None] * view.shard_stride + segs[:, None] * view.seg_stride + width
            within = offset + found.reshape(view.shards, -1)
            stored[view.key] = rng.integers(0, 256, (len(cells), *within.shape), np.uint8)
            entries.view(torch.uint8).reshape(len(cells), -1).numpy()[:, within] = stored[view.key]
            tensor[at] = entries.to(tensor.device)
        return stored

    return write

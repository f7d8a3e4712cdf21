"""A rank's own pools: pages of tokens in one of the memory orders of engines, and slots of state.

Every pool is filled with NaN at first, so reading data that has not arrived spoils the room. Every free list is
shuffled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from pdstage.tensors import Section

NHD = "nhd"
HND = "hnd"


class Table(NamedTuple):
    """Where a room is in one pool: page i of `items` covers tokens `[first_token + i*page_size, ...)`, and the room has
    tokens `[start, stop)` of the prompt. A room has one slot, as tokens `[0, 1)`.
    """

    items: NDArray[np.int32]
    first_token: int
    start: int
    stop: int


Room: TypeAlias = "Mapping[str, Table]"
"""A room's tables, by component."""


class _Shuffled:
    """A free list."""

    def __init__(self, n: int, seed: int) -> None:
        self._free: list[int] = np.random.default_rng(seed).permutation(n).tolist()

    def take(self, n: int) -> NDArray[np.int32]:
        if n > len(self._free):
            raise MemoryError(f"{n} pages wanted, {len(self._free)} free")
        taken, self._free = self._free[:n], self._free[n:]
        return np.array(taken, dtype=np.int32)

    def give_back(self, items: NDArray[np.int32]) -> None:
        self._free.extend(items.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedShape:
    """`order` "nhd" is `[slots, heads, width]`, as in SGLang; "hnd" is `[pages, heads, page_size, width]`, as in
    FlashInfer.

    `layers` are the numbers of the layers held, `widths` the last axis by role, in the order of `store`. `total_heads`
    are the whole model's heads, of which this rank holds `heads`; 1 of 1 if replicated. Stored values become `dtype`,
    loaded ones float64 on the CPU again.
    """

    order: str
    n_pages: int
    page_size: int
    layers: Sequence[int]
    heads: int
    total_heads: int
    widths: Mapping[str, int]
    dtype: torch.dtype = torch.float64
    device: str = "cpu"


class PagedPool:
    """`tensors`: by role, one per layer of `shape.layers`."""

    def __init__(self, shape: PagedShape, seed: int) -> None:
        self.shape = shape
        if shape.order == NHD:
            size: tuple[int, ...] = (shape.n_pages * shape.page_size, shape.heads)
        else:
            size = (shape.n_pages, shape.heads, shape.page_size)
        self.tensors = {
            role: [torch.full((*size, width), torch.nan, dtype=shape.dtype, device=shape.device) for _ in shape.layers]
            for role, width in shape.widths.items()
        }
        self._free = _Shuffled(shape.n_pages, seed)
        self._at = {layer: i for i, layer in enumerate(shape.layers)}

    def allocate(self, start: int, stop: int) -> Table:
        """Pages scattered over the pool, for tokens `[start, stop)`. Starts at a whole page."""
        size = self.shape.page_size
        first = start // size
        return Table(self._free.take(pages_for(stop, size) - first), first * size, start, stop)

    def free(self, table: Table) -> None:
        self._free.give_back(table.items)

    def store(self, layer: int, table: Table, start: int, *parts: torch.Tensor) -> None:
        """Writes one `[n, heads, width]` per role at tokens `start..start+n` of the sequence."""
        for held, new in zip(self._of(layer), parts, strict=True):
            page, row = self._places(table, start, start + new.shape[0])
            if self.shape.order == NHD:
                held[page * self.shape.page_size + row] = new.to(held)
            else:
                held[page, :, row] = new.to(held)

    def load(self, layer: int, table: Table, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Tokens `[start, stop)` of every role, each `[n, heads, width]`."""
        page, row = self._places(table, start, stop)
        if self.shape.order == NHD:
            slots = page * self.shape.page_size + row
            return tuple(held[slots].double().cpu() for held in self._of(layer))
        return tuple(held[page, :, row].double().cpu() for held in self._of(layer))

    def spoil(self, table: Table, seed: int) -> Callable[[], None]:
        """Overwrites all tensors of the page in the middle of a room with noise: the negative control.

        Returns a function that restores the page.
        """
        page = int(table.items[((table.start + table.stop) // 2 - table.first_token) // self.shape.page_size])
        size = self.shape.page_size
        where = slice(page * size, (page + 1) * size) if self.shape.order == NHD else slice(page, page + 1)
        return _spoil((held[where] for tensors in self.tensors.values() for held in tensors), seed)

    @property
    def layers(self) -> Sequence[int]:
        return self.shape.layers

    def _of(self, layer: int) -> list[torch.Tensor]:
        return [tensors[self._at[layer]] for tensors in self.tensors.values()]

    def _places(self, table: Table, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = np.arange(start, stop) - table.first_token
        page = table.items[at // self.shape.page_size].astype(np.int64)
        row = at % self.shape.page_size
        return torch.from_numpy(page).to(self.shape.device), torch.from_numpy(row).to(self.shape.device)


class SlotPool:
    """State of a fixed size: `tensors`, by role, one `[slots, parts, *inner]` per layer of `layers`.

    `shapes` gives `[parts, *inner]` and dtype on this rank, `sections` the sections of the whole model's parts. In
    memory a conv state's channels come last with `order` "nhd", as in vLLM's "SD", else before its rows, as in SGLang.
    """

    def __init__(
        self,
        order: str,
        n_slots: int,
        layers: Sequence[int],
        *,
        shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        sections: Mapping[str, tuple[Section, ...]],
        seed: int,
    ) -> None:
        self.order = order
        self.layers = layers
        self.sections = sections
        self.tensors = {
            role: [self._empty(role, (n_slots, *shape), dtype) for _ in layers]
            for role, (shape, dtype) in shapes.items()
        }
        self._free = _Shuffled(n_slots, seed)
        self._at = {layer: i for i, layer in enumerate(layers)}

    def _empty(self, role: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if role == "conv" and self.order == NHD:
            slots, channels, rows = shape
            return torch.full((slots, rows, channels), torch.nan, dtype=dtype).transpose(1, 2)
        return torch.full(shape, torch.nan, dtype=dtype)

    def allocate(self, start: int = 0, stop: int = 1) -> Table:
        """One slot. It has no positions, so the range is always `[0, 1)`."""
        return Table(self._free.take(stop - start), start, start, stop)

    def free(self, table: Table) -> None:
        self._free.give_back(table.items)

    def store(self, layer: int, table: Table, start: int, *parts: torch.Tensor) -> None:
        """Writes one `[parts, *inner]` per role. `start` is 0; it exists for the interface of paged pools."""
        for tensors, new in zip(self.tensors.values(), parts, strict=True):
            tensors[self._at[layer]][int(table.items[0])] = new

    def load(self, layer: int, table: Table, start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Every role's state, as a view of the pool."""
        return tuple(tensors[self._at[layer]][int(table.items[0])] for tensors in self.tensors.values())

    def spoil(self, table: Table, seed: int) -> Callable[[], None]:
        """The same as in a paged pool: the room's slot, in every layer."""
        slot = int(table.items[0])
        return _spoil((held[slot] for tensors in self.tensors.values() for held in tensors), seed)


Pool: TypeAlias = "PagedPool | SlotPool"


def _spoil(parts: Iterable[torch.Tensor], seed: int) -> Callable[[], None]:
    """Noise of the same magnitude as the data: the check must also detect plausible values."""
    noise = torch.Generator().manual_seed(seed)
    kept = [(part, part.clone()) for part in parts]
    for part, was in kept:
        drawn = torch.randn(part.shape, generator=noise, dtype=part.dtype)
        part.copy_(drawn * float(was.nan_to_num().double().std()))

    def put_back() -> None:
        for part, was in kept:
            part.copy_(was)

    return put_back


def pages_for(n_tokens: int, page_size: int) -> int:
    return -(-n_tokens // page_size)

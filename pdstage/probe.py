"""Proves a layout at start: the engine's own code writes known values, and the layout's views must find every byte.

    prove_layout(layout, [LayerProbe("model.layers.0.attn", "FLASH_ATTN", keys, write), ...])

A tensor's shape does not say where a backend keeps K and V inside it: vLLM's CPU_ATTN stores K transposed in a tensor
whose shape says otherwise. So every layout is checked. `write` is the engine's own cache-write operation, supplied by
the engine or its adapter. This module chooses pages and tokens, calls the writer, and reads the values back by the
formula of `View`. It compares every byte, and restores the pages. Call it before the memory is used.

Read `LayerProbe`, then `prove_layout`; `rows_by` and `into` make writers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from pdstage.errors import UsageError
from pdstage.plan.tables import memory as memory_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from pdstage.layout import Key, Layout, Region, View

    Memory: TypeAlias = NDArray[np.uint8] | torch.Tensor  # of the host, of a device
    Stored: TypeAlias = Mapping[Key, NDArray[np.uint8]]  # `[cell, shard, byte]`

_HEX_NBYTES = 16
_TELLING_NBYTES = 8


class Cell(NamedTuple):
    """One token of one page; `token` counts from the page's start. For a slot, token 0."""

    item: int
    token: int


class Writer(Protocol):
    """An engine's own code that stores values in its caches, for one layer."""

    def __call__(self, cells: Sequence[Cell], rng: np.random.Generator) -> Stored | None:
        """Stores values drawn from `rng` for all `cells`.

        Returns, for every view of the layer, the stored bytes `[cell, shard, byte]`; `byte` is as long as the view's
        `shard_nbytes`. Draw values that the cache's encoding keeps exactly, and that differ everywhere.

        Returns None if only the engine knows the encoding. Then the same values are written again with the cells in
        reverse order, and every row must have moved with its cell. That proves the place of whole rows, so it works for
        views of one shard.
        """


@dataclass(frozen=True, slots=True)
class LayerProbe:
    """How one layer's views are proved.

    `name` and `backend` are the engine's names, for errors. `keys` are the layer's views. `write` is None if no writer
    of the backend runs here. Pages before `first_item` are not written: engines keep some for padding, which writers
    may skip.
    """

    name: str
    backend: str
    keys: tuple[Key, ...]
    write: Writer | None = None
    first_item: int = 0


class Proof(NamedTuple):
    """Layers by how they were verified: by their own writer, or by the operator's word."""

    proved: tuple[str, ...]
    trusted: tuple[str, ...]

    def __str__(self) -> str:
        groups = {
            "proved by the engine's own writer": self.proved, "trusted without proof (trust_layout)": self.trusted,
        }  # fmt: skip
        return ", ".join(f"{len(names)} layers {what}" for what, names in groups.items() if names)


def prove_layout(layout: Layout, probes: Iterable[LayerProbe], *, trust_layout: bool = False, seed: int = 0) -> Proof:
    """Proves every view of `layout`, layer by layer, and restores the memory.

    `trust_layout` admits layers that have no writer. It does not admit a layer whose writer shows another layout. A few
    tokens of three pages are written for each layer.

    Raises `UsageError` that names layer, backend, and the expected and found bytes, for the first byte that is not
    where its view says. Raises it also for a byte that the writer changed and no view covers, for a layer without a
    writer, and for a view without a probe.
    """
    given = list(probes)
    views = layout.by_key()
    _check_complete(views, given)
    memory = {}
    proved = []
    trusted = []
    try:
        for number, probe in enumerate(given):
            if probe.write is not None:
                held = [views[key] for key in probe.keys]
                for view in held:
                    if view.region not in memory:
                        memory[view.region] = _bytes_of(layout.regions[view.region])
                _prove(probe, held, memory, (seed, number))
                proved.append(probe.name)
            elif trust_layout:
                trusted.append(probe.name)
            else:
                raise UsageError(
                    f"nothing proves how attention backend {probe.backend} keeps layer {probe.name!r}: it has no "
                    "writer that runs here",
                    remedy="use another attention backend, or set trust_layout after comparing this engine's answers "
                    "with those of one engine that serves alone",
                    layer=probe.name,
                    backend=probe.backend,
                )
    finally:
        _wait(memory.values())
    return Proof(tuple(proved), tuple(trusted))


def _wait(memory: Iterable[Memory]) -> None:
    """Until the pages are as they were: on a device that is work in the current stream, and transfers are in others."""
    for one in memory:
        if not isinstance(one, np.ndarray):
            import torch  # noqa: PLC0415  (importing pdstage does not import torch)

            torch.cuda.current_stream(one.device).synchronize()


def _check_complete(views: Mapping[Key, View], probes: Sequence[LayerProbe]) -> None:
    named = [key for probe in probes for key in probe.keys]
    wrong = [key for key in views if named.count(key) != 1] + [key for key in named if key not in views]
    if wrong:
        raise UsageError(
            f"{wrong[0]} is in {named.count(wrong[0])} probes and {'' if wrong[0] in views else 'not '}in the layout",
            remedy="give one LayerProbe for each layer, with the keys of all its views",
            key=wrong[0],
        )


def _prove(probe: LayerProbe, views: Sequence[View], memory: Mapping[int, Memory], seed: tuple[int, int]) -> None:
    """Proves one layer: saves its pages, calls the writer, compares, and always restores the pages."""
    assert probe.write is not None
    cells = _cells(views, probe.first_item)
    pages = [_Saved(page) for page in _pages(views, cells, memory)]
    rows = [_Saved(_cell(memory[view.region], view, cell)) for view in views for cell in cells]
    try:
        stored = probe.write(cells, np.random.default_rng(seed))
        if stored is None:
            stored = {key: held[::-1] for key, held in _read(views, cells, memory).items()}
            _check_rest(probe, rows, pages)
            probe.write(cells[::-1], np.random.default_rng(seed))
        _check_stored(probe, views, cells, stored)
        _compare(probe, views, cells, stored, memory)
        _check_rest(probe, rows, pages)
    finally:
        for page in pages:
            page.put_back()


def _cells(views: Sequence[View], first: int) -> list[Cell]:
    """Several tokens of the first page, some of the last, one in between."""
    n_items = min(view.n_items for view in views)
    first = min(first, n_items - 1)
    step = max(view.tokens_per_row for view in views)
    rows = max(1, min(view.tokens_per_item for view in views) // step)
    some = sorted({0, 1, rows // 2, rows - 2, rows - 1} & set(range(rows)))
    middle = (first + n_items) // 2
    picked = {n_items - 1: some[:2] + some[3:], middle: some[len(some) // 2 :][:1], first: some}
    return [Cell(item, row * step) for item in sorted(picked) for row in picked[item]]


def _bytes_of(region: Region) -> Memory:
    """A region's memory as uint8, without a copy."""
    if region.kind == "cpu":
        return memory_at(region.base, region.nbytes)
    import torch  # noqa: PLC0415  (importing pdstage does not import torch)

    return torch.as_tensor(_DeviceMemory(region), device=f"{region.kind}:{region.device}")


class _DeviceMemory:
    """A region as an object with CUDA array interface 3."""

    def __init__(self, region: Region) -> None:
        self.__cuda_array_interface__ = {
            "shape": (region.nbytes,), "typestr": "|u1", "data": (region.base, False), "version": 3,
        }  # fmt: skip


def _cell(memory: Memory, view: View, cell: Cell) -> Memory:
    """`[shard, seg, byte]` of a token, by `View`'s formula."""
    at = view.offset + cell.item * view.item_stride + view.row_offset(cell.token)
    shape, strides = (view.shards, view.segs, view.width), (view.shard_stride, view.seg_stride, 1)
    if isinstance(memory, np.ndarray):
        return np.lib.stride_tricks.as_strided(memory[at:], shape, strides)
    return memory.as_strided(shape, strides, at)


class _Saved:
    """A piece of memory, and its saved content."""

    def __init__(self, memory: Any) -> None:  # noqa: ANN401  (a numpy array, or a tensor)
        self._memory = memory
        self._was = memory.copy() if isinstance(memory, np.ndarray) else memory.clone()

    def put_back(self) -> None:
        self._memory[...] = self._was

    def n_changed(self) -> int:
        differ = self._memory != self._was
        return int(differ.sum()) if differ.any() else 0


def _read(views: Sequence[View], cells: Sequence[Cell], memory: Mapping[int, Memory]) -> dict[Key, NDArray[np.uint8]]:
    """Each view's bytes of the cells, `[cell, shard, byte]`."""
    found = {}
    for view in views:
        held = (_cell(memory[view.region], view, cell) for cell in cells)
        rows = np.stack([one if isinstance(one, np.ndarray) else one.cpu().numpy() for one in held])
        found[view.key] = rows.reshape(len(cells), view.shards, view.shard_nbytes)
    return found


def _pages(views: Sequence[View], cells: Sequence[Cell], memory: Mapping[int, Memory]) -> Iterator[Memory]:
    """The whole memory of the cells' pages, including bytes that no view covers; each byte once."""
    spans = []
    for view in views:
        low, high = replace(view, n_items=1).extent()
        page = max(high, low + abs(view.item_stride)) - low
        spans += [(view.region, low + item * view.item_stride, page) for item, _ in cells]
    merged: list[tuple[int, int, int]] = []
    for region, low, nbytes in sorted(set(spans)):
        high = min(low + nbytes, len(memory[region]))
        if merged and merged[-1][0] == region and low <= merged[-1][2]:
            merged[-1] = (region, merged[-1][1], max(high, merged[-1][2]))
        else:
            merged.append((region, low, high))
    return (memory[region][low:high] for region, low, high in merged)


def _check_stored(probe: LayerProbe, views: Sequence[View], cells: Sequence[Cell], stored: Stored) -> None:
    """Raises `UsageError` for a writer that does not return what it stored, or whose values prove nothing."""
    for view in views:
        wanted = (len(cells), view.shards, view.shard_nbytes)
        shape = stored[view.key].shape if view.key in stored else None
        if shape != wanted:
            raise UsageError(
                f"the writer of layer {probe.name!r} says it stored {shape} bytes for {view.key}, not {wanted}",
                remedy="return [cell, shard, byte] for every view of the layer",
                layer=probe.name,
                key=view.key,
            )
    rows = [row.tobytes() for view in views for cell in stored[view.key] for row in cell]
    telling = [row for row in rows if len(row) >= _TELLING_NBYTES]
    if len(set(telling)) < len(telling):
        raise UsageError(
            f"the writer of layer {probe.name!r} stored the same bytes in two places, which proves nothing of either",
            remedy="draw every value anew",
            layer=probe.name,
        )


def _compare(
    probe: LayerProbe,
    views: Sequence[View],
    cells: Sequence[Cell],
    stored: Stored,
    memory: Mapping[int, Memory],
) -> None:
    read = _read(views, cells, memory)
    wrong = [
        (view, at, int(shard))
        for view in views
        for at, shard in zip(*np.nonzero((read[view.key] != stored[view.key]).any(axis=2)), strict=True)
    ]
    if not wrong:
        return
    view, at, shard = wrong[0]
    cell, n_rows = cells[at], len(cells) * sum(one.shards for one in views)
    expected, held = (rows[view.key][at, shard].tobytes() for rows in (stored, read))
    byte = next(i for i, (one, other) in enumerate(zip(expected, held, strict=True)) if one != other)
    raise UsageError(
        f"layer {probe.name!r} is not laid out as pdstage believes: attention backend {probe.backend} was given "
        f"{_words(view, cell, shard)} as {_hex(expected, byte)}, and there it is {_hex(held, byte)} from byte {byte} "
        f"on ({len(wrong)} of {n_rows} rows differ; {_explained(held, views, cells, stored)})",
        remedy="nothing was moved: use another attention backend, or the pdstage release for this engine's version",
        layer=probe.name,
        backend=probe.backend,
        key=view.key,
        item=cell.item,
        token=cell.token,
        shard=shard,
        expected=expected.hex(),
        found=held.hex(),
    )


def _words(view: View, cell: Cell, shard: int) -> str:
    what = view.key.role.partition("@")[0]
    return f"{what} of page {cell.item}, token {cell.token}, {view.axis.name or 'shard'} {view.axis.first + shard}"


def _hex(row: bytes, at: int) -> str:
    return row[at : at + _HEX_NBYTES].hex()


def _explained(row: bytes, views: Sequence[View], cells: Sequence[Cell], stored: Stored) -> str:
    """What was found instead, for the error."""
    for view in views:
        for at, cell in enumerate(cells):
            for shard in range(view.shards):
                if stored[view.key][at, shard].tobytes() == row:
                    return f"that is what was written as {_words(view, cell, shard)}"
    return "that is no row that was written: the elements of a row are stored in another order, or encoded otherwise"


def _check_rest(probe: LayerProbe, rows: Sequence[_Saved], pages: Sequence[_Saved]) -> None:
    """Raises `UsageError` if the writer changed a byte of the pages that no view covers."""
    for row in rows:
        row.put_back()
    n_changed = sum(page.n_changed() for page in pages)
    if n_changed:
        raise UsageError(
            f"attention backend {probe.backend} stores {n_changed} bytes of layer {probe.name!r} that no view covers: "
            "they would not be moved",
            remedy="use another attention backend, or the pdstage release for this engine's version",
            layer=probe.name,
            backend=probe.backend,
        )


# Writers that nobody need write: around an engine's own cache write (`rows_by`), or a store into its tensors (`into`),
# for caches that only a GPU writes. The latter proves where an entry lies and in which order. What the parts of
# an entry mean is the engine's to know.

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
        import torch  # noqa: PLC0415  (importing pdstage does not import torch)

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

    def write(cells: Sequence[Cell], rng: np.random.Generator) -> Stored | None:
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
    import torch  # noqa: PLC0415  (importing pdstage does not import torch)

    return torch.tensor([cell.item * n_tokens + cell.token for cell in cells], device=device)


def into(places: Sequence[tuple[View, torch.Tensor, int]], n_tokens: int = 1) -> Writer:
    """A writer of views: the first byte of each is in the first entry of its tensor, `[item times n_tokens, ...]`, at
    that offset.
    """
    import torch  # noqa: PLC0415  (importing pdstage does not import torch)

    def write(cells: Sequence[Cell], rng: np.random.Generator) -> Stored:
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

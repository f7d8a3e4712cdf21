"""One rank's process: its pools, its node, and the calls that an engine makes.

This is the part that a reader can copy into an engine.
"""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pdstage import AuxRow, DecodeNode, Items, Key, MetadataBuffers, Pool, PrefillNode
from pdstage.bench import ranks
from pdstage.metadata import usual_columns
from pdstage.tensors import build, mamba_conv, mamba_ssm, mla, paged_hnd, sglang_mha
from pdstage.tools.demo.engine import layers_of
from pdstage.tools.demo.families import SLOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pdstage import Receiver, Sender, Topology
    from pdstage.manager.handle import CudaEvent
    from pdstage.tensors import Naming, Part
    from pdstage.tools.demo.engine import Spans, States
    from pdstage.tools.demo.families import Field
    from pdstage.tools.demo.options import Options, Side

STAGING_NBYTES = 16 << 20
WAIT_S = 300.0
SPARE_PAGES = 16
_COLUMNS = usual_columns(top_logprobs=0)


class Table(NamedTuple):
    """A room in one pool: page i of `items` has tokens `[first_token + i * page, ...)`, of which the room has `span`.

    A room has one slot, as tokens `[0, 1)`.
    """

    items: NDArray[np.int32]
    first_token: int
    span: tuple[int, int]


class Memory:
    """A rank's pools by component, of pages in an engine's memory order or of slots, with a table for each room.

    Everything is NaN at first, so that data that has not arrived spoils the room; pages and slots are shuffled.
    """

    def __init__(self, options: Options, side: Side, place: Topology, lengths: Sequence[int], seed: int) -> None:
        self._family, self._place, self._page, self._is_nhd = options.family, place, side.page, side.layout == "nhd"
        self._device = options.device
        self.rooms: list[dict[str, Table]] = [{} for _ in lengths]
        self._tensors: dict[Key, torch.Tensor] = {}
        rng = np.random.default_rng(seed)
        parts: list[Part] = []
        for component in self._family.components:
            fields = self._family.fields(component)
            layers = [n for n in layers_of(self._family, place) if fields[0] in self._family.layers[n]]
            if layers:
                n_items = self._admit(component, lengths, rng)
                for key, field in ((Key(component, f.role, n), f) for n in layers for f in fields):
                    self._tensors[key] = self._empty(field, n_items)
                parts += self._described(component, layers, fields)
        self.pool = Pool.of(build(*parts), self._device, keep=self._tensors)

    def _admit(self, component: str, lengths: Sequence[int], rng: np.random.Generator) -> int:
        """Gives each room its pages, of a window only those of its end, or its slot. Returns the size of the pool."""
        page = 1 if self._family.fields(component)[0].kept == SLOT else self._page
        spans = [self._family.span(component, n) for n in lengths]
        counts = [-(-stop // page) - start // page for start, stop in spans]
        order = rng.permutation(sum(counts) + SPARE_PAGES).astype(np.int32)
        for room, span, items in zip(self.rooms, spans, np.split(order, np.cumsum(counts)), strict=False):
            room[component] = Table(items, span[0] // page * page, span)
        return len(order)

    def _empty(self, field: Field, n_items: int) -> torch.Tensor:
        n_parts = sum(n for _, n in field.runs(self._place))
        size: tuple[int, ...] = (n_items, n_parts, self._page, *field.inner)
        if field.kept == SLOT and field.role == "conv" and self._is_nhd:
            size = (n_items, *field.inner, n_parts)  # channels come last, as in vLLM's "SD"
        elif field.kept == SLOT:
            size = (n_items, n_parts, *field.inner)
        elif self._is_nhd:
            size = (n_items * self._page, n_parts, *field.inner)
        return torch.full(size, torch.nan, dtype=getattr(torch, field.dtype), device=self._device)

    def _described(self, component: str, layers: list[int], fields: tuple[Field, ...]) -> list[Part]:
        """The same for pdstage."""
        naming: Naming = {"component": component, "layers": layers}
        tp, heads = (self._place.tp_size, self._place.tp_rank), fields[-1].sections[0].heads
        held = {f.role: [self._tensors[Key(component, f.role, n)] for n in layers] for f in fields}
        if "conv" in held:
            conv = mamba_conv(held["conv"], sections=fields[0].sections, tp=tp, channels_last=self._is_nhd, **naming)
            return [conv, mamba_ssm(held["ssm"], total_heads=heads, tp=tp, **naming)]
        if "k" not in held:  # latents, or index keys: one row per token, which every rank holds
            ((role, caches),) = held.items()
            if self._is_nhd:
                return [mla(caches, page_size=self._page, role=role, **naming)]
            return [mla([cache[:, 0] for cache in caches], role=role, **naming)]
        if self._is_nhd:
            return [sglang_mha(held["k"], held["v"], page_size=self._page, total_heads=heads, tp=tp, **naming)]
        return [paged_hnd(held["k"], held["v"], total_heads=heads, tp=tp, **naming)]

    def _at(self, key: Key, table: Table, start: int, stop: int) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """The tensor that holds `[start, stop)` of a room, and where."""
        held = self._tensors[key]
        if self._family.fields(key.component)[0].kept == SLOT:
            return (held.transpose(1, 2) if key.role == "conv" and self._is_nhd else held), (int(table.items[0]),)
        at = np.arange(start, stop) - table.first_token
        page = torch.from_numpy(table.items[at // self._page].astype(np.int64)).to(held.device)
        row = torch.from_numpy(at % self._page).to(held.device)
        return held, (page * self._page + row,) if self._is_nhd else (page, slice(None), row)

    def store(self, room: int, states: States, spans: Spans) -> None:
        for key, state in states.items():
            held, where = self._at(key, self.rooms[room][key.component], *spans[key.component])
            held[where] = torch.from_numpy(state).to(held)

    def load(self, room: int) -> States:
        """Everything that this rank holds of a room."""
        found: States = {}
        for key in self._tensors:
            table = self.rooms[room][key.component]
            held, where = self._at(key, table, *table.span)
            found[key] = held[where].cpu().numpy()
        return found

    def items(self, room: int) -> dict[str, Items]:
        return {name: Items(table.items, table.first_token) for name, table in self.rooms[room].items()}

    def launched(self) -> CudaEvent | None:
        """An event after all that this rank has launched on its GPU; None on the CPU, where it is done."""
        if self._device == "cpu":
            return None
        event: CudaEvent = torch.cuda.current_stream(self._device).record_event()
        return event


def digest(row: AuxRow) -> int:
    """Over all its columns' bytes."""
    return zlib.crc32(b"".join(row[name].tobytes() for name in sorted(row.names)))


class PrefillRank(ranks.Actor):
    """Sends rooms one at a time, so that the counters show what each moved. Rooms are numbers."""

    def __init__(self, options: Options, place: Topology, lengths: list[int], directory: str) -> None:
        torch.set_num_threads(1)  # a dozen ranks share a machine that may have two cores
        self._memory = Memory(options, options.prefill, place, lengths, options.seed * 1000 + place.group_rank)
        self._rows = MetadataBuffers(_COLUMNS, n_rows=1)
        self._node = PrefillNode(
            self._memory.pool, place, transport=options.transport or "auto", bootstrap=directory, path=options.path,
            staging_nbytes=STAGING_NBYTES, aux=options.aux, metadata=self._rows, observers=ranks.observers(),
        )  # fmt: skip
        ranks.expose(self._node)
        self._spans: list[list[Spans]] = [[] for _ in lengths]

    def open(self, room: int) -> None:
        self._before = self._node.stats()
        self._room, self._sender = room, self._node.send(f"room-{room}")

    def chunk(self, states: States, spans: Spans) -> None:
        """Stores what is new, and sends it; the write goes on while the next chunk is computed."""
        spans = {name: span for name, span in spans.items() if name in self._memory.rooms[self._room]}
        self._memory.store(self._room, states, spans)
        self._spans[self._room].append(spans)
        self._give(self._sender, self._room, spans)
        self._node.turn()

    def _give(self, sender: Sender, room: int, spans: Spans) -> None:
        held = self._memory.items(room)
        sender.chunk({name: held[name] for name in spans}, tokens=spans, ready=self._memory.launched())

    def finish(self, token: int) -> tuple[dict[str, int], int]:
        """Waits until the room's pages may be reused. Returns what was moved for it, and a digest of its aux row."""
        row = self._rows.allocate()
        row["bootstrap_room"], row["output_ids"] = self._room, token
        self._sender.finish(aux=row)
        self._sender.wait(WAIT_S)
        self._sender.wait_released(WAIT_S)
        told = digest(row)
        self._rows.free(row)
        return {name: count - self._before.get(name, 0) for name, count in self._node.stats().items()}, told

    def again(self, path: str, move: int) -> tuple[float, int, int]:
        """Sends all rooms on `path`, once each is requested; returns when it began, descriptors and bytes."""
        began_at, before, senders = time.monotonic(), self._node.stats(), []
        self._node.path = path
        for room, chunks in enumerate(self._spans):
            sender = self._node.send(f"room-{room}, move {move}")
            for spans in chunks:
                self._give(sender, room, spans)
            sender.finish()
            senders.append(sender)
        for sender in senders:
            sender.wait(WAIT_S)
            sender.wait_released(WAIT_S)
        now = self._node.stats()
        return began_at, now["descriptors"] - before["descriptors"], now["bytes_written"] - before["bytes_written"]

    def idle(self) -> None:
        self._node.turn(1e-3)

    def close(self) -> None:
        self._node.close()


class DecodeRank(ranks.Actor):
    """Requests rooms, each into its own pages. Of a prompt it knows the length alone: all else came with the caches."""

    def __init__(self, options: Options, place: Topology, lengths: list[int], directory: str) -> None:
        torch.set_num_threads(1)
        self._memory = Memory(options, options.decode, place, lengths, options.seed * 1000 + 500 + place.group_rank)
        self._rows, self._directory = MetadataBuffers(_COLUMNS, n_rows=len(lengths)), directory
        self._node = DecodeNode(
            self._memory.pool, place, transport=options.transport or "auto", path=options.path,
            staging_nbytes=STAGING_NBYTES, aux=options.aux, metadata=self._rows, observers=ranks.observers(),
        )  # fmt: skip
        ranks.expose(self._node)
        self._receivers: list[Receiver] = []

    def expect(self, move: int | None = None) -> None:
        """Requests all rooms, or all once more, without rows."""
        self._receivers.clear()
        for room, tables in enumerate(self._memory.rooms):
            name = f"room-{room}" if move is None else f"room-{room}, move {move}"
            receiver = self._node.receive(name, prefill=self._directory)
            receiver.bind(
                self._memory.items(room),
                tokens={name: table.span for name, table in tables.items()},
                aux=self._rows.allocate() if move is None else None,
                after=self._memory.launched(),  # what still fills or reads these pages
            )
            self._receivers.append(receiver)

    def arrived(self, room: int) -> tuple[float, int, int]:
        """Waits for all of a room. Returns when it was there, its first new token, and a digest of its aux row."""
        self._receivers[room].wait(WAIT_S)
        row, at = self._receivers[room].aux, time.monotonic()
        assert isinstance(row, AuxRow), "a Success without the row that prefill gave"
        return at, int(row["output_ids"][0]), digest(row)

    def all_arrived(self) -> float:
        for receiver in self._receivers:
            receiver.wait(WAIT_S)
        return time.monotonic()

    def load(self, room: int) -> States:
        return self._memory.load(room)

    def idle(self) -> None:
        self._node.turn(1e-3)

    def close(self) -> None:
        self._node.close()

"""One rank's process: its pools, its node, and the calls that an engine makes.

This is the part that a reader can copy into an engine.
"""

from __future__ import annotations

import time
import zlib
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pdstage import AuxRow, DecodeNode, Items, Key, MetadataBuffers, Pool, PrefillNode, Receiver, Topology
from pdstage.bench import ranks
from pdstage.metadata import usual_columns
from pdstage.tensors import Naming, Part, build, mamba_conv, mamba_ssm, mla, paged_hnd, sglang_mha
from pdstage.tools.demo.engine import Spans, States, layers_of
from pdstage.tools.demo.families import SLOT, Field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pdstage.manager.handle import CudaEvent
    from pdstage.tools.demo.options import Options, Side

STAGING_NBYTES = 16 << 20
WAIT_S = 300.0
SPARE_PAGES = 16
_COLUMNS = usual_columns(top_logprobs=0)


class Table(NamedTuple):
    """A room in one pool: page i of `items` has tokens `[first_token + i * page, ...)`, of which the room has `span`.

    A room has one slot, as token 0 of a page.
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
        self._tokens: dict[Key, torch.Tensor] = {}
        """The same memory as `[page, token, parts, *inner]`, whatever its order."""
        rng = np.random.default_rng(seed)
        parts = []
        for component in self._family.components:
            fields = self._family.fields(component)
            layers = [n for n in layers_of(self._family, place) if fields[0] in self._family.layers[n]]
            if layers:
                n_items = self._admit(component, lengths, rng)
                for layer, field in product(layers, fields):
                    self._allocate(Key(component, field.role, layer), field, n_items)
                parts += self._described(component, layers, fields)
        self.pool = Pool.of(build(*parts), self._device, keep=self._tensors)

    def _admit(self, component: str, lengths: Sequence[int], rng: np.random.Generator) -> int:
        """Gives each room its pages, of a window only those of its end, or its slot. Returns the size of the pool."""
        spans = [self._family.span(component, n) for n in lengths]
        counts = [-(-stop // self._page) - start // self._page for start, stop in spans]
        order = rng.permutation(sum(counts) + SPARE_PAGES).astype(np.int32)
        for room, span, items in zip(self.rooms, spans, np.split(order, np.cumsum(counts)), strict=False):
            room[component] = Table(items, span[0] // self._page * self._page, span)
        return len(order)

    def _allocate(self, key: Key, field: Field, n_items: int) -> None:
        n_parts = sum(n for _, n in field.runs(self._place))
        size: tuple[int, ...] = (n_items, n_parts, self._page)
        if field.kept == SLOT:
            size = (n_items, n_parts)
        elif self._is_nhd:
            size = (n_items * self._page, n_parts)
        held = torch.full((*size, *field.inner), torch.nan, dtype=getattr(torch, field.dtype), device=self._device)
        self._tensors[key] = held
        if field.kept == SLOT:
            self._tokens[key] = held[:, None]
        else:
            self._tokens[key] = (
                held.view(n_items, self._page, n_parts, *field.inner) if self._is_nhd else held.transpose(1, 2)
            )

    def _described(self, component: str, layers: list[int], fields: tuple[Field, ...]) -> list[Part]:
        """The same for pdstage."""
        naming: Naming = {"component": component, "layers": layers}
        tp, heads = (self._place.tp_size, self._place.tp_rank), fields[-1].sections[0].heads
        held = {f.role: [self._tensors[Key(component, f.role, n)] for n in layers] for f in fields}
        if "conv" in held:
            conv = mamba_conv(held["conv"], sections=fields[0].sections, tp=tp, channels_last=False, **naming)
            return [conv, mamba_ssm(held["ssm"], total_heads=heads, tp=tp, **naming)]
        if "k" not in held:  # latents, or index keys: one row per token, which every rank holds
            ((role, caches),) = held.items()
            if self._is_nhd:
                return [mla(caches, page_size=self._page, role=role, **naming)]
            return [mla([cache[:, 0] for cache in caches], role=role, **naming)]
        if self._is_nhd:
            return [sglang_mha(held["k"], held["v"], page_size=self._page, total_heads=heads, tp=tp, **naming)]
        return [paged_hnd(held["k"], held["v"], total_heads=heads, tp=tp, **naming)]

    def _at(self, key: Key, table: Table, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where `[start, stop)` of a room is: pages, and places in them."""
        page, row = np.divmod(np.arange(start, stop) - table.first_token, self._page)
        pages, rows = torch.from_numpy(table.items[page].astype(np.int64)), torch.from_numpy(row)
        return pages.to(self._device), rows.to(self._device)

    def store(self, room: int, states: States, spans: Spans) -> None:
        for key, state in states.items():
            held, table = self._tokens[key], self.rooms[room][key.component]
            held[self._at(key, table, *spans[key.component])] = torch.from_numpy(state).to(held)

    def load(self, room: int) -> States:
        """Everything that this rank holds of a room."""
        found = {}
        for key, held in self._tokens.items():
            table = self.rooms[room][key.component]
            tokens = held[self._at(key, table, *table.span)].cpu().numpy()
            found[key] = tokens[0] if self._family.fields(key.component)[0].kept == SLOT else tokens
        return found

    def items(self, room: int) -> dict[str, Items]:
        return {name: Items(table.items, table.first_token) for name, table in self.rooms[room].items()}

    def spans(self, room: int) -> Spans:
        return {name: table.span for name, table in self.rooms[room].items()}

    def launched(self) -> CudaEvent | None:
        """An event after all that this rank has launched on its GPU; None on the CPU, where it is done."""
        if self._device == "cpu":
            return None
        event: CudaEvent = torch.cuda.current_stream(self._device).record_event()
        return event


def digest(row: AuxRow) -> int:
    """Over all its columns' bytes."""
    return zlib.crc32(b"".join(row[name].tobytes() for name in sorted(row.names)))


class _Rank(ranks.Actor):
    _node: PrefillNode | DecodeNode

    def __init__(self, options: Options, side: Side, place: Topology, lengths: list[int], seed: int) -> None:
        torch.set_num_threads(1)  # a dozen ranks share a machine that may have two cores
        self._memory = Memory(options, side, place, lengths, options.seed * 1000 + seed + place.group_rank)
        self._rows = MetadataBuffers(_COLUMNS, n_rows=len(lengths))
        self._given: dict[str, Any] = {
            "transport": options.transport or "auto", "path": options.path, "staging_nbytes": STAGING_NBYTES,
            "aux": options.aux, "metadata": self._rows, "observers": ranks.observers(),
        }  # fmt: skip

    def idle(self) -> None:
        self._node.turn(1e-3)

    def close(self) -> None:
        self._node.close()


class PrefillRank(_Rank):
    """Sends rooms one at a time, so that the counters show what each moved. Rooms are numbers."""

    _node: PrefillNode

    def __init__(self, options: Options, place: Topology, lengths: list[int], directory: str) -> None:
        super().__init__(options, options.prefill, place, lengths, 0)
        self._node = PrefillNode(self._memory.pool, place, directory=directory, **self._given)

    def open(self, room: int) -> None:
        self._before = self._node.stats()
        self._room, self._sender = room, self._node.send(f"room-{room}")

    def chunk(self, states: States, spans: Spans) -> None:
        """Stores what is new, and sends it; the write goes on while the next chunk is computed."""
        held = self._memory.items(self._room)
        spans = {name: span for name, span in spans.items() if name in held}
        self._memory.store(self._room, states, spans)
        self._sender.chunk({name: held[name] for name in spans}, tokens=spans, ready=self._memory.launched())
        self._node.turn()

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
        for room in range(len(self._memory.rooms)):
            sender = self._node.send(f"room-{room}, move {move}")
            sender.chunk(self._memory.items(room), tokens=self._memory.spans(room), ready=self._memory.launched())
            sender.finish()
            senders.append(sender)
        for sender in senders:
            sender.wait(WAIT_S)
            sender.wait_released(WAIT_S)
        now = self._node.stats()
        return began_at, now["descriptors"] - before["descriptors"], now["bytes_written"] - before["bytes_written"]


class DecodeRank(_Rank):
    """Requests rooms, each into its own pages. Of a prompt it knows the length alone: all else came with the caches."""

    _node: DecodeNode

    def __init__(self, options: Options, place: Topology, lengths: list[int], directory: str) -> None:
        super().__init__(options, options.decode, place, lengths, 500)
        self._directory = directory
        self._node = DecodeNode(self._memory.pool, place, **self._given)
        self._receivers: list[Receiver] = []

    def expect(self, move: int | None = None) -> None:
        """Requests all rooms, or all once more, without rows."""
        self._receivers.clear()
        for room in range(len(self._memory.rooms)):
            name = f"room-{room}" if move is None else f"room-{room}, move {move}"
            receiver = self._node.receive(name, directory=self._directory)
            receiver.bind(
                self._memory.items(room),
                tokens=self._memory.spans(room),
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

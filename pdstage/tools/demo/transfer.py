"""How the demo's ranks use the public API: the part of an engine that a reader can copy.

Only this module calls the manager.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pdstage import AuxRow, DecodeNode, Items, MetadataBuffers, Pool, PrefillNode, State
from pdstage.control.bootstrap import BootstrapServer
from pdstage.errors import DeadlineExceeded
from pdstage.metadata import usual_columns
from pdstage.tensors import build, mamba_conv, mamba_ssm, mla, paged_hnd, sglang_mha
from pdstage.tools.demo.pools import NHD, PagedPool, SlotPool, Table, pages_for
from pdstage.tools.watch.option import Watching

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.connection import Connection

    import numpy as np
    from numpy.typing import NDArray

    from pdstage import Receiver, Sender, Topology
    from pdstage.manager.handle import CudaEvent
    from pdstage.manager.observer import Observer
    from pdstage.tensors import Naming, Part
    from pdstage.tools.demo import pools as demo_pools
    from pdstage.tools.demo.holding import Spans

STAGING_NBYTES = 16 << 20
PAUSE_S = 0.005
_OVER = "sessions_over_"
COLUMNS = usual_columns(top_logprobs=0)


class Moved(NamedTuple):
    """What a prefill rank wrote for one room, and the transports to its peers.

    `row`: a digest of the row that it gave. The transport wrote `aux_rows` of those rows; `aux_fallbacks` should have
    gone that way.
    """

    nbytes: int
    descriptors: int
    row: int
    aux_rows: int
    aux_fallbacks: int
    paths: tuple[str, ...]
    over: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's place on its side, and how it reaches the other side. `bootstrap` is HOST:PORT of the directory."""

    topology: Topology
    transport: str
    path: str
    aux: str
    bootstrap: str
    deadline_s: float
    metrics_port: int | None = None
    observers: tuple[Observer, ...] = ()
    device: str = "cpu"


def serve_directory(_: None, pipe: Connection) -> None:
    """Runs the bootstrap directory on a free loopback port, reports the port, and ends on the first message."""
    with BootstrapServer() as server:
        pipe.send(server.address)
        pipe.recv()


def pool_of(pools: Mapping[str, demo_pools.Pool], place: Topology, device: str = "cpu") -> Pool:
    """Describes a rank's tensors to pdstage: every pool is a component, in its memory order."""
    tp = (place.tp_size, place.tp_rank)
    parts: list[Part] = []
    for component, pool in pools.items():
        parts += [_paged(component, pool, tp)] if isinstance(pool, PagedPool) else _states(component, pool, tp)
    return Pool.of(build(*parts), device, keep=pools)


def _paged(component: str, pool: PagedPool, tp: tuple[int, int]) -> Part:
    shape, tensors = pool.shape, pool.tensors
    naming: Naming = {"component": component, "layers": shape.layers}
    if "k" not in tensors:  # latents, or index keys: one row per token, which every rank holds
        ((role, caches),) = tensors.items()
        if shape.order == NHD:
            return mla(caches, page_size=shape.page_size, role=role, **naming)
        return mla([cache[:, 0] for cache in caches], role=role, **naming)
    k, v = tensors["k"], tensors["v"]
    if shape.order == NHD:
        return sglang_mha(k, v, page_size=shape.page_size, total_heads=shape.total_heads, tp=tp, **naming)
    return paged_hnd(k, v, total_heads=shape.total_heads, tp=tp, **naming)


def _states(component: str, pool: SlotPool, tp: tuple[int, int]) -> list[Part]:
    naming: Naming = {"component": component, "layers": pool.layers}
    last = pool.order == NHD
    conv = [state.transpose(1, 2) if last else state for state in pool.tensors["conv"]]
    (heads,) = pool.sections["ssm"]
    return [
        mamba_conv(conv, sections=pool.sections["conv"], tp=tp, channels_last=last, **naming),
        mamba_ssm(pool.tensors["ssm"], total_heads=heads.heads, tp=tp, **naming),
    ]


def _launched(device: str) -> CudaEvent | None:
    """An event after all that this rank has launched on its GPU; None on the CPU, where it is done."""
    if device == "cpu":
        return None
    import torch  # noqa: PLC0415  (only the GPU path needs it)

    event: CudaEvent = torch.cuda.current_stream(device).record_event()
    return event


def digest(row: AuxRow) -> int:
    """Over all its columns' bytes."""
    return zlib.crc32(b"".join(row[name].tobytes() for name in sorted(row.names)))


class SendingSide:
    """A prefill rank's node. Rooms are sent one at a time, so that the counters show what each moved."""

    def __init__(self, pools: Mapping[str, demo_pools.Pool], place: Place) -> None:
        self._pages = {name: pool.shape.page_size for name, pool in pools.items() if isinstance(pool, PagedPool)}
        self._deadline_s, self._device = place.deadline_s, place.device
        self._rows = MetadataBuffers(COLUMNS, n_rows=1)
        self._watching = Watching(place.metrics_port)
        self._node = PrefillNode(
            pool_of(pools, place.topology, place.device),
            place.topology,
            transport=place.transport,
            bootstrap=place.bootstrap,
            path=place.path,
            staging_nbytes=STAGING_NBYTES,
            aux=place.aux,
            metadata=self._rows,
            observers=(*place.observers, *self._watching.observers),
        )
        self._watching.expose(self._node)
        self._before = self._node.stats()

    def open(self, room: str) -> None:
        self._room = room
        self._sender = self._node.send(room)

    def chunk(self, room: demo_pools.Room, spans: Spans) -> None:
        """Sends what is new in the pools; the write goes on while the next chunk is computed."""
        self._give(self._sender, room, spans)
        self.turn()

    def _give(self, sender: Sender, room: demo_pools.Room, spans: Spans) -> None:
        ours = {component: span for component, span in spans.items() if component in room}
        items = {name: self._items(name, room[name], *span) for name, span in ours.items()}
        sender.chunk(items, tokens=ours, ready=_launched(self._device))

    def _items(self, component: str, table: Table, start: int, stop: int) -> Items:
        """The pages that hold tokens `[start, stop)`, or the slot."""
        page = self._pages.get(component)
        if page is None:
            return Items(table.items)
        first, before = start // page, table.first_token // page
        return Items(table.items[first - before : pages_for(stop, page) - before], first_token=first * page)

    def finish(self, token: int) -> None:
        self._row = self._rows.allocate()
        self._row["bootstrap_room"] = zlib.crc32(self._room.encode())
        self._row["output_ids"] = self._row["output_token_logprobs_idx"] = token
        self._sender.finish(aux=self._row)

    def settle(self) -> Moved:
        """Waits until the room's pages may be reused, and returns what was moved for it."""
        try:
            self._sender.wait(self._deadline_s)
            self._sender.wait_released(self._deadline_s)
        except TimeoutError as late:
            raise DeadlineExceeded(str(late), remedy="try fewer ranks or requests") from late
        row = digest(self._row)
        self._rows.free(self._row)
        now, before = self._node.stats(), self._before
        self._before = now
        moved = {name: count - before.get(name, 0) for name, count in now.items()}
        paths = tuple(path for path in ("staged", "direct") if moved[f"chunks_{path}"])
        over = tuple(name.removeprefix(_OVER) for name in now if name.startswith(_OVER))
        rows = (moved["aux_rows"], moved["aux_fallbacks"])
        return Moved(moved["bytes_written"], moved["descriptors"], row, *rows, paths, over)

    def send_again(self, rooms: Mapping[str, tuple[demo_pools.Room, Sequence[Spans]]], path: str) -> tuple[int, int]:
        """Sends all `rooms` on `path` once each is requested; returns descriptors and bytes."""
        self._node.path = path
        before, senders = self._node.stats(), []
        for name, (room, chunks) in rooms.items():
            sender = self._node.send(name)
            for spans in chunks:
                self._give(sender, room, spans)
            sender.finish()
            senders.append(sender)
        for sender in senders:
            sender.wait(self._deadline_s)
            sender.wait_released(self._deadline_s)
        now = self._node.stats()
        return now["descriptors"] - before["descriptors"], now["bytes_written"] - before["bytes_written"]

    def turn(self) -> None:
        self._node.turn()

    def close(self) -> None:
        self._node.close()
        self._watching.close()


class ReceivingSide:
    """A decode rank's node: requests rooms, each into its own pages."""

    def __init__(self, pools: Mapping[str, demo_pools.Pool], place: Place, n_rooms: int) -> None:
        self._bootstrap, self._device = place.bootstrap, place.device
        self._rows = MetadataBuffers(COLUMNS, n_rows=n_rooms)
        self._watching = Watching(place.metrics_port)
        self._node = DecodeNode(
            pool_of(pools, place.topology, place.device),
            place.topology,
            transport=place.transport,
            path=place.path,
            staging_nbytes=STAGING_NBYTES,
            aux=place.aux,
            metadata=self._rows,
            observers=(*place.observers, *self._watching.observers),
        )
        self._watching.expose(self._node)
        self._receivers: dict[str, Receiver] = {}

    def expect(self, room: str, tables: demo_pools.Room, *, with_row: bool = True) -> None:
        """Requests `room` into the pages of `tables`."""
        receiver = self._node.receive(room, prefill=self._bootstrap)
        receiver.bind(
            {name: Items(table.items, table.first_token) for name, table in tables.items()},
            tokens={name: (table.start, table.stop) for name, table in tables.items()},
            aux=self._rows.allocate() if with_row else None,
            after=_launched(self._device),  # what still fills or reads these pages
        )
        self._receivers[room] = receiver

    def forget(self) -> None:
        """Drops all rooms requested so far, which are over; `poll` then reports the next ones."""
        self._receivers.clear()

    def poll(self) -> NDArray[np.bool_]:
        """Per room, in the order requested: whether it has arrived completely. Raises the error of a failed room."""
        receivers = list(self._receivers.values())
        states, _ = self._node.poll_many(receivers)
        for receiver in receivers:
            if receiver.error is not None:
                raise receiver.error
        complete: NDArray[np.bool_] = states == State.SUCCESS
        return complete

    def row(self, room: str) -> AuxRow:
        """The row that prefill gave with the caches."""
        row = self._receivers[room].aux
        assert isinstance(row, AuxRow), "a Success without the row that prefill gave"
        return row

    def token(self, room: str) -> int:
        """The room's first new token, which prefill computed."""
        return int(self.row(room)["output_ids"][0])

    def pause(self) -> None:
        """Waits briefly, or until something arrives."""
        self._node.turn(PAUSE_S)

    def turn(self) -> None:
        self._node.turn()

    def close(self) -> None:
        self._node.close()
        self._watching.close()

"""How the demo's ranks use the public API: the part of an engine that a reader would copy.

Layer 6 (demo). The only module here that calls the manager; must not know models.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pdstage import DecodeNode, Items, Pool, PrefillNode, State, Topology
from pdstage.control.bootstrap import BootstrapServer
from pdstage.demo.paged import NHD, pages_for
from pdstage.errors import DeadlineExceeded
from pdstage.tensors import build, paged_hnd, sglang_mha

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import numpy as np
    from numpy.typing import NDArray

    from pdstage import Receiver
    from pdstage.demo.paged import PagedKV

COMPONENT = "kv"
STAGING_NBYTES = 16 << 20
PAUSE_S = 0.005
TOKEN = struct.Struct("<i")


class Moved(NamedTuple):
    """What a prefill rank wrote for one room."""

    nbytes: int
    descriptors: int
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank among its side's, and how it reaches the other side. `bootstrap` is HOST:PORT of the directory."""

    tp: int
    rank: int
    kv_heads: int
    transport: str
    path: str
    bootstrap: str
    deadline_s: float

    @property
    def topology(self) -> Topology:
        return Topology(tp_size=self.tp, tp_rank=self.rank)


def serve_directory(_: None, pipe: Connection) -> None:
    """Runs the bootstrap directory on a free loopback port, says which, and ends on the first message."""
    with BootstrapServer() as server:
        pipe.send(server.address)
        pipe.recv()


def pool_of(kv: PagedKV, place: Place) -> Pool:
    """Describes a rank's tensors to pdstage: every layer's K and V, by the memory order they are in."""
    tp = (place.tp, place.rank)
    if kv.shape.order == NHD:
        part = sglang_mha(kv.k, kv.v, page_size=kv.shape.page_size, total_heads=place.kv_heads, tp=tp)
    else:
        part = paged_hnd(kv.k, kv.v, total_heads=place.kv_heads, tp=tp)
    return Pool.of(build(part), keep=kv)


class SendingSide:
    """A prefill rank's node. Rooms are sent one at a time, so that what each moved can be told apart."""

    def __init__(self, kv: PagedKV, place: Place) -> None:
        self._page = kv.shape.page_size
        self._deadline_s = place.deadline_s
        self._node = PrefillNode(
            pool_of(kv, place),
            place.topology,
            transport=place.transport,
            bootstrap=place.bootstrap,
            path=place.path,
            staging_nbytes=STAGING_NBYTES,
        )
        self._before = self._node.stats()

    def open(self, room: str) -> None:
        self._sender = self._node.send(room)

    def chunk(self, pages: NDArray[np.int32], start: int, stop: int) -> None:
        """Hands over tokens `[start, stop)`; the write goes on while the next chunk is computed."""
        first = start // self._page
        items = Items(pages[first : pages_for(stop, self._page)], first_token=first * self._page)
        self._sender.chunk({COMPONENT: items}, tokens=(start, stop))
        self.turn()

    def finish(self, token: int) -> None:
        self._sender.finish(aux=TOKEN.pack(token))

    def settle(self) -> Moved:
        """Waits until the room's pages may be reused; says what was moved for it."""
        try:
            self._sender.wait(self._deadline_s)
            self._sender.wait_released(self._deadline_s)
        except TimeoutError as late:
            raise DeadlineExceeded(str(late), remedy="try fewer ranks or requests") from late
        now, before = self._node.stats(), self._before
        self._before = now
        moved = {name: count - before[name] for name, count in now.items()}
        paths = tuple(path for path in ("staged", "direct") if moved[f"chunks_{path}"])
        return Moved(moved["bytes_written"], moved["descriptors"], paths)

    @property
    def transport(self) -> str:
        """The transport in use, which "auto" chose."""
        return self._node.transport.traits.name

    def turn(self) -> None:
        self._node.turn()

    def close(self) -> None:
        self._node.close()


class ReceivingSide:
    """A decode rank's node: asks for rooms, each into pages of its own."""

    def __init__(self, kv: PagedKV, place: Place) -> None:
        self._bootstrap = place.bootstrap
        self._node = DecodeNode(
            pool_of(kv, place),
            place.topology,
            transport=place.transport,
            path=place.path,
            staging_nbytes=STAGING_NBYTES,
        )
        self._receivers: dict[str, Receiver] = {}

    def expect(self, room: str, pages: NDArray[np.int32], n_tokens: int) -> None:
        """Asks for `n_tokens` tokens of `room`, to be put into `pages`."""
        receiver = self._node.receive(room, prefill=self._bootstrap)
        receiver.bind({COMPONENT: Items(pages, first_token=0)}, tokens={COMPONENT: (0, n_tokens)})
        self._receivers[room] = receiver

    def poll(self) -> NDArray[np.bool_]:
        """Per room, in the order asked for: whether all of it is here. Raises the error of a room that failed."""
        receivers = list(self._receivers.values())
        states, _ = self._node.poll_many(receivers)
        for receiver in receivers:
            if receiver.error is not None:
                raise receiver.error
        complete: NDArray[np.bool_] = states == State.SUCCESS
        return complete

    def token(self, room: str) -> int:
        """The room's first new token, which prefill computed."""
        (token,) = TOKEN.unpack(self._receivers[room].aux or b"")
        return int(token)

    def pause(self) -> None:
        """Waits a moment, or until something comes."""
        self._node.turn(PAUSE_S)

    def turn(self) -> None:
        self._node.turn()

    def close(self) -> None:
        self._node.close()

"""A server's ranks at pdstage: a node each, and rooms that all ranks have together.

Layer 6 (demo). The only module here that calls the manager: what an engine's author would copy. Must not know models,
schedulers or HTTP. One thread uses it, the scheduler's; nodes make progress in its polls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdstage import Config, DecodeNode, Items, PrefillNode, State
from pdstage.demo.pools import PagedPool, pages_for
from pdstage.demo.serve.options import PREFILL
from pdstage.demo.transfer import pool_of
from pdstage.errors import Aborted, PdstageError
from pdstage.watch.option import Watching

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from pdstage import Receiver, Sender
    from pdstage.demo.holding import Spans
    from pdstage.demo.pools import Pool, Room
    from pdstage.demo.serve.options import ServerOptions
    from pdstage.manager.observer import Observer

STAGING_NBYTES = 8 << 20
_TOKEN_NBYTES = 4
CLOSE_S = 2.0


def make_nodes(
    options: ServerOptions, pools: Sequence[Mapping[str, Pool]], observers: Sequence[Observer], watching: Watching
) -> list[Any]:
    """One node a rank, `PrefillNode`s or `DecodeNode`s by the role; prefill's first one holds the directory.

    All nodes of a server are made here: whoever watches or traces them begins here.
    """
    # Who waits longer than a request may take waits for nobody.
    longest_s = options.listening.timeout_s
    config = Config(hello_s=min(30.0, longest_s), open_wait_s=longest_s, wait_s=longest_s, bind_s=longest_s)
    nodes: list[Any] = []
    try:
        for place, held in zip(options.places, pools, strict=True):
            common: dict[str, Any] = {
                "transport": options.transport, "path": options.path, "staging_nbytes": STAGING_NBYTES,
                "bind": f"tcp://{options.listening.host}:0", "config": config, "keys": options.keys,
                "observers": (*observers, *watching.observers),
            }  # fmt: skip
            if options.role == PREFILL:
                directory = nodes[0].bootstrap_address if nodes else None
                nodes.append(PrefillNode(pool_of(held, place), place, bootstrap=directory, **common))
            else:
                nodes.append(DecodeNode(pool_of(held, place), place, **common))
            watching.expose(nodes[-1])
    except PdstageError:
        close(nodes)
        raise
    return nodes


def close(nodes: Sequence[Any]) -> None:
    """Lets go of all peers. The directory, which the first one holds, goes last."""
    for node in reversed(nodes):
        node.close(CLOSE_S)


class Said(NamedTuple):
    """How a room stands on all ranks: it has come when it has come on each, and its pages are free when all agree."""

    state: State
    released: bool


class _Side:
    """What both sides do. A room is known by its handles, one a rank."""

    def __init__(
        self, options: ServerOptions, pools: Sequence[Mapping[str, Pool]], observers: Sequence[Observer]
    ) -> None:
        self._watching = Watching(options.metrics_port)
        self.nodes = make_nodes(options, pools, observers, self._watching)

    def poll(self, rooms: Sequence[Sequence[Any]]) -> list[Said]:
        """One turn of every node, and the least that its ranks say of each room."""
        states, released = zip(
            *(node.poll_many([handles[rank] for handles in rooms]) for rank, node in enumerate(self.nodes)), strict=True
        )
        lowest, free = np.min(states, axis=0).tolist(), np.min(released, axis=0).tolist()
        return [Said(State(state), bool(done)) for state, done in zip(lowest, free, strict=True)]

    def error_of(self, room: Sequence[Any]) -> PdstageError:
        return next((handle.error for handle in room if handle.error is not None), Aborted("the room was given up"))

    def abort(self, room: Sequence[Any], reason: str) -> None:
        """Gives a room up on all ranks; on those where it ended this changes nothing."""
        for handle in room:
            handle.abort(reason)

    def stats(self) -> dict[str, int]:
        """The nodes' counters, added up."""
        names = dict.fromkeys(name for node in self.nodes for name in node.stats())
        return {name: sum(node.stats().get(name, 0) for node in self.nodes) for name in names}

    def close(self) -> None:
        close(self.nodes)
        self._watching.close()


class PrefillSide(_Side):
    """Hands chunks over as they are computed."""

    def __init__(
        self, options: ServerOptions, pools: Sequence[Mapping[str, Pool]], observers: Sequence[Observer]
    ) -> None:
        super().__init__(options, pools, observers)
        self._pages = {n: p.shape.page_size for n, p in pools[0].items() if isinstance(p, PagedPool)}

    @property
    def address(self) -> str:
        """Of the directory: what decode ranks look this server up by."""
        address: str = self.nodes[0].bootstrap_address
        return address

    def open(self, room: str) -> list[Sender]:
        return [node.send(room) for node in self.nodes]

    def chunk(self, senders: Sequence[Sender], tables: Room, spans: Spans) -> None:
        """The tokens `spans` are in the pools now; the write goes on while the next chunk is computed."""
        items = {name: self._items(name, tables, *span) for name, span in spans.items()}
        for sender in senders:
            sender.chunk(items, tokens=spans)

    def _items(self, component: str, tables: Room, start: int, stop: int) -> Items:
        """The pages that tokens `[start, stop)` lie in, or the slot."""
        table, page = tables[component], self._pages.get(component)
        if page is None:
            return Items(table.items)
        first, before = start // page, table.first_token // page
        return Items(table.items[first - before : pages_for(stop, page) - before], first_token=first * page)

    def finish(self, senders: Sequence[Sender], token: int) -> None:
        """All chunks were handed over; `token` is the first of the answer."""
        for sender in senders:
            sender.finish(aux=token.to_bytes(_TOKEN_NBYTES, "little"))


class DecodeSide(_Side):
    """Asks for rooms, and says where to put them once there is a place."""

    def announce(self, room: str, prefill: str, deadline_s: float) -> list[Receiver]:
        """`room` will come from the server whose directory is at `prefill`."""
        return [node.receive(room, prefill=prefill, deadline_s=deadline_s) for node in self.nodes]

    def is_computed(self, receivers: Sequence[Receiver]) -> bool:
        """Whether prefill has all of the room, and waits only for a place to put it."""
        return all(receiver.ready_to_bind for receiver in receivers)

    def bind(self, receivers: Sequence[Receiver], tables: Room) -> None:
        items = {name: Items(table.items, table.first_token) for name, table in tables.items()}
        # A room's pages reach further than its prompt: decode goes on in them.
        tokens = {name: (table.start, table.stop) for name, table in tables.items()}
        for receiver in receivers:
            receiver.bind(items, tokens)

    def token(self, receivers: Sequence[Receiver]) -> int:
        """The first token of the answer, once the room has come."""
        said = {bytes(receiver.aux) for receiver in receivers if isinstance(receiver.aux, bytes)}
        if len(said) != 1:
            raise PdstageError(f"ranks were told {len(said)} different first tokens", remedy="report this as a bug")
        return int.from_bytes(said.pop(), "little")

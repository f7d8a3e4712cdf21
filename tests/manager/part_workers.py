"""What the eight processes of test_parts.py run: prefill and decode ranks that hold parts of the tokens."""

from __future__ import annotations

import traceback
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from pdstage import Items, TokenShard
from tests.manager.engine import LAYERS, Rank, decode_node, drive, prefill_node, truth
from tests.owners import items_for, place_of

ROOMS = {0: 50, 1: 1, 2: 133}
"""Tokens of each room."""
PREFIX = {0: 0, 1: 0, 2: 29}
STEP = 48


class Side(NamedTuple):
    """How an engine cuts tokens and heads: `cp` ranks by blocks of `interleave` (0 for contiguous) times `tp`."""

    cp: int
    interleave: int
    tp: int
    page: int
    hnd: bool


class Job(NamedTuple):
    name: str
    prefill: bool
    side: Side
    number: int
    transport: str
    path: str


def serve(pipe: Connection, address: str) -> None:
    """One job after the other; each answers with what went wrong, nothing if all is well."""
    while (job := pipe.recv()) is not None:
        try:
            wrong = (send if job.prefill else receive)(pipe, address, job)
        except Exception:  # noqa: BLE001  (the parent says it)
            wrong = traceback.format_exc()
        pipe.send(wrong)


def rank_of(job: Job) -> Rank:
    cp_rank, tp_rank = divmod(job.number, job.side.tp)
    side = job.side
    owned = TokenShard(side.cp, cp_rank, side.interleave)
    return Rank(side.tp, tp_rank, page=side.page, n_pages=96, hnd=side.hnd, owned=owned)


def items_of(rank: Rank, room: int, since: int = 0) -> Items:
    """The room's pages: none is another room's."""
    numbers = np.random.default_rng(rank.owned.rank).permutation(rank.n_pages)[32 * room : 32 * room + 34]
    return Items(*items_for(rank.owned, ROOMS[room], rank.page, numbers[:32] if room < 2 else numbers, since))


def fill(rank: Rank, room: int, items: Items, since: int = 0) -> None:
    """The room's truth for every token that the rank holds from `since` on."""
    places = place_of(rank.owned, ROOMS[room])
    for layer in range(LAYERS):
        for role, tensors in (("k", rank.k), ("v", rank.v)):
            values = truth(room, layer, role, ROOMS[room], rank.heads)
            for token, place in places.items():
                if token >= since:
                    page, t = divmod(place - items.first_token, rank.page)
                    rank._row(tensors[layer], items.pages[page], t)[:] = values[token]


def send(pipe: Connection, address: str, job: Job) -> str:
    rank = rank_of(job)
    with prefill_node(rank, address, transport=job.transport, path=job.path, instance=job.name) as node:
        pipe.send("")
        senders = []
        for room, n in ROOMS.items():
            items = items_of(rank, room)
            fill(rank, room, items)
            sender = node.send(room)
            low, high = rank.owned.part_of(n) if rank.owned.contiguous else (0, n)
            for start in range(low, high, STEP):
                sender.chunk({"kv": items}, {"kv": (start, min(high, start + STEP))})
            sender.finish(aux=b"%d" % room)
            senders.append(sender)
        drive([node], lambda: all(sender.released for sender in senders))
        wrong = [str(sender.error) for sender in senders if sender.error is not None]
        drive([node], pipe.poll)
        pipe.recv()
    return "; ".join(wrong)


def receive(pipe: Connection, address: str, job: Job) -> str:
    rank, truthful = rank_of(job), rank_of(job)
    with decode_node(rank, transport=job.transport, path=job.path) as node:
        pipe.send("")
        pipe.recv()
        receivers = []
        for room, n in ROOMS.items():
            items = items_of(rank, room, PREFIX[room])
            fill(truthful, room, items, PREFIX[room])
            receivers.append(node.receive(room, address, instance=job.name))
            receivers[-1].bind({"kv": items}, {"kv": (0, n)} if PREFIX[room] == 0 else {"kv": (PREFIX[room], n)})
        drive([node], lambda: all(receiver.released for receiver in receivers))
        wrong = [str(receiver.error) for receiver in receivers if receiver.error is not None]
        for layer in range(LAYERS):
            for role, got, want in (("k", rank.k, truthful.k), ("v", rank.v, truthful.v)):
                pages = np.unique(np.nonzero(got[layer] != want[layer])[0])
                wrong += [f"{role} of layer {layer} differs in pages {pages}"] if len(pages) else []
    return "; ".join(wrong)

"""An engine in miniature: paged pools, two schedulers, prefill and decode in two processes. pdstage moves the KV cache.

    python docs/examples/engine.py

The model (toy_model.py) is a toy, but its caches are real: each answer is compared with the same model in one process.
One request's client goes away, one request fails at prefill and is sent again.
"""

from __future__ import annotations

import multiprocessing
import queue
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
from toy_model import DIM, HEADS, LAYERS, VOCABULARY, alone, forward, next_token, store

from pdstage import DecodeNode, Key, Pool, PrefillNode, State, Topology
from pdstage.probe import Cell, LayerProbe, prove_layout
from pdstage.tensors import build, paged_nhd

CHUNK, N_NEW = 32, 8  # tokens that prefill computes in one step; tokens of an answer
BROKEN = ["request-3"]  # rooms at which prefill's model fails, once


class Pages:
    """An engine's KV memory, `[layer, page, token, head, dim]` for K and for V, and which pages are free."""

    def __init__(self, n_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.k = np.zeros((LAYERS, n_pages, page_size, HEADS, DIM), np.float32)
        self.v = np.zeros_like(self.k)
        self.free = list(range(n_pages))

    def pool(self) -> Pool:
        """What pdstage is told of this memory, once; `tp` is this rank's (size, rank). The model's own cache write
        proves that K and V are where the layout says.
        """
        layout = build(paged_nhd(self.k, self.v, total_heads=HEADS, tp=(1, 0)))
        keys = [(Key("kv", "k", layer), Key("kv", "v", layer)) for layer in range(LAYERS)]
        prove_layout(
            layout, [LayerProbe(f"layers.{k.layer}", "toy", (k, v), partial(self.write, k, v)) for k, v in keys]
        )
        return Pool.of(layout, keep=(self.k, self.v))

    def write(self, k: Key, v: Key, cells: Sequence[Cell], rng: np.random.Generator) -> dict[Key, Any]:
        """Stores K and V drawn from `rng`, and says as which bytes, `[cell, head, byte]`."""
        drawn = rng.standard_normal((2, len(cells), HEADS, DIM), np.float32)
        for cell, *values in zip(cells, *drawn, strict=True):
            store(self, np.s_[k.layer, cell.item, cell.token], *values)
        return {k: drawn[0].view(np.uint8), v: drawn[1].view(np.uint8)}

    def count(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_size)

    def take(self, n_tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(self.count(n_tokens))]


@dataclass(eq=False)
class Request:
    room: str
    prompt: list[int]
    pages: list[int] = field(default_factory=list)
    handle: Any = None  # a Sender or a Receiver
    n_done: int = 0
    answer: list[int] = field(default_factory=list)


class Scheduler:
    """What both sides do: take requests while there are pages, and take pages back once pdstage lets go of them."""

    def __init__(self, pages: Pages, node: Any, inbox: Queue[Any], outbox: Queue[Any], prefill: str) -> None:
        self.pages, self.node, self.inbox, self.outbox, self.prefill = pages, node, inbox, outbox, prefill
        self.waiting, self.running, self.leaving = deque[Request](), list[Request](), list[Request]()

    def run(self) -> None:
        n_pages, order = len(self.pages.free), None
        while order != "stop" or self.waiting or self.running or self.leaving:
            with suppress(queue.Empty):  # an idle scheduler waits a little, so that the node is still polled
                order = self.inbox.get(not self.running and order != "stop", 0.005)
                if order[1] == "abort":
                    self.abort(order[0])
                elif order != "stop":
                    self.waiting.append(Request(*order))
            while self.waiting and self.pages.count(self.size(self.waiting[0])) <= len(self.pages.free):
                request = self.waiting.popleft()
                request.pages = self.pages.take(self.size(request))
                self.begin(request)
                self.running.append(request)
            self.step()
            self.reclaim()
        assert len(self.pages.free) == n_pages

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.leaving.append(request)

    def reclaim(self) -> None:
        _, released = self.node.poll_many([request.handle for request in self.leaving])
        for request in [self.leaving[i] for i in np.flatnonzero(released)]:
            self.leaving.remove(request)
            self.pages.free += request.pages  # not at Success or Failed: a write may still read or fill them

    def size(self, request: Request) -> int:
        return len(request.prompt)

    def begin(self, request: Request) -> None: ...
    def step(self) -> None: ...
    def abort(self, room: str) -> None: ...


class Prefill(Scheduler):
    def begin(self, request: Request) -> None:
        request.handle = self.node.send(request.room)

    def step(self) -> None:
        for request in list(self.running):  # a batch with a chunk of each
            sender, start = request.handle, request.n_done
            stop = request.n_done = min(start + CHUNK, len(request.prompt))
            if sender.state is State.FAILED:  # decode gave the room up, or is gone
                self.leave(request)
            elif request.room in BROKEN:
                BROKEN.remove(request.room)
                sender.abort("the model failed")  # decode sees Failed, with these words
                self.leave(request)
            else:
                forward(self.pages, request.pages, start, request.prompt[start:stop])
                sender.chunk(request.pages, tokens=(start, stop))  # leaves while the next chunk is computed
                if stop == len(request.prompt):
                    first = next_token(self.pages, request.pages, stop, request.prompt[-1])
                    sender.finish(aux=first.to_bytes(4, "little"))
                    self.leave(request)


def prefill(inbox: Queue[Any], outbox: Queue[Any]) -> None:
    pages = Pages(n_pages=64, page_size=16)
    with PrefillNode(pages.pool(), Topology()) as node:
        outbox.put(node.directory_address)
        Prefill(pages, node, inbox, outbox, "").run()


class Decode(Scheduler):
    def size(self, request: Request) -> int:
        return len(request.prompt) + N_NEW

    def begin(self, request: Request) -> None:
        request.handle = self.node.receive(request.room, directory=self.prefill)
        request.handle.bind(request.pages[: self.pages.count(len(request.prompt))], tokens=len(request.prompt))

    def step(self) -> None:
        states, _ = self.node.poll_many([request.handle for request in self.running])  # one turn, one lock for all
        for request, state in zip(list(self.running), states, strict=True):
            if state == State.FAILED:
                self.outbox.put((request.room, None, str(request.handle.error)))
                self.leave(request)
            elif state == State.SUCCESS:  # a batch with a token of each that has arrived
                request.answer = answer = request.answer or [int.from_bytes(request.handle.aux, "little")]
                n_cached = len(request.prompt) + len(answer)
                forward(self.pages, request.pages, n_cached - 1, answer[-1:])
                answer.append(next_token(self.pages, request.pages, n_cached, answer[-1]))
                if len(answer) == N_NEW:
                    self.outbox.put((request.room, answer, ""))
                    self.leave(request)

    def abort(self, room: str) -> None:
        for request in (one for one in self.running if one.room == room):
            request.handle.abort("the client went away")  # Failed here and at prefill; `released` comes later


def decode(inbox: Queue[Any], outbox: Queue[Any], address: str) -> None:
    pages = Pages(n_pages=160, page_size=8)  # another page size than prefill's
    with DecodeNode(pages.pool(), Topology()) as node:
        Decode(pages, node, inbox, outbox, address).run()


def main() -> int:
    drawn = np.random.default_rng(1)
    prompts = {f"request-{i}": drawn.integers(0, VOCABULARY, drawn.integers(20, 300)).tolist() for i in range(12)}
    context = multiprocessing.get_context("spawn")
    to_prefill, to_decode, addresses, answers = (context.Queue() for _ in range(4))
    ranks = [context.Process(target=prefill, args=(to_prefill, addresses))]
    ranks[0].start()
    ranks.append(context.Process(target=decode, args=(to_decode, answers, addresses.get(timeout=60))))
    ranks[1].start()
    for room, prompt in prompts.items():  # either side may hear of a room first
        to_decode.put((room, prompt))
        if room != "request-0":  # prefill never hears of it, and its client goes away
            to_prefill.put((room, prompt))
    to_decode.put(("request-0", "abort"))
    done: dict[str, list[int]] = {}
    while len(done) < len(prompts):
        room, answer, why = answers.get(timeout=60)
        if why:
            print(f"{room} failed: {why}")
        if why and room == "request-3":  # the room has ended, so its name may be used again
            to_decode.put((room, prompts[room]))
            to_prefill.put((room, prompts[room]))
        else:
            done[room] = answer
    for rank, orders in zip(ranks, (to_prefill, to_decode), strict=True):
        orders.put("stop")
        rank.join(60)
    right = sum(answer == alone(Pages(64, 16), prompts[room], N_NEW) for room, answer in done.items())
    print(f"{right} right answers of {len(prompts) - 1}; the ranks ended with {[rank.exitcode for rank in ranks]}")
    return 0 if right == len(prompts) - 1 and not any(rank.exitcode for rank in ranks) else 1


if __name__ == "__main__":
    raise SystemExit(main())

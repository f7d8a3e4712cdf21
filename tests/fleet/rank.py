"""One rank: a node and a small engine that obeys lines of JSON.

    python -m tests.fleet.rank '{"role": "prefill", ...}'

Orders come on stdin, one a line: `room`, `report`, `close`. What it says on stdout is JSON too: `up`, `ended`,
`report`, `closed`. Every byte of a page and of an aux row is a function of the room's number, and is
compared at decode; a page that was given back must stay as it is until it is lent again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import signal
import sys
import threading
import time

import numpy as np

from pdstage import Config, DecodeNode, PdstageError, Pool, PrefillNode, State, Topology, TransportError
from pdstage.tensors import build, mamba_ssm, paged_hnd, paged_nhd
from tests import descriptors, processes
from tests.chaos import truth

HEADS, DIM = truth.HEADS, truth.DIM
STATE = (8, 16)
"""Rows and columns of a head's recurrent state."""
SLOTS = 64
_CHUNK = 128
"""Tokens that prefill computes in one step."""
_STARTS_S = 120.0
_SWEEP_S = 1.0


class Memory:
    """An engine's pages of K and V, and slots of states, of `layers` layers; which are free."""

    def __init__(self, job: dict) -> None:
        tp, rank, self.page = job["tp"], job["rank"], job["page"]
        n_heads = HEADS // tp
        self.heads, self.hnd, self.layers = range(rank * n_heads, (rank + 1) * n_heads), job["hnd"], job["layers"]
        n_pages = job["tokens"] // self.page
        inner = (n_heads, self.page) if self.hnd else (self.page, n_heads)
        self.kv = np.zeros((self.layers, 2, n_pages, *inner, DIM), np.uint8)
        self.states = np.zeros((self.layers, SLOTS, n_heads, *STATE), np.uint8)
        make = paged_hnd if self.hnd else paged_nhd
        parts = [make(list(self.kv[:, 0]), list(self.kv[:, 1]), total_heads=HEADS, tp=(tp, rank))]
        self.slots = list(range(SLOTS)) if job["hybrid"] else []
        if job["hybrid"]:
            parts.append(mamba_ssm(list(self.states), total_heads=HEADS, tp=(tp, rank)))
        self.pool = Pool.of(build(*parts), keep=(self.kv, self.states))
        self.free = list(range(n_pages))
        self._left: dict[int, bytes] = {}
        """Free pages that were lent before, with what they held when they were given back."""

    def count(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def has(self, tokens: int) -> bool:
        return self.count(tokens) <= len(self.free) and (bool(self.slots) or not self._hybrid)

    @property
    def _hybrid(self) -> bool:
        return len(self.pool.layout.components) > 1

    def take(self, tokens: int) -> tuple[list[int], list[int]]:
        pages = [self.free.pop() for _ in range(self.count(tokens))]
        for page in pages:
            self._left.pop(page, None)
        return pages, [self.slots.pop()] if self._hybrid else []

    def give_back(self, pages: list[int], slots: list[int]) -> None:
        self.free += pages
        self.slots += slots
        for page in pages:
            self._left[page] = self.kv[:, :, page].tobytes()

    def altered(self) -> list[str]:
        """Free pages that changed after they were given back."""
        changed = [page for page, left in self._left.items() if self.kv[:, :, page].tobytes() != left]
        for page in changed:
            self._left[page] = self.kv[:, :, page].tobytes()
        return [f"page {page} changed while it was free" for page in changed]

    def fill(self, serial: int, pages: list[int], start: int, stop: int) -> None:
        for layer in range(self.layers):
            for role in range(2):
                rows = truth.rows(serial, layer, role, range(start, stop), self.heads)
                tokens = np.arange(start, stop)
                where = np.asarray(pages)[tokens // self.page], tokens % self.page
                self._by_token(layer, role)[where] = rows

    def fill_state(self, serial: int, slots: list[int]) -> None:
        for layer in range(self.layers if slots else 0):
            self.states[layer, slots[0]] = self._state(serial, layer)

    def differs(self, serial: int, pages: list[int], slots: list[int], tokens: int) -> str:
        """What is not as prefill wrote it, in words."""
        at = np.arange(tokens)
        where = np.asarray(pages)[at // self.page], at % self.page
        for layer in range(self.layers):
            for role in range(2):
                must = truth.rows(serial, layer, role, range(tokens), self.heads)
                if not np.array_equal(self._by_token(layer, role)[where], must):
                    return f"K and V of layer {layer} differ"
            if slots and not np.array_equal(self.states[layer, slots[0]], self._state(serial, layer)):
                return f"the state of layer {layer} differs"
        return ""

    def _by_token(self, layer: int, role: int) -> np.ndarray:
        """`[page, token, head, dim]`, a view."""
        held = self.kv[layer, role]
        return held.transpose(0, 2, 1, 3) if self.hnd else held

    def _state(self, serial: int, layer: int) -> np.ndarray:
        """`[head, rows, columns]`: the first bytes of heads of a token that no room has."""
        n_tokens = STATE[0] * STATE[1] // DIM
        rows = truth.rows(serial, layer, 2, range(n_tokens), self.heads)
        return rows.transpose(1, 0, 2).reshape(len(self.heads), *STATE)


@dataclasses.dataclass(eq=False)
class Room:
    key: str
    serial: int
    tokens: int
    prefill: str = ""
    instance: str | None = None
    pages: list[int] = dataclasses.field(default_factory=list)
    slots: list[int] = dataclasses.field(default_factory=list)
    handle: object = None
    done: int = 0
    ended: bool = False


class Engine:
    def __init__(self, job: dict) -> None:
        self.job, self.memory = job, Memory(job)
        self.orders: queue.Queue = queue.Queue()
        self.waiting: list[Room] = []
        self.rooms: list[Room] = []
        self._sweep_at = 0.0
        known = {field.name for field in dataclasses.fields(Config)}
        config = Config(**{name: value for name, value in job["config"].items() if name in known})
        place = Topology(tp_size=job["tp"], tp_rank=job["rank"])
        common = {
            "transport": job["transport"], "path": job["path"], "config": config, "journal": job["journals"],
            "staging_nbytes": job["staging_nbytes"], "bind": f"tcp://{job['host']}:{job['port']}",
            "progress": job["progress"], "keys": job["keys"],
            "insecure": job["host"] != "127.0.0.1" and not job["keys"],
        }  # fmt: skip
        if job["role"] == "prefill":
            common |= {"instance": job["instance"], "bootstrap": job["directory"] or None}
        self.node = self._open(PrefillNode if job["role"] == "prefill" else DecodeNode, place, common)

    def _open(self, kind: type, place: Topology, named: dict[str, object]) -> PrefillNode | DecodeNode:
        """As an orchestrator that starts a rank again while its directory is away."""
        until = time.monotonic() + _STARTS_S
        while True:
            try:
                return kind(self.memory.pool, place, **named)
            except TransportError:
                if time.monotonic() > until:
                    raise

    def run(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        endpoint = self.node.socket.endpoint
        directory = self.node.bootstrap_address if self.job["role"] == "prefill" else ""
        say("up", endpoint=endpoint, directory=directory)
        while self._obey():
            self._begin()
            self._look()
        began = time.monotonic()
        free = self.node.close(self.job["close_s"])
        wrong = self.memory.altered() if free else []
        say("closed", free=free, seconds=round(time.monotonic() - began, 3), wrong=wrong)

    def _listen(self) -> None:
        for line in sys.stdin:
            self.orders.put(json.loads(line))
        self.orders.put({"do": "close"})

    def _obey(self) -> bool:
        """What has been ordered; False once it is to close."""
        try:
            # A node with a thread of its own needs no turns; an inline one gets its turns from polling.
            turn_s = self.job["turn_s"]
            order = self.orders.get(timeout=turn_s if self.rooms or self.waiting else 10 * turn_s)
        except queue.Empty:
            return True
        match order.pop("do"):
            case "room":
                self.waiting.append(Room(**order))
            case "report":
                self._report()
            case "close":
                return False
        return self._obey() if not self.orders.empty() else True

    def _report(self) -> None:
        unfenced = self.node.unfenced() if self.job["role"] == "decode" else {}
        say(
            "report", rooms=len(self.rooms) + len(self.waiting), lent=self.memory.kv.shape[2] - len(self.memory.free),
            resident_nbytes=processes.resident_nbytes(), descriptors=descriptors.kinds(), threads=processes.n_tasks(),
            stats=self.node.stats(), unfenced=sum(unfenced.values()), wrong=self.memory.altered(),
        )  # fmt: skip

    def _begin(self) -> None:
        while self.waiting and self.memory.has(self.waiting[0].tokens):
            room = self.waiting.pop(0)
            room.pages, room.slots = self.memory.take(room.tokens)
            try:
                if self.job["role"] == "prefill":
                    room.handle = self.node.send(room.key)
                else:
                    room.handle = self.node.receive(
                        room.key, prefill=room.prefill, instance=room.instance, deadline_s=self.job["room_s"]
                    )
                    room.handle.bind(self._items(room), tokens={"kv": (0, room.tokens)})
            except PdstageError as error:
                self.memory.give_back(room.pages, room.slots)
                say("ended", key=room.key, why=str(error), wrong="")
            else:
                self.rooms.append(room)

    def _items(self, room: Room) -> dict[str, list[int]]:
        return {"kv": room.pages} | ({"mamba": room.slots} if room.slots else {})

    def _look(self) -> None:
        states, released = self.node.poll_many([room.handle for room in self.rooms])
        left = []
        for room, state, free in zip(self.rooms, states.tolist(), released.tolist(), strict=True):
            if not room.ended and self.job["role"] == "prefill" and room.done < room.tokens and state != State.FAILED:
                self._compute(room)
            if not room.ended and state in (State.SUCCESS, State.FAILED):
                room.ended = True
                why = "" if state == State.SUCCESS else str(room.handle.error)
                wrong = self._differs(room) if not why and self.job["role"] == "decode" else ""
                say("ended", key=room.key, why=why, wrong=wrong)
            if room.ended and free:
                self.memory.give_back(room.pages, room.slots)
            else:
                left.append(room)
        self.rooms = left
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + _SWEEP_S
            for what in self.memory.altered():
                say("wrong", what=what)

    def _compute(self, room: Room) -> None:
        start, stop = room.done, min(room.done + _CHUNK, room.tokens)
        self.memory.fill(room.serial, room.pages, start, stop)
        room.done = stop
        room.handle.chunk({"kv": room.pages[: self.memory.count(stop)]}, tokens={"kv": (start, stop)})
        if stop == room.tokens:
            self.memory.fill_state(room.serial, room.slots)
            states = {"mamba": room.slots} if room.slots else None
            room.handle.finish(aux=truth.aux(room.serial), states=states)

    def _differs(self, room: Room) -> str:
        if bytes(room.handle.aux or b"") != truth.aux(room.serial):
            return "the aux row differs"
        return self.memory.differs(room.serial, room.pages, room.slots, room.tokens)


def say(what: str, **fields: object) -> None:
    sys.stdout.write(json.dumps({"say": what, **fields}) + "\n")
    sys.stdout.flush()


def main() -> None:
    job = json.loads(sys.argv[1])
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.enter(job["where"])
    os.environ["UCX_LOG_LEVEL"] = "fatal"  # what it says of killed peers fills the log
    if job["fabric"]:
        os.environ["UCX_TLS"] = job["fabric"]
    Engine(job).run()


if __name__ == "__main__":
    main()

"""What a rank's engine does with its rooms: takes pages, polls, reuses what is released at once, gives up now and then.

An engine knows its own node and pages, and nothing of the other ranks. Time is time awake: it stands still while the
process is stopped.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter, deque
from itertools import pairwise
from typing import NamedTuple

from pdstage import AuxRow, DecodeNode, PrefillNode, State
from pdstage.manager.handle import Handle
from tests.chaos import truth
from tests.chaos.pages import Pages
from tests.chaos.plan import HUNG_AFTER_S, ROOM_S
from tests.chaos.rows import Rows, make_rows, read

ABORTS = 0.04
_SWEEP_S = 0.25
_LONGEST_STEP_S = 0.5


class Order(NamedTuple):
    """The router's word: this room is to be served. A room that failed may be ordered again, with the same content."""

    key: str
    serial: int
    tokens: int
    prefix: int
    calm: bool = False
    """No rank shall give it up by itself."""


class Awake:
    """A clock that counts no step longer than half a second: longer ones were spent stopped."""

    def __init__(self) -> None:
        self.now = 0.0
        self._at = time.monotonic()

    def step(self) -> None:
        at = time.monotonic()
        self.now += min(at - self._at, _LONGEST_STEP_S)
        self._at = at


class Room:
    """One order at one rank, until its pages are given back."""

    def __init__(self, order: Order, handle: Handle, pages: list[int], now: float) -> None:
        self.order, self.handle, self.pages, self.since = order, handle, pages, now
        self.ended = self.hung = False
        self.ended_at = now
        self.hold_until = now
        self.row: AuxRow | None = None
        self.steps: deque = deque()
        """(time, what to do), in order."""


class Engine:
    """What both roles do alike. `say(kind, value)` reports to the supervisor."""

    def __init__(self, node, pages: Pages, rng: random.Random, say, *, sabotage: bool = False) -> None:
        self.node, self.pages, self.rng, self.say = node, pages, rng, say
        self.clock = Awake()
        self.sabotage = sabotage
        self.waiting: deque[Order] = deque()
        self.rooms: list[Room] = []
        self.counts: Counter[str] = Counter()
        self._sweep_at = 0.0
        self.rows = Rows(node.metadata or make_rows(), rng)

    def order(self, order: Order) -> None:
        self.waiting.append(order)

    def step(self) -> None:
        """Once around the engine's loop; in inline mode this is where the node gets its turn."""
        self.clock.step()
        states, released = self.node.poll_many([room.handle for room in self.rooms])
        rooms, self.rooms = self.rooms, []
        for room, state, free in zip(rooms, states.tolist(), released.tolist(), strict=True):
            if self._look(room, state, bool(free)):
                self.rooms.append(room)
        while self.waiting and self.pages.n_for(self.waiting[0].tokens) <= self.pages.n_free:
            self.rooms.append(self._begin(self.waiting.popleft()))
        if self.clock.now >= self._sweep_at:
            self._sweep_at = self.clock.now + _SWEEP_S
            self.wrong(self.pages.sweep() + self.rows.sweep())

    def kept_back(self, longer_than_s: float) -> float:
        """The part of the pool in pages of rooms that ended so long ago and were not released."""
        late = self.clock.now - longer_than_s
        return sum(len(room.pages) for room in self.rooms if room.ended and room.ended_at < late) / self.pages.n_pages

    def wrong(self, found: list[str]) -> None:
        for what in found:
            self.counts["wrong"] += 1
            self.say("wrong", what)

    def _look(self, room: Room, state: int, free: bool) -> bool:
        """False once the room's pages are given back."""
        while room.steps and room.steps[0][0] <= self.clock.now and not room.ended:
            room.steps.popleft()[1]()
        if not room.ended and state in (State.SUCCESS, State.FAILED):
            room.ended, room.ended_at = True, self.clock.now
            if state == State.SUCCESS:
                self._succeeded(room)
            self.say("ended", (room.order.key, "" if state == State.SUCCESS else reason(room.handle.error)))
        if not room.ended and not room.hung and self.clock.now - room.since > HUNG_AFTER_S:
            room.hung = True
            self.wrong([f"room {room.order} hangs in {State(state).name} after {self.clock.now - room.since:.1f} s"])
        if room.ended and (free or (self.sabotage and state == State.FAILED)) and self.clock.now >= room.hold_until:
            self.wrong(self.pages.give_back(room.pages))
            if room.row is not None and free:
                self.wrong(self.rows.give_back(room.row))
            return False
        return True

    def _begin(self, order: Order) -> Room:
        raise NotImplementedError

    def _succeeded(self, room: Room) -> None:
        raise NotImplementedError

    def _maybe_abort(self, room: Room) -> None:
        if not room.order.calm and self.rng.random() < ABORTS:
            at = self.clock.now + self.rng.choice((0.0, self.rng.uniform(0, 0.05), self.rng.uniform(0, 1.0)))
            room.steps.append((at, room.handle.abort))
            room.steps = deque(sorted(room.steps, key=lambda step: step[0]))


class DecodeEngine(Engine):
    node: DecodeNode

    def __init__(self, *args, directory: str, **options) -> None:
        super().__init__(*args, **options)
        self._directory = directory

    def _begin(self, order: Order) -> Room:
        pages = self.pages.allocate(order.tokens)
        handle = self.node.receive(order.key, self._directory, deadline_s=ROOM_S)
        room = Room(order, handle, pages, self.clock.now)
        late_s = self.rng.choice((0.0, 0.0, 0.0, self.rng.uniform(0, 0.2)))
        if late_s:
            room.steps.append((self.clock.now + late_s, lambda: self._bind(room)))
        else:
            self._bind(room)
        self._maybe_abort(room)
        return room

    def _bind(self, room: Room) -> None:
        self.wrong(self.pages.lend(room.pages))
        room.row = self.rows.take() if self.node.metadata is not None else None
        room.handle.bind(room.pages, room.order.tokens, prefix_tokens=room.order.prefix, aux=room.row)

    def _succeeded(self, room: Room) -> None:
        order = room.order
        self.wrong(self.pages.delivered(order.serial, room.pages, order.prefix, order.tokens))
        if (aux := read(room.handle.aux)) != truth.aux(order.serial):
            self.wrong([f"room {order} has aux {aux!r}"])
        if order.tokens % self.pages.page:
            self.pages.append(room.pages[-1])  # the request is decoded on, whether its writers are quiet or not
        room.hold_until = self.clock.now + self.rng.choice((0.0, self.rng.uniform(0, 0.1)))


class PrefillEngine(Engine):
    node: PrefillNode

    def _begin(self, order: Order) -> Room:
        pages = self.pages.allocate(order.tokens)
        room = Room(order, self.node.send(order.key), pages, self.clock.now)
        at, layerwise = self.clock.now, self.rng.random() < 0.2
        slow = self.rng.random() < 0.3
        for start, stop in self._cuts(order):
            at += self.rng.uniform(0, 0.1) if slow else 0.0
            room.steps.append((at, self._chunk(room, start, stop, layerwise)))
        room.steps.append((at, lambda: self._finish(room)))
        self._maybe_abort(room)
        while room.steps and room.steps[0][0] <= self.clock.now:
            room.steps.popleft()[1]()
        return room

    def _finish(self, room: Room) -> None:
        aux = truth.aux(room.order.serial)
        room.row = self.rows.take()
        if room.row is not None:
            room.row["aux"] = list(aux)
        room.handle.finish(aux=room.row if room.row is not None else aux)

    def _cuts(self, order: Order) -> list[tuple[int, int]]:
        inner = (
            {self.rng.randrange(1, order.tokens) for _ in range(self.rng.randrange(4))} if order.tokens > 1 else set()
        )
        marks = [0, *sorted(inner), order.tokens]
        return list(pairwise(marks))

    def _chunk(self, room: Room, start: int, stop: int, layerwise: bool):
        def hand_over() -> None:
            self.pages.fill(room.order.serial, room.pages, range(start, stop))
            for layers in [(0, 1), (1, truth.LAYERS)] if layerwise else [None]:
                room.handle.chunk(room.pages, (start, stop), layers=layers)

        return hand_over

    def _succeeded(self, room: Room) -> None:
        pass


def reason(error: BaseException | None) -> str:
    """An error's kind, without the names and numbers of one room."""
    text = str(error).split("; ")[0]
    text = re.sub(r"b?'[^']*'", "X", text)
    text = re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "N", text)
    return f"{type(error).__name__}: {text}"[:160]

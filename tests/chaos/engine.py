"""What a rank's engine does with its rooms: takes pages, polls, reuses what is released at once, gives up now and then.

An engine knows its own node and pages, and nothing of the other ranks. Time is time awake: it stands still while the
process is stopped.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from pdstage import DecodeNode, PrefillNode, State, UsageError
from pdstage.manager.handle import Handle
from tests.chaos.memory import LAYERS, Pages, aux_of
from tests.chaos.plan import HUNG_AFTER_S, ROOM_S

ABORTS = 0.04
_SWEEP_S = 0.25
_LONGEST_STEP_S = 0.5
"""A longer one was spent stopped."""


class Order(NamedTuple):
    """The router's word: this room is to be served. A room that failed may be ordered again, with the same content."""

    key: str
    serial: int
    tokens: int
    prefix: int
    instance: str
    calm: bool = False
    """No rank shall give it up by itself."""


class Room:
    """One order at one rank, until its pages are given back."""

    def __init__(self, order: Order, handle: Handle, pages: list[int], now: float) -> None:
        self.order, self.handle, self.pages, self.since = order, handle, pages, now
        self.ended = self.hung = False
        self.ended_at = self.hold_until = now
        self.steps: list[tuple[float, Callable[[], object]]] = []
        """When to do what, in order."""


class Engine:
    """What both roles do alike. `say(kind, value)` reports to the supervisor."""

    def __init__(self, node, pages: Pages, rng: random.Random, say) -> None:
        self.node, self.pages, self.rng, self.say = node, pages, rng, say
        self.ends_at = math.inf
        """When it is drained at the latest."""
        self.now, self._at = 0.0, time.monotonic()
        self.waiting: deque[Order] = deque()
        self.rooms: list[Room] = []
        self._sweep_at = 0.0

    def step(self) -> None:
        """Once around the engine's loop; in inline mode this is where the node gets its turn."""
        before, self._at = self._at, time.monotonic()
        self.now += min(self._at - before, _LONGEST_STEP_S)
        states, released = self.node.poll_many([room.handle for room in self.rooms])
        rooms, self.rooms = self.rooms, []
        for room, state, free in zip(rooms, states.tolist(), released.tolist(), strict=True):
            if self._look(room, state, bool(free)):
                self.rooms.append(room)
        while self.waiting and self.pages.n_for(self.waiting[0].tokens) <= len(self.pages.free):
            order = self.waiting.popleft()
            try:
                handle = self.open(order)
            except UsageError as error:  # it drains since
                self.say("ended", (order.key, str(error)))
                continue
            room = Room(order, handle, self.pages.allocate(order.tokens), self.now)
            self.begin(room)
            if not order.calm and self.rng.random() < ABORTS:
                at = self.now + self.rng.choice((0.0, self.rng.uniform(0, 0.05), self.rng.uniform(0, 1.0)))
                room.steps.append((at, room.handle.abort))
                room.steps.sort(key=lambda step: step[0])
            self.rooms.append(room)
        if self.now >= self._sweep_at:
            self._sweep_at = self.now + _SWEEP_S
            self.wrong(self.pages.sweep())

    def wrong(self, found: list[str]) -> None:
        for what in found:
            self.say("wrong", what)

    def _look(self, room: Room, state: int, free: bool) -> bool:
        """False once the room's pages are given back."""
        while room.steps and room.steps[0][0] <= self.now and not room.ended:
            room.steps.pop(0)[1]()
        if not room.ended and state in (State.SUCCESS, State.FAILED):
            room.ended, room.ended_at = True, self.now
            if state == State.SUCCESS:
                self.succeeded(room)
            self.say("ended", (room.order.key, "" if state == State.SUCCESS else str(room.handle.error)))
        if not room.ended and not room.hung and self.now - room.since > HUNG_AFTER_S:
            room.hung = True
            self.wrong([f"room {room.order} hangs in {State(state).name} after {self.now - room.since:.1f} s"])
        if room.ended and free and self.now >= room.hold_until:
            self.wrong(self.pages.give_back(room.pages))
            return False
        return True

    def open(self, order: Order) -> Handle:
        raise NotImplementedError

    def begin(self, room: Room) -> None:
        raise NotImplementedError

    def succeeded(self, room: Room) -> None:
        """Prefill has nothing to compare."""


class DecodeEngine(Engine):
    node: DecodeNode

    def __init__(self, *args, directory: str, **options) -> None:
        super().__init__(*args, **options)
        self._directory = directory

    def open(self, order: Order) -> Handle:
        return self.node.receive(order.key, self._directory, instance=order.instance, deadline_s=ROOM_S)

    def begin(self, room: Room) -> None:
        if self.rng.random() < 0.25:
            room.steps.append((self.now + self.rng.uniform(0, 0.2), lambda: self._bind(room)))
        else:
            self._bind(room)

    def _bind(self, room: Room) -> None:
        self.wrong(self.pages.lend(room.pages))
        room.handle.bind(room.pages, room.order.tokens, prefix_tokens=room.order.prefix)

    def succeeded(self, room: Room) -> None:
        order = room.order
        self.wrong(self.pages.delivered(order.serial, room.pages, order.prefix, order.tokens))
        if room.handle.aux != aux_of(order.serial):
            self.wrong([f"room {order} has aux {room.handle.aux!r}"])
        if order.tokens % self.pages.page:
            self.pages.append(room.pages[-1])  # the request is decoded on, whether its writers are quiet or not
        room.hold_until = self.now + self.rng.choice((0.0, self.rng.uniform(0, 0.1)))


class PrefillEngine(Engine):
    node: PrefillNode

    def open(self, order: Order) -> Handle:
        return self.node.send(order.key)

    def begin(self, room: Room) -> None:
        at, layerwise, tokens = self.now, self.rng.random() < 0.2, room.order.tokens
        slow = self.rng.random() < 0.3
        cuts = {self.rng.randrange(tokens) for _ in range(self.rng.randrange(4))}
        for start, stop in pairwise(sorted(cuts | {0, tokens})):
            at += self.rng.uniform(0, 0.1) if slow else 0.0
            room.steps.append((at, lambda start=start, stop=stop: self._chunk(room, start, stop, layerwise)))
        room.steps.append((at, lambda: self._finish(room)))
        while room.steps and room.steps[0][0] <= self.now:
            room.steps.pop(0)[1]()

    def _chunk(self, room: Room, start: int, stop: int, layerwise: bool) -> None:
        self.pages.fill(room.order.serial, room.pages, range(start, stop))
        for layers in [(0, 1), (1, LAYERS)] if layerwise else [None]:
            room.handle.chunk(room.pages, (start, stop), layers=layers)

    def _finish(self, room: Room) -> None:
        room.handle.finish(aux=aux_of(room.order.serial))

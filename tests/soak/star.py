"""One real node, and peers of the other role that come, have a room, and go in every way there is."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from pdstage import Config
from pdstage.control.bootstrap import BootstrapClient, BootstrapServer
from pdstage.manager.handle import Handle
from pdstage.protocol.state import State
from tests.manager.engine import Rank, decode_node, prefill_node
from tests.soak.fakes import Crew, Fake, FakeDecode, FakePrefill
from tests.soak.gauge import Gauge

HASTE = Config(
    retry_s=0.1, retry_cap_s=0.4, hello_s=4.0, open_s=20.0, drain_s=4.0, max_silence_s=3.0, idle_s=0.3, open_wait_s=6.0,
    send_wait_s=6.0,
)  # fmt: skip
"""What is silent is given up soon; not so soon that on a busy machine a turn of all visitors takes as long."""
PATIENT = Config(hello_s=60.0, idle_s=600.0, max_silence_s=60.0)
AT_ONCE = 128
PREFILL_WAYS = ("bye", "killed", "silent", "idle", "mute", "nobody")
DECODE_WAYS = ("bye", "killed", "silent", "idle", "half-open")
TOKENS = 8


@dataclass(eq=False)
class Visit:
    """One peer's life. `step` is asked again and again; it gives the next, or None at the end."""

    fake: Fake
    step: Callable[[], Callable | None]
    handle: Handle
    way: str
    since: float = field(default_factory=time.monotonic)


class Star:
    """The node in the middle. `ended` counts its rooms' ends by how their peer went."""

    def __init__(self, role: str, stack: ExitStack, **options) -> None:
        self.role = role
        self.ways = PREFILL_WAYS if role == "decode" else DECODE_WAYS
        self.rank = Rank()
        self.address = stack.enter_context(BootstrapServer()).address
        self.directory = BootstrapClient(self.address)
        config = options.pop("config", HASTE)
        made = (
            decode_node(self.rank, config=config, **options)
            if role == "decode"
            else prefill_node(self.rank, self.address, config=config, **options)
        )
        self.node = stack.enter_context(made)
        self.crew = Crew(self.rank.pool.layout, config, self.node.transport.traits.name)
        stack.callback(self.crew.close)
        self.visits: list[Visit] = []
        self.rooms = count()
        self.ended: dict[tuple[str, State], int] = {}
        self.pages = np.arange(-(-TOKENS // self.rank.page))

    def serve(self, n: int, ways: tuple[str, ...] = ()) -> None:
        """`n` visitors, a few at a time, each way in turn."""
        ways = ways or self.ways
        came = iter(range(n))
        left = n
        while left or self.visits:
            while left and len(self.visits) < AT_ONCE:
                self.visits.append(self.visit(ways[next(came) % len(ways)]))
                left -= 1
            self.turn()

    def turn(self) -> None:
        self.node.turn(1e-4)
        self.crew.turn()
        for visit in list(self.visits):
            following = visit.step()
            if following is None:
                self.visits.remove(visit)
            else:
                visit.step = following
        self.node.completions()

    def rest(self) -> None:
        """Until the node has let go of everybody."""
        deadline_at = time.monotonic() + 30
        core = self.node.core
        peers = getattr(core.handshake, "peers", {})
        while core.sessions or peers or len(core.endpoint.timers) or self.node.sessions.lost:
            assert time.monotonic() < deadline_at, (core.sessions, core.endpoint.timers._at)
            self.turn()

    def gauge(self, before: Gauge | None = None) -> Gauge:
        """What is held at rest. libzmq closes connections in its own time: `before` is what is waited for, a while."""
        self.rest()
        self.node.directory.forget()
        deadline_at = time.monotonic() + 5
        while (now := Gauge(self.node)) and before is not None and now.grown(before):
            if time.monotonic() > deadline_at:
                break
            self.turn()
        return now

    # One visit.

    def visit(self, way: str) -> Visit:
        fake, handle = self.meet(way)
        visit = Visit(fake, lambda: None, handle, way)
        visit.step = lambda: self._ended(visit, way)
        return visit

    def meet(self, way: str = "") -> tuple[Fake, Handle]:
        """A new peer, and a room with it."""
        if self.role == "decode":
            fake: Fake = FakePrefill(self.crew, self.directory, listens=way != "nobody")
        else:
            fake = FakeDecode(self.crew, self.node.socket.endpoint)
        if way == "mute":
            fake.stop()
        handle = self.ask(fake)
        if way == "half-open":
            fake.stop()
        return fake, handle

    def ask(self, fake: Fake) -> Handle:
        """A room of the node and `fake`, who says its part of it unless it is gone."""
        room = next(self.rooms)
        there = fake.socket in self.crew.fakes
        if isinstance(fake, FakePrefill):
            receiver = self.node.receive(room, self.address, instance=fake.name)
            receiver.bind(self.pages, (0, TOKENS), prefix_tokens=TOKENS)
            if there:
                fake.send(room)
            return receiver
        sender = self.node.send(room)
        sender.finish(aux=b"aux")
        if there:
            fake.receive(room)
        return sender

    def _ended(self, visit: Visit, way: str) -> Callable | None:
        """Waits for the room's end, then goes as `way` says."""
        if not visit.handle.released:
            return visit.step
        key = way, visit.handle.state
        self.ended[key] = self.ended.get(key, 0) + 1
        fake = visit.fake
        if isinstance(fake, FakePrefill):
            fake.withdraw()
        match way:
            case "bye":
                fake.bye()
                return lambda: self._left(visit)
            case "idle":
                return lambda: self._left(visit)
            case "silent":
                fake.stop()
                return lambda: self._left(visit)
            case _:
                fake.gone()
                return None

    def _left(self, visit: Visit) -> Callable | None:
        """Until the node has let go of it."""
        fake, sessions = visit.fake, self.node.core.sessions.values()
        mine = (session.id.writer == fake.incarnation or session.route == fake.name_there for session in sessions)
        if any(mine) or (visit.way == "idle" and fake.core.sessions):
            assert time.monotonic() < visit.since + 30, visit.way
            return visit.step
        fake.gone()
        return None


class Crowd(Star):
    """Peers that are all there at once."""

    def __init__(self, role: str, stack: ExitStack, n_peers: int) -> None:
        super().__init__(role, stack, config=PATIENT)
        self.n_peers = n_peers
        self.fakes: list[Fake] = []
        self.open: list[Handle] = []

    def gather(self) -> None:
        """Each has a room; none goes."""
        for n in range(self.n_peers):
            fake, handle = self.meet()
            self.fakes.append(fake)
            self.open.append(handle)
            if n % 16 == 0:
                self.turn()
        self.finish()
        assert len(self.node.core.sessions) == self.n_peers

    def again(self) -> None:
        """Another room of each, over the session there is."""
        n_opened = self.node.stats()["sessions_opened"]
        for n, fake in enumerate(self.fakes):
            self.open.append(self.ask(fake))
            if n % 16 == 0:
                self.turn()
        self.finish()
        assert self.node.stats()["sessions_opened"] == n_opened

    def finish(self) -> None:
        deadline_at = time.monotonic() + 120
        while not all(handle.released for handle in self.open):
            assert time.monotonic() < deadline_at, "rooms do not end"
            self.turn()
        errors = [handle.error for handle in self.open if handle.state is not State.SUCCESS]
        assert not errors, f"{len(errors)} rooms failed, one with: {errors[0]}"
        self.open.clear()

    def part(self) -> None:
        """All go at the same moment, in order."""
        for fake in self.fakes:
            if isinstance(fake, FakePrefill):
                fake.withdraw()
            fake.bye()
        deadline_at = time.monotonic() + 60
        while self.node.core.sessions:
            assert time.monotonic() < deadline_at, "sessions do not end"
            self.turn()
        for fake in self.fakes:
            fake.gone()

"""`pair.World` with everything that can go wrong: posts that land late and in pieces, ranks that stall and crash.

A world is moved by *events*, plain tuples such as ("deliver", "frame D0>P1 #7"): the scheduler draws them, a schedule
that is replayed or shrunk names them. One that means nothing here and now changes nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pdstage.columns import Column
from pdstage.errors import TransportError
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.decode_rooms import DecodeRoom
from pdstage.protocol.room import Room
from pdstage.protocol.session import HOLD_EVERY_S
from pdstage.protocol.state import State
from tests.pair import COLUMNS, Decode, Item, Node, Prefill, Want
from tests.sim.checks import Checks
from tests.sim.engines import Engines
from tests.sim.fabric import FabricWorld
from tests.sim.scenario import Scenario
from tests.sim.seeds import Event
from tests.sim.side import Side

if TYPE_CHECKING:
    from pdstage.protocol.session import Session

_SHAPE = (
    "prefill", "decode", "heads", "n_pages", "lane_nbytes", "n_lanes", "n_buffers", "buffer_nbytes", "path", "dst_hnd",
    "dst_page", "roles", "fences", "notifies", "instances", "advance", "aux", "deadline_s", "checksums",
)  # fmt: skip
"""What a scenario says of a world by the world's own names."""
CLOSE_S = 5.0
MORE = Column("more", "bfloat16", (9,))  # between the others
TOLD = ("frame", "tag")
FAILING = ("land", "done", "gather", "scatter")


class SimWorld(FabricWorld):
    """One seed's ranks, everything under way, and the invariants that are watched."""

    def __init__(self, scenario: Scenario, *, tracing: bool = False) -> None:
        self.scenario = scenario
        self.ordinals: Counter[str] = Counter()
        self.touched: dict[Node, None] = {}
        self.cuts: set[tuple[str, str]] = set()
        self.greeters: dict[m.SessionId, Decode] = {}
        self.unreachable: set[bytes] = set()
        self.tracing = tracing
        self.trace: list[str] = []
        self.n_steps = 0
        self.counts: Counter[str] = Counter()
        self.checks = Checks(self)
        super().__init__(
            **{name: getattr(scenario, name) for name in _SHAPE},
            slots=scenario.kind != "", exact=scenario.kind == "exact", placed=scenario.placed and not scenario.fences,
            src_columns=COLUMNS + (MORE,) * (scenario.more_columns == "P"),
            dst_columns=COLUMNS + (MORE,) * (scenario.more_columns == "D"),
            choose=lambda c: (
                scenario.path == "direct" or (scenario.path == "auto" and (c.number + c.destination.epoch) % 2)
            ),
            **scenario.config,
        )  # fmt: skip
        self.engines = Engines(self)
        self._do_start, self._do_engine, self._do_abort = self.engines.start, self.engines.step, self.engines.abort

    def make_prefill(self, rank: int, life: int = 0) -> Prefill:
        return self._settle_in(super().make_prefill(rank, life), life)  # type: ignore[return-value]

    def make_decode(self, rank: int, life: int = 0) -> Decode:
        return self._settle_in(super().make_decode(rank, life), life)  # type: ignore[return-value]

    def _settle_in(self, node: Node, life: int) -> Node:
        label = node.name.decode() + (f"'{life}" if life else "")
        self.labels[node] = label
        self.sides[node] = Side(node, label, self.n_pages)
        return node

    def tell(self, line: str) -> None:
        if self.tracing:
            self.trace.append(line)

    # What is on its way.

    def put(self, item: Item) -> None:
        name = f"{item.kind} {self.labels[item.src]}>{self.labels[item.dst]}"
        self.ordinals[name] += 1
        item.key = f"{name} #{self.ordinals[name]}"
        self.waiting[item.key] = item

    def cut_off(self, want: Want) -> None:
        self.waiting = {key: item for key, item in self.waiting.items() if not want(item)}

    def movable(self, item: Item) -> bool:
        """Whether the item may arrive now."""
        match item.kind:
            case "land":
                return True
            case "frame":
                return self._awake(self.node(item.dst.name))
            case "fence":
                fenced = self.scenario.fences if isinstance(item.src, Decode) else self.scenario.stops_reads
                return self._awake(item.src) and (fenced or self._peer_is_dead(item))
            case _:
                return self._awake(item.dst)

    def _awake(self, node: Node) -> bool:
        return self.sides[node].stalled_at is None

    def _peer_is_dead(self, item: Item) -> bool:
        session: Session = item.message  # type: ignore[assignment]
        if isinstance(item.src, Prefill):
            return not self.greeter(session.id).alive
        return not any(node.alive and node.core.incarnation == session.id.writer for node in self.prefill)

    def ready(self) -> list[Item]:
        """What may arrive now, oldest first."""
        if any(side.stalled_at is not None for side in self.sides.values()):
            return [item for item in self.waiting.values() if self.movable(item)]
        return [item for item in self.waiting.values() if item.kind != "fence" or self.movable(item)]

    def node(self, name: bytes) -> Node:
        return (self.prefill if name[:1] == b"P" else self.decode)[int(name[1:])]

    # Events.

    def apply(self, event: Event) -> bool:
        """One step; False if `event` means nothing here and now."""
        verb, *args = event
        line = len(self.trace)
        self.tell(f"{self.n_steps + 1:5} {self.now:8.3f}s  {self._words(event)}" if self.tracing else "")
        if not getattr(self, f"_do_{verb}")(*args):
            del self.trace[line:]
            return False
        self.n_steps += 1
        self.counts[str(verb)] += 1
        self.watch()
        return True

    def _words(self, event: Event) -> str:
        verb, *args = event
        words = [str(verb), *(f"{arg:.3f}s" if isinstance(arg, float) else str(arg) for arg in args)]
        item = self.waiting.get(str(args[0]))
        if item is not None and item.kind == "frame":
            words.append(_brief(item.message))
        return " ".join(words)

    def watch(self) -> None:
        """The invariants of whoever moved, and now and then of everything."""
        touched, self.touched = self.touched, {}
        for node in touched:
            if node.alive:
                self.checks.node(node)
        for node in touched:
            closing_at = self.sides[node].closing_at
            if node.alive and closing_at is not None and (node.core.idle or self.now >= closing_at):
                self._leave(node)
        if self.n_steps % 1000 == 0:
            self.checks.everything()

    def _found(self, key: str, kinds: tuple[str, ...] = ()) -> Item | None:
        """What is called that, if it may arrive now and is one of `kinds`, where any are given."""
        item = self.waiting.get(key)
        return None if item is None or (kinds and item.kind not in kinds) or not self.movable(item) else item

    def _do_deliver(self, key: str) -> bool:
        if item := self._found(key):
            del self.waiting[key]
            item.run()
        return item is not None

    def _do_drop(self, key: str) -> bool:
        """Only what is said gets lost: bytes fail with a word to their sender."""
        if item := self._found(key, TOLD):
            del self.waiting[key]
        return item is not None

    def _do_twice(self, key: str) -> bool:
        if item := self._found(key, TOLD):
            item.run()
        return item is not None

    def _do_fail(self, key: str, how: str) -> bool:
        """A post, a completion, a gather or a scatter ends with an error; `how` says what the bytes do."""
        item = self._found(key, FAILING)
        if item is None:
            return False
        if item.kind == "land":
            return self._fail_post(self._post_of(item), how)
        del self.waiting[key]
        self.failing = how
        try:
            item.run()
        finally:
            self.failing = ""
        return True

    def _do_alter(self, key: str) -> bool:
        """One bit of what lands in staging memory is another, where checksums would notice."""
        item = self.waiting.get(key)
        post = self._post_of(item) if item is not None and item.kind == "land" else None
        if item is None or post is None or post.chunk.direct or not self.scenario.checksums or not post.dst.alive:
            return False
        piece = post.pieces[item]
        self._do_deliver(key)
        if post.dst.core.leases.at(post.chunk.lane, post.chunk.cursor) is not None:
            self.alter(post, piece)
        return True

    def _do_wait(self, for_s: float) -> bool:
        """Time passes, and deadlines with it; what is on its way stays there."""
        until = self.now + for_s
        while (due := min(self.due(), default=until)) < until:
            self.now = max(self.now, due)
            self._tick()
        self.now = until
        return True

    def due(self) -> list[float]:
        moments = [n.core.endpoint.timers.next_at() for n in self.nodes() if self._awake(n)]
        closing = [self.sides[n].closing_at for n in self.nodes() if self._awake(n)]
        return [at for at in moments + closing if at is not None]

    def at_rest(self) -> bool:
        """Every core agrees that its rooms are over."""
        cores = [node.core for node in self.nodes()]
        return all(c.idle and not c.by_key for c in cores) and not any(
            c.leases.live() for c in cores if isinstance(c, DecodeCore)
        )

    def _tick(self) -> None:
        for node in self.nodes():
            due, side = node.core.endpoint.timers.next_at(), self.sides[node]
            late = side.closing_at is not None and self.now >= side.closing_at
            if self._awake(node) and ((due is not None and due <= self.now) or late):
                self.tell(f"{'':7}{self.now:8.3f}s  tick {side.label}")
                node.core.endpoint.tick()
                self.carry(node)
                self.n_steps += 1
                self.counts["tick"] += 1
                self.checks.on_time(side)
                self.watch()

    def _do_crash(self, rank: str) -> bool:
        """The process is gone, its posts are not; another comes up at the same address."""
        node = self.node(rank.encode())
        for post in self.posts:
            if post.src is node:
                post.catch()
        self._forget(node)
        self.restart(node)
        return True

    def _forget(self, node: Node) -> None:
        """What only this process would have done."""
        for key, item in list(self.waiting.items()):
            if item.kind in ("gather", "done", "scatter", "fence", "tag") and item.dst is node:
                del self.waiting[key]
        for post in [post for post in self.posts if post.dst is node]:
            self._fail_post(post, "lost")

    def _do_close(self, rank: str) -> bool:
        """The engine closes its node in order."""
        node = self.node(rank.encode())
        side = self.sides[node]
        if side.closing_at is not None or side.stalled_at is not None:
            return False
        side.closing_at = self.now + CLOSE_S
        node.core.close()
        self.carry(node)
        return True

    def _leave(self, node: Node) -> None:
        if not node.core.chunks.flights:
            node.core.endpoint.bye()
            self.carry(node)
        self.tell(f"{'':15} {self.labels[node]} ends{'' if node.core.chunks.flights else ', in order'}")
        self._do_crash(node.name.decode())

    def _do_stall(self, rank: str) -> bool:
        side = self.sides[self.node(rank.encode())]
        if side.stalled_at is not None:
            return False
        side.stalled_at = self.now
        return True

    def _do_resume(self, rank: str) -> bool:
        """The process goes on, and finds that it is late: what has come meanwhile is read before the tick."""
        side = self.sides[self.node(rank.encode())]
        if side.stalled_at is None:
            return False
        side.late_s += self.now - side.stalled_at
        side.stalled_at = None
        return True

    def _do_cut(self, src: str, dst: str) -> bool:
        """No frame from `src` reaches `dst` until "heal"."""
        return (src, dst) not in self.cuts and not self.cuts.add((src, dst))

    def _do_heal(self, src: str, dst: str) -> bool:
        return (src, dst) in self.cuts and not self.cuts.discard((src, dst))

    def _do_unreachable(self, rank: str) -> bool:
        """The transport of this prefill rank cannot connect to the next decode rank that greets it."""
        return rank.startswith("P") and not self.unreachable.add(rank.encode())

    # Cores and engines.

    def carry(self, node: Node) -> None:
        self.touched[node] = None
        super().carry(node)

    def changed(self, node: Node, room: Room) -> None:
        side = self.sides[node]
        self.tell(f"{'':15} {side.label} {room.key.decode()}: {room.state.name}{' released' * room.released}")
        self.checks.changed(side, room)
        if room.ended and room in side.live:
            del side.live[room]
            side.ended[room] = (room.state, room.error)
            if isinstance(room, DecodeRoom) and room.state is State.SUCCESS:
                self.engines.check_success(side, room)
        if room.released:
            side.give_back(room)

    def attach(self, node: Node, session: Session) -> None:
        if node.name in self.unreachable:
            self.unreachable.discard(node.name)
            node.core.lose(session, TransportError("the peer is out of reach"))
            self.carry(node)

    def detach(self, node: Node, session: Session) -> None:
        if isinstance(node, Decode) and (session.route, session.id) in node.core.handshake.leaving:
            self.counts["idle"] += 1
        self.put(Item("fence", node, node, lambda: self.fence(node, session), session))

    def _frame(self, node: Node, route: bytes, frame: bytes) -> None:
        super()._frame(node, route, frame)
        self.checks.sent(node, frame_session(frame), next(reversed(self.waiting.values())).message)

    def hear(self, src: Node, route: bytes, frame: bytes, message: m.AnyMessage) -> None:
        target = self.node(route)
        if (src.name.decode(), route.decode()) in self.cuts:
            self.counts["cut off"] += 1
            return
        if isinstance(message, m.Open) and (room := target.core.by_key.get(message.room)) is not None:
            self.engines.opened(self.sides[target], room, message.deadline_s)
        if isinstance(message, m.Ask | m.Heartbeat):
            asks, waits = ((message,), ()) if isinstance(message, m.Ask) else (message.asks, message.waits)
            for key in (*(wanted.room for wanted in asks), *waits):
                if (room := target.core.by_key.get(key)) is not None:
                    self.engines.opened(self.sides[target], room, max(self.config.open_wait_s, 3 * HOLD_EVERY_S))
        with self.checks.stale_frame_changes_nothing(target, frame, message):
            super().hear(src, route, frame, message)

    def greeter(self, session_id: m.SessionId) -> Decode:
        if session_id not in self.greeters:
            self.greeters[session_id] = super().greeter(session_id)
        return self.greeters[session_id]


def _brief(message: object) -> str:
    """A message without layouts and shares."""
    match message:
        case m.Hello() | m.Welcome():
            return type(message).__name__
        case m.Open():
            return f"Open(epoch={message.epoch}, room={message.room!r})"
        case m.CloseOk():
            return f"CloseOk(epoch={message.epoch}, {len(message.written)} chunks)"
        case m.Reserve():
            chunk = f"epoch={message.epoch}, chunk={message.chunk}, attempt={message.attempt}"
            return f"Reserve({chunk}, {message.nbytes} bytes)"
    return str(message)


def frame_session(frame: bytes) -> m.SessionId:
    return wire.decode_head(frame)[0]

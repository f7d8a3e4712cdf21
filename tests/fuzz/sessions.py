"""Targets: one hostile peer of a real core that also serves an honest one.

The hostile peer is a true core whose frames and tags are altered, dropped, repeated, delayed and interspersed with
invented ones on their way; what it has to say is therefore as deep in a room's life as an honest peer's. Whatever it
does, no exception leaves the honest cores, they write nowhere but where that peer let them, what they keep of it has a
cap, its rooms end, and the honest peer's rooms all succeed with the right bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from pdstage.errors import TransportError
from pdstage.manager.effects import Effect
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.decode_chunks import Scatter
from pdstage.protocol.decode_rooms import DecodeRoom
from pdstage.protocol.destinations import PrefillRoom
from pdstage.protocol.prefill import PrefillCore
from pdstage.protocol.prefill_chunks import Gather, Write, WriteDirect, WriteRow
from pdstage.protocol.session import Detach, PeerWarning, Send
from pdstage.protocol.state import State
from tests.fuzz.draw import NUMBERS, Draw, altered_bytes
from tests.fuzz.wire import alter_frame, bend_frame, check_inside, samples
from tests.pair import Decode, Item, Prefill, World, assert_flat

TOKENS, PAGES = 8, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
_DEADLINES = {
    "hello_s": 4.0, "open_s": 6.0, "wait_s": 40.0, "transfer_s": 40.0, "recall_after_s": 0.6,
    "stuck_after_s": 0.4, "drain_s": 3.0, "open_wait_s": 40.0, "send_wait_s": 40.0, "write_s": 4.0,
    "max_silence_s": 6.0,
}  # fmt: skip
_CAPS = {"max_parked": 12, "max_half_open": 4, "max_peers": 16, "max_aux_nbytes": 4096}
_MAX_STEPS = 40
_HEAD = 28


class Hostile(World):
    """A world in which the node `liar` lies. `role` is the liar's: "prefill" or "decode"."""

    def __init__(self, draw: Draw, role: str) -> None:
        self.draw = draw
        self.liar: Prefill | Decode | None = None
        self.victim: Prefill | Decode | None = None
        path = draw.pick(("staged", "direct"))
        super().__init__(
            prefill=2 if role == "prefill" else 1, instances=True, n_lanes=2, lane_nbytes=1024, buffer_nbytes=512,
            path=path, deadline_s=60.0, **_DEADLINES, **_CAPS,
        )  # fmt: skip
        if role == "decode":
            self.decode.append(self.make_decode(0, life=9))
            self.decode[1].name = b"D1"
        self.liar = self.prefill[1] if role == "prefill" else self.decode[1]
        self.victim = self.decode[0] if role == "prefill" else self.prefill[0]
        self.said: list[bytes] = []
        self.tags: list[bytes] = []
        self.seq = 0
        self.silent = False
        self.stuck: list[Item] = []
        """Posts to the liar that end only with its process."""

    # What leaves the liar.

    def carry(self, node: Prefill | Decode) -> None:
        if node is not self.liar:
            if node is self.victim:
                self._check_caps(node)
            super().carry(node)
            return
        for effect in node.core.endpoint.take_effects():
            self._act(effect)

    def _act(self, effect: Effect) -> None:
        """What the liar's own core wants: it has no memory, so its copies and writes are nothing but words."""
        assert self.liar is not None
        core = self.liar.core
        match effect:
            case Send(route, frame):
                self._say(route, frame)
            case Gather(ticket=ticket):
                self._later(lambda: core.chunks.gathered(ticket, self.now))  # type: ignore[union-attr]
            case Write(ticket=ticket, tag=tag) | WriteDirect(ticket=ticket, tag=tag) | WriteRow(ticket=ticket, tag=tag):
                self._tell(tag)
                self._later(lambda: core.chunks.completed(ticket, self.now))  # type: ignore[union-attr]
            case Scatter(ticket=ticket):
                self._later(lambda: core.scattered(ticket, self.now))  # type: ignore[union-attr]
            case Detach(session):
                self._later(lambda: core.fenced(session, self.now))

    def _later(self, run: Callable[[], None]) -> None:
        def act() -> None:
            run()
            self.carry(self.liar)  # type: ignore[arg-type]

        self.queue.append(Item("liar", self.liar, self.liar, act))  # type: ignore[arg-type]

    def _say(self, route: bytes, frame: bytes) -> None:
        if self.silent:
            return
        self.said = [*self.said[-31:], frame]
        draw = self.draw
        match draw.below(48):
            case 36 | 37:
                pass
            case 38:
                self._deliver_frame(self._stamped(frame))
                self._deliver_frame(frame)
            case 39:
                self._deliver_frame(alter_frame(self._stamped(frame), draw))
            case 40 | 41 | 42 | 43:
                self._deliver_frame(bend_frame(self._stamped(frame), draw))
            case 44:
                self._deliver_frame(self._stamped(draw.pick(self.said)))
                self._deliver_frame(self._stamped(frame))
            case 45:
                self.invent()
                self._deliver_frame(self._stamped(frame))
            case 46:
                self._deliver_frame(bend_frame(self._stamped(draw.pick(self.said)), draw))
                self._deliver_frame(self._stamped(frame))
            case 47:
                self._deliver_frame(altered_bytes(frame[:_HEAD], draw) + frame[_HEAD:])
            case _:
                self._deliver_frame(self._stamped(frame))

    def _stamped(self, frame: bytes) -> bytes:
        """The frame under the liar's next seq, so that what it said in between does not make it stale."""
        self.seq = max(self.seq + 1, int.from_bytes(frame[20:28], "little") if len(frame) >= _HEAD else 0) % (1 << 64)
        return frame[:20] + self.seq.to_bytes(8, "little") + frame[_HEAD:] if len(frame) >= _HEAD else frame

    def _deliver_frame(self, frame: bytes) -> None:
        assert self.liar is not None
        name = self.liar.name

        def arrive() -> None:
            self.victim.core.endpoint.receive(name, frame, self.now)
            self.carry(self.victim)

        self.queue.append(Item("frame", self.liar, self.victim, arrive, "a lie"))

    def _tell(self, tag: bytes) -> None:
        if self.silent:
            return
        self.tags = [*self.tags[-15:], tag]
        match self.draw.below(8):
            case 5:
                pass
            case 6:
                self._deliver_tag(altered_bytes(tag, self.draw))
            case 7:
                self._deliver_tag(tag)
                self._deliver_tag(self.draw.pick(self.tags))
            case _:
                self._deliver_tag(tag)

    def _deliver_tag(self, tag: bytes) -> None:
        def told() -> None:
            if isinstance(self.victim, Decode):
                self.victim.core.tag(tag, self.now)
                self.carry(self.victim)

        self.queue.append(Item("tag", self.liar, self.victim, told, tag=tag))  # type: ignore[arg-type]

    def invent(self) -> None:
        """A message of any kind out of nothing, under a session that is, was or never could be."""
        draw = self.draw
        sessions = [session.id for session in self.victim.core.sessions.values()] or [m.SessionId(1, 2)]
        session_id = draw.pick(sessions) if draw.chance(240) else m.SessionId(draw.below(1 << 64), draw.below(1 << 64))
        if draw.chance(32):
            session_id = m.SessionId(session_id.decode ^ draw.below(4), 0)
        self.seq = draw.pick(NUMBERS) % (1 << 64) if draw.chance(4) else self.seq + 1
        frame = wire.encode(session_id, self.seq % (1 << 64), draw.pick(samples()))
        match draw.below(4):
            case 1 | 2:
                frame = bend_frame(frame, draw)
            case 3:
                frame = alter_frame(frame, draw)
        self._deliver_frame(frame)

    # What reaches the liar.

    def _post(
        self, node: Prefill, dst: Decode, effect: Write | WriteDirect | WriteRow, land: Callable[..., None]
    ) -> None:
        if dst is not self.liar:
            super()._post(node, dst, effect, land)
            return
        if isinstance(effect, Write):  # where direct writes go, `wire` asks of each layout and each list of pages
            chunk = effect.chunk
            check_inside([effect.address], [chunk.nbytes], chunk.destination.session.lanes)  # type: ignore[arg-type]
        error = TransportError("refused") if self.draw.chance(24) else None

        def done() -> None:
            node.core.chunks.completed(effect.ticket, self.now, error)
            self.carry(node)

        item = Item("done", node, node, done, tag=effect.tag)
        (self.stuck if self.draw.chance(16) else self.queue).append(item)

    def greeter(self, session_id: m.SessionId) -> Decode:
        """A session nobody drew is the liar's."""
        return next((p for p in self.processes if session_id.decode in p.nonces()), self.liar)  # type: ignore[return-value]

    # What must hold at every moment.

    def _check_caps(self, node: Prefill | Decode) -> None:
        core = node.core
        peer_warnings = [e for e in core.endpoint.effects if isinstance(e, PeerWarning)]
        assert all(str(c.error) for c in peer_warnings)
        assert all(len(e.frame) < 1 << 20 for e in core.endpoint.effects if isinstance(e, Send))
        assert sum(session.half_open for session in core.sessions.values()) <= _CAPS["max_half_open"]
        assert len(core.sessions) <= _CAPS["max_peers"]
        if isinstance(core, PrefillCore):
            assert (
                sum(destination.room is None for destination in core.rooms.destinations.values()) <= _CAPS["max_parked"]
            )
            assert len(core.rooms.pending) <= _CAPS["max_parked"]
            assert core.rooms.askers._n <= _CAPS["max_parked"]
            assert len(core.rooms.destinations) <= 64
        if isinstance(core, DecodeCore):
            assert core.leases.queue.n_waiting + len(core.leases._at) <= 512
        assert len(core.endpoint.timers) <= 4096


def run(data: bytes, role: str) -> None:
    draw = Draw(data)
    world = Hostile(draw, role)
    honest: list[tuple[int, DecodeRoom]] = []
    others: list[DecodeRoom | PrefillRoom] = []
    for step in range(_MAX_STEPS):
        if draw.empty and step:
            break
        match draw.below(8):
            case 0 | 1 if len(honest) < 3:
                honest.append(_honest(world, 100 + len(honest), PAGES[len(honest)]))
            case 2 | 3 if len(others) < 3:
                others.append(_lied_to(world, role, 1 + len(others), PAGES[3 + len(others)]))
            case 4 | 5:
                world.invent()
            case 6:
                world.run(until=world.now + draw.pick((0.05, 0.3, 1.0)))
            case _:
                for _ in range(draw.below(24)):
                    if world.queue:
                        world._deliver(world.queue.pop(draw.below(min(len(world.queue), 4))))
    if not honest:
        honest.append(_honest(world, 100, PAGES[0]))
    _end(world, honest, others)


def _honest(world: Hostile, room: int, pages: list[int]) -> tuple[int, DecodeRoom]:
    world.deadline_s = 60.0
    handle = world.receive(room, TOKENS, pages, 0, prefill=0)
    world.send(room, TOKENS, pages, 0, step=4)
    return room, handle


def _lied_to(world: Hostile, role: str, room: int, pages: list[int]) -> DecodeRoom | PrefillRoom:
    """A room of the victim's with the liar, whose own handle does not count.

    It has less time than the honest ones: a stuck room delays another by no more than its deadline (I12).
    """
    world.deadline_s = 8.0
    liar = 1
    if role == "prefill":
        handle = world.receive(room, TOKENS, pages, 0, prefill=liar)
        world.send(room, TOKENS, pages, liar, step=4)
        return handle
    sent = world.send(room, TOKENS, pages, 0, step=4)
    world.receive(room, TOKENS, pages, liar, prefill=0)
    return sent


def _end(world: Hostile, honest: list[tuple[int, DecodeRoom]], others: list[DecodeRoom | PrefillRoom]) -> None:
    """The liar falls silent; the honest rooms have succeeded, its own have ended, and nothing of it is kept."""
    _until(world, 50.0, lambda: all(handle.ended for _, handle in honest))
    for room, handle in honest:
        world.check(handle, room, TOKENS)
        assert handle.aux == b"aux"
    world.silent = True
    assert world.liar is not None
    name, sessions = world.liar.name, world.victim.core.sessions
    _until(
        world,
        120.0,
        lambda: (
            all(handle.released for handle in others) and all(session.route != name for session in sessions.values())
        ),
    )
    for handle in others:
        assert handle.ended and handle.released, (handle.key, handle.state)
        assert (handle.state is State.FAILED) == (handle.error is not None)
    assert all(session.route != name for session in sessions.values()), "the session outlives its peer"
    world.liar.alive = False
    world.queue += world.stuck
    world.run(until=world.now + 8.0)
    assert_flat(world)


def _until(world: Hostile, for_s: float, done: Callable[[], bool]) -> None:
    end_at = world.now + for_s
    while world.now < end_at and not done():
        world.run(until=world.now + 1.0)


def seeds() -> list[bytes]:
    calm = bytes([0, 0, 2, 6, 1, 0, 2, 6, 2])
    return [calm, calm + bytes(range(64)), bytes([1, 2, 2, 2, 6, 1, 4, 4, 4, 4]) * 8, bytes(range(256)) * 2]

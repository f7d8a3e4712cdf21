"""What one rank with many peers costs, by counts: `python -m tests.sim.scale`.

A session, an idle second, a room and a lost peer cost the same beside ten others and beside hundreds; memory is flat in
rooms served and peers restarted (I14). Counted are objects that a core reaches, and lines of the package that run.
"""

from __future__ import annotations

import gc
import sys
import types
from typing import NamedTuple

import pdstage
from pdstage.errors import PeerError
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.prefill import PrefillCore
from tests.pair import Decode, Prefill, World

TOKENS, PAGES = 8, [0, 1]
_NOT_HELD = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType)


class Lines:
    """Counts the lines of the package that run inside `with`: work, without a clock. A loop counts each time round."""

    def __enter__(self) -> Lines:
        self.n, self._before = 0, sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: types.FrameType, event: str, arg: object) -> object:
        return self._line if frame.f_code.co_filename.startswith(pdstage.__path__[0]) else None

    def _line(self, frame: types.FrameType, event: str, arg: object) -> object:
        self.n += event == "line"
        return self._line


def n_objects(root: object, apart: object) -> int:
    """Objects that can be reached, but not through `apart`."""
    seen, todo = {id(root), id(apart)}, [root]
    while todo:
        for inner in gc.get_referents(todo.pop()):
            if id(inner) not in seen and not isinstance(inner, _NOT_HELD):
                seen.add(id(inner))
                todo.append(inner)
    return len(seen)


class Star:
    """A hub of one role, and peers of the other that each have a session with it."""

    def __init__(self, role: str, n_peers: int, **how: int) -> None:
        n = (1, n_peers) if role == "prefill" else (n_peers, 1)
        self.world = World(prefill=n[0], decode=n[1], dst_dp=n[1], instances=True, **how)  # type: ignore[arg-type]
        self.role, self.n_rooms = role, 0
        for peer in range(n_peers):
            self.room(peer)
        self.finish()

    @property
    def hub(self) -> PrefillCore | DecodeCore:
        return (self.world.prefill if self.role == "prefill" else self.world.decode)[0].core

    @property
    def peers(self) -> list[Decode] | list[Prefill]:
        return self.world.decode if self.role == "prefill" else self.world.prefill

    def room(self, peer: int) -> None:
        self.n_rooms += 1
        src, dst = (0, peer) if self.role == "prefill" else (peer, 0)
        self.world.receive(self.n_rooms, TOKENS, PAGES, dst, prefill=src)
        self.world.send(self.n_rooms, TOKENS, PAGES, src, step=4)

    def finish(self) -> None:
        while self.world.queue:  # as `run` does, but that nobody is asked for the time
            self.world._deliver(self.world.queue.pop(0))
        self.world.log.clear()
        for node in self.world.nodes():
            assert node.core.idle and not node.core.rooms.by_key
            node.changes.clear()

    def serve(self, n_rooms: int) -> None:
        for n in range(n_rooms):
            self.room(n * 7919 % len(self.peers))
            self.finish()

    def restart(self, n: int) -> None:
        """Peers, in turn, each of which serves a room before and after."""
        for number in range(n):
            peer = number % len(self.peers)
            self.room(peer)
            self.world.restart(self.peers[peer])
            self.world.run(self.world.now + 100)
            self.serve(len(self.peers))

    def n_objects(self) -> int:
        """Of the hub's core, less what its timers forget lazily."""
        self.hub.endpoint.timers.delay(0.0)
        return n_objects(self.hub, apart=self.world)


class Cost(NamedTuple):
    objects: float
    """Of the hub, a session."""
    idle: float
    """Lines of both ends, of an idle second of a session."""
    room: float
    """Lines of both ends, of a room beside idle sessions."""
    crowded: float
    """The same while every peer has one, and staging memory or send buffers for a few."""
    loss: float
    """Lines of the hub, to lose a session."""


def cost(role: str, n_peers: int) -> Cost:
    star = Star(role, n_peers)
    objects = star.n_objects() / n_peers
    with Lines() as idle:
        star.world.run(star.world.now + 20)
    with Lines() as room:
        star.serve(20)
    crowded = Star(role, n_peers, lane_nbytes=2048, n_buffers=2)
    with Lines() as crowd:
        for peer in range(n_peers):
            crowded.room(peer)
        crowded.world.run(crowded.world.now + 5)
    lost = list(star.hub.sessions.values())[1:6:2]
    with Lines() as loss:
        for session in lost:
            star.hub.lose(session, PeerError("lost by the experiment"), star.world.now)
            star.hub.fenced(session, star.world.now)
    return Cost(objects, idle.n / 20 / n_peers, room.n / 20, crowd.n / n_peers, loss.n / len(lost))


def compare(n_few: int, n_many: int) -> None:
    for role in ("decode", "prefill"):
        few, many = cost(role, n_few), cost(role, n_many)
        print(f"one {role} rank with {n_few} / {n_many} peers:")
        for what, one, other in zip(Cost._fields, few, many, strict=True):
            print(f"  {what:8} {one:8,.0f} / {other:8,.0f}")
            assert other <= 1.5 * one, f"{what} costs more beside others"


def flat(role: str, n_rooms: int) -> None:
    """What a hub holds does not grow with rooms served, nor with peers restarted beyond what it remembers of each."""
    star, n_restarts = Star(role, 4), n_rooms // 50
    star.serve(n_rooms)
    before = star.n_objects()
    star.serve(2 * n_rooms)
    after = star.n_objects()
    star.restart(n_restarts)
    restarted = star.n_objects()
    print(f"one {role} rank: {before:,} objects, {after:,} after {3 * n_rooms:,} rooms, {restarted:,} after restarts")
    assert after <= before + 0.01 * n_rooms + 16, "objects pile up with the rooms served (I14)"
    assert restarted <= after + 40 * n_restarts + 16, "objects pile up with restarts survived (I14)"


def main(n_peers: int, n_rooms: int) -> None:
    compare(10, n_peers)
    for role in ("decode", "prefill"):
        flat(role, n_rooms)


if __name__ == "__main__":
    main(200, 1000)

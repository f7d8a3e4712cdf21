"""Engines, the rooms ordered of them, and what came of each: `Fleet` is a router that knows every reason.

An engine is the ranks of one instance. A room is of one prefill engine and one decode engine, all ranks of both; it
succeeded if all of them say so. A room that failed may be sent again, to other engines, under another key.
"""

from __future__ import annotations

import random
import select
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from tests.fleet.member import Job, Member

_UP_S = 240.0


@dataclass(eq=False)
class Engine:
    """While it `rests`, no room is sent to it."""

    name: str
    role: str
    ranks: list[Member]
    rests: bool = False
    retires: bool = False
    life: int = 0

    @property
    def up(self) -> bool:
        return all(rank.state == "up" for rank in self.ranks)

    @property
    def serves(self) -> bool:
        return self.up and not self.rests


@dataclass(eq=False)
class Room:
    key: str
    serial: int
    tokens: int
    prefill: Engine
    decode: Engine
    awaited: set[Member]
    began_at: float
    reasons: list[str]


class Fleet:
    """A context manager. `wrong` is what must not be: bytes that differ, rooms without a reason, ranks that died."""

    def __init__(self, folder: Path, directory: str, job: Job, seed: int = 0, max_tokens: int = 600) -> None:
        self.folder, self.directory, self.job = folder, directory, job
        self.rng = random.Random(seed)
        self.engines: dict[str, Engine] = {}
        self.rooms: dict[str, Room] = {}
        self.pairs: Counter[tuple[str, str]] = Counter()
        """Rooms that succeeded, by the names of both engines, since `load`."""
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.window = 0
        self._sent: Counter[tuple[str, str]] = Counter()
        """Rooms sent, failed ones too, since `load`: the next goes to those that had the fewest."""
        self._max_tokens = max_tokens
        self._again: list[tuple[int, int]] = []
        """Serial and tokens of rooms that failed, to be sent again."""
        self._serials = count(1)
        self._leaving: list[Member] = []
        self._expected: set[Member] = set()
        """Ranks that are meant to end, or to be killed."""

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members():
            member.end()

    def members(self) -> list[Member]:
        return [*(rank for engine in self.engines.values() for rank in engine.ranks), *self._leaving]

    # Engines.

    def start(self, name: str, role: str, *, ports: list[int] | None = None, **named: object) -> Engine:
        """An engine of `tp` ranks; what is not named is as in the fleet's job."""
        job = replace(self.job, role=role, directory=self.directory, instance=name, **named)
        life = self.engines[name].life + 1 if name in self.engines else 0
        ranks = [
            Member(
                replace(job, rank=rank, port=ports[rank] if ports else 0),
                self.folder / f"{name}-{life}-{rank}.log",
            )
            for rank in range(job.tp)
        ]
        self.engines[name] = Engine(name, role, ranks, life=life)
        return self.engines[name]

    def retire(self, engine: Engine) -> None:
        """Closed in order, once its rooms have ended: each rank says whether its memory is free."""
        engine.rests = engine.retires = True

    def kill(self, engine: Engine) -> None:
        for rank in engine.ranks:
            rank.kill()
        self._leave(engine)

    def close(self, *engines: Engine) -> None:
        """Retires them, and waits until their processes have ended."""
        for engine in engines:
            self.retire(engine)
        ranks = [rank for engine in engines for rank in engine.ranks]
        self.until(lambda: all(rank.state == "gone" for rank in ranks), f"{[e.name for e in engines]} end")

    def _leave(self, engine: Engine) -> None:
        self._expected.update(engine.ranks)
        self._leaving += engine.ranks
        del self.engines[engine.name]

    def _close_retired(self) -> None:
        busy = {engine for room in self.rooms.values() for engine in (room.prefill, room.decode)}
        for engine in [engine for engine in self.engines.values() if engine.retires and engine not in busy]:
            for rank in engine.ranks:
                rank.order("close")
            self._leave(engine)

    def serving(self, role: str) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.role == role and engine.serves]

    # Rooms.

    def _send(self) -> None:
        """Orders rooms while fewer than `window` are under way, of each pair of engines as many as of the others."""
        while len(self.rooms) < self.window:
            prefills, decodes = self.serving("prefill"), self.serving("decode")
            if not (prefills and decodes):
                return
            again = self._again.pop() if self._again else None
            content = again or (next(self._serials), self.rng.randint(1, self._max_tokens))
            pairs = [(prefill, decode) for prefill in prefills for decode in decodes]
            self.rng.shuffle(pairs)
            pair = min(pairs, key=lambda one: self._sent[one[0].name, one[1].name])
            self._sent[pair[0].name, pair[1].name] += 1
            self.send(*pair, *content)

    def send(self, prefill: Engine, decode: Engine, serial: int, tokens: int) -> Room:
        key = f"room-{serial}-{self.counts['rooms sent']}"
        self.counts["rooms sent"] += 1
        members = {*prefill.ranks, *decode.ranks}
        room = self.rooms[key] = Room(key, serial, tokens, prefill, decode, members, time.monotonic(), [])
        order = {"key": key, "serial": serial, "tokens": tokens}
        for rank in prefill.ranks:
            rank.order("room", **order)
        address = self.directory or prefill.ranks[0].directory
        for rank in decode.ranks:
            rank.order("room", prefill=address, instance=prefill.name if self.directory else None, **order)
        return room

    def _ended(self, member: Member, key: str, why: str, wrong: str) -> None:
        room = self.rooms.get(key)
        if wrong:
            self.wrong.append(f"{member.job.role} {member.job.instance} rank {member.job.rank}, {key}: {wrong}")
        if room is None or member not in room.awaited:
            return
        room.awaited.discard(member)
        if why:
            room.reasons.append(f"{member.job.role}: {why}")
        if not room.awaited:
            self._settle(room)

    def _settle(self, room: Room) -> None:
        del self.rooms[room.key]
        if not room.reasons:
            self.pairs[room.prefill.name, room.decode.name] += 1
            self.counts["rooms succeeded"] += 1
            self.counts["tokens compared"] += room.tokens
            return
        self.counts["rooms failed"] += 1
        self.reasons.update(reason_of(reason) for reason in set(room.reasons))
        self._again.append((room.serial, room.tokens))

    # Time.

    def turn(self) -> None:
        """Hears every rank once, sends what may be sent, and closes what retires."""
        self._send()
        self._close_retired()
        members = [member for member in self.members() if member.state != "gone"]
        ready, _, _ = select.select(members, [], [], 0.05) if members else ([], [], [])
        for member in ready:
            for said in member.hear():
                self._hear(member, said)

    def _hear(self, member: Member, said: dict) -> None:
        match said["say"]:
            case "ended":
                self._ended(member, said["key"], said["why"], said["wrong"])
            case "wrong":
                self.wrong.append(f"{member.job.role} {member.job.instance}: {said['what']}")
            case "report" | "closed":
                self.wrong += [f"{member.job.role} {member.job.instance}: {what}" for what in said["wrong"]]
                if said["say"] == "closed":
                    self.counts["ranks closed"] += 1
                    self.counts["ranks closed that could not free their memory"] += not said["free"]
            case "gone":
                if member not in self._expected or (member.closed is None and member.process.returncode >= 0):
                    log = member.log.read_text(errors="replace")[-2000:]
                    self.wrong.append(f"{member.job.role} {member.job.instance} died, code {said['code']}: {log}")
                member.end()
                self._leaving = [one for one in self._leaving if one is not member]
                for room in [room for room in self.rooms.values() if member in room.awaited]:
                    self._ended(member, room.key, "its process ended", "")

    def until(self, done: Callable[[], bool], what: str, limit_s: float = _UP_S) -> None:
        """Turns until `done`. Raises `TimeoutError` that says what is under way; what is wrong ends it too."""
        end = time.monotonic() + limit_s
        while not done():
            if self.wrong:
                raise AssertionError("\n".join(self.wrong))
            if time.monotonic() > end:
                under_way = [(room.key, [m.log.name for m in room.awaited]) for room in self.rooms.values()]
                raise TimeoutError(f"not in {limit_s:.0f} s: {what}; under way: {under_way[:8]}; {self.counts}")
            self.turn()

    def until_up(self) -> None:
        self.until(lambda: all(engine.up for engine in self.engines.values()), "engines start")

    def load(self, rooms: int) -> None:
        """Until every pair of engines that serve has moved so many more rooms."""
        self.pairs.clear()
        self._sent.clear()
        pairs = [(p.name, d.name) for p in self.serving("prefill") for d in self.serving("decode")]
        self.until(lambda: all(self.pairs[pair] >= rooms for pair in pairs), f"{rooms} rooms of each of {pairs}")

    def rest(self) -> None:
        """No more rooms; until all have ended."""
        self.window = 0
        self.until(lambda: not self.rooms, "all rooms end")


def reason_of(why: str) -> str:
    """A reason without the numbers and names that differ from room to room."""
    kept = [word if not any(c.isdigit() for c in word) else "..." for word in why.split()]
    return " ".join(kept)[:160]

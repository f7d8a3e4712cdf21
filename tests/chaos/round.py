"""One site's life: ranks start, rooms flow, faults befall them, all is healed, and everything must come back."""

from __future__ import annotations

import heapq
import itertools
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path

from pdstage.control.bootstrap import BootstrapServer, client_of
from pdstage.tools.trace import load
from tests.chaos import account
from tests.chaos.engine import Order
from tests.chaos.member import Member
from tests.chaos.network import Network, Shared
from tests.chaos.plan import CONFIG, HUNG_AFTER_S, Engine, Fault, Site, draw_faults
from tests.chaos.rank import Job
from tests.judge import judge

_START_S = 240.0
_STEP_S = 0.02
_ASK_S = 0.3
_REORDERED = 0.25
_STALE = 0.01
"""How often a room is sent to an engine with a rank down, as routers do not know at once."""
_TRIES = 6
_WINDOW = 12
"""Rooms at a time."""
_WAIT_S = 120.0
Act = Callable[[], object]


@dataclass(eq=False, slots=True)
class Room:
    order: Order
    pair: tuple[Engine, Engine]
    awaited: set[tuple[Member, int]]
    """Ranks that have not said how it ended, and their lives."""
    failed: bool = False


class Round:
    """`wrong` holds what must not be, `counts` what happened."""

    def __init__(self, seed: int, number: int, site: Site, seconds: float) -> None:
        self.seed, self.number, self.site, self.seconds = seed, number, site, seconds
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.members: dict[str, Member] = {}
        self._rng = random.Random(f"router {seed} {number}")
        self._pairs = [
            (src, dst) for src in site.engines for dst in site.engines if (src.role, dst.role) == ("prefill", "decode")
        ]
        self._moved: set[tuple[Engine, Engine]] = set()
        self._folder = Path(tempfile.mkdtemp(prefix="pdstage-chaos-"))
        self._rooms: dict[str, Room] = {}
        self._again: list[Order] = []
        self._window = 0
        self._calm = False
        self._began_at = time.monotonic()
        self._ask_at = 0.0
        self._agenda: list[tuple[float, int, Act]] = []
        self._numbers = itertools.count(1)

    # What happens, in order.

    def run(self) -> Round:
        with ExitStack() as stack:
            self._build(stack)
            stack.callback(self._leave_nothing)
            self._live()
        self._judge()
        if self.wrong:
            self.wrong.append(f"the ranks' last words are in {self._folder}")
        else:
            shutil.rmtree(self._folder)
        return self

    def _build(self, stack: ExitStack) -> None:
        site = self.site
        ranks = [rank for engine in site.engines for rank in engine.ranks]
        hosts = ["operator", *ranks] if site.network else []
        self._net = stack.enter_context((Shared if site.network == "shared" else Network)(hosts))
        with self._net.inside("operator"):
            bind = f"{self._net.address('operator')}:0"
            self._directory = stack.enter_context(BootstrapServer(bind, insecure=bool(hosts))).address
        traces = self._folder / "traces"
        traces.mkdir()
        for engine in site.engines:
            for rank, name in enumerate(engine.ranks):
                job = Job(
                    site=site, engine=engine, rank=rank, directory=self._directory, log=self._folder / f"{name}.log",
                    seed=f"{self.seed} {self.number}", host=self._net.address(name), where=self._net.where(name),
                    traces=traces,
                )  # fmt: skip
                self.members[name] = Member(job)

    def _live(self) -> None:
        for member in self.members.values():
            member.start()
        self._until(self._all_up, _START_S, "the ranks start")
        self._began_at = time.monotonic()
        self._window = _WINDOW
        for fault in draw_faults(self.seed, self.number, self.site, self.seconds):
            self._at(self._began_at + fault.at_s, partial(self._befall, fault))
        ends_at = self._began_at + self.seconds
        idle = lambda: time.monotonic() > ends_at and not self._agenda  # noqa: E731
        self._until(idle, self.seconds + 2 * _WAIT_S, "the faults are over")
        self._until(self._all_up, _START_S, "every rank is up again")
        self._window = 0
        self._until(lambda: not self._rooms, HUNG_AFTER_S, "every room ends")
        self._healthy()
        self._at_rest()
        self._shut()

    def _healthy(self) -> None:
        """Each pair of engines moves a room again. A loaded machine may still be late, so it has several tries."""
        self._calm, self._moved = True, set()
        for n in range(_TRIES):
            for pair in [pair for pair in self._pairs if pair not in self._moved]:
                self._order(self._new_order(), pair)
                self._until(lambda: len(self._rooms) < _WINDOW, HUNG_AFTER_S, "calm rooms end")
            self._until(lambda: not self._rooms, HUNG_AFTER_S, "the last rooms end")
            if len(self._moved) == len(self._pairs):
                return
            self.counts["tries before all was well"] = n + 1
        held = [member.last_report.get("held", {}) for member in self.members.values()]
        if any(one.get(kind) for one in held for kind in account.STRANDED):
            self.counts["sites that stranded memory kept from serving"] += 1
        else:
            self.wrong.append("the site does not recover: calm rooms still fail")

    def _at_rest(self) -> None:
        """Everything is given back, but for what lost sessions of living peers keep; and the directory is right."""
        for member in self.members.values():
            member.last_report = {}
        self._until(lambda: self._holds_nothing(stranded=True), HUNG_AFTER_S, "all nodes rest")
        for member in self.members.values():
            for kind in account.STRANDED:
                self.counts[kind] += member.last_report.get("held", {}).get(kind, 0)
        living = {(m.name, m.endpoint) for m in self.members.values() if m.job.engine.role == "prefill"}
        self._until(lambda: self._listed() == living, _WAIT_S, "the directory lists the living prefill ranks")

    def _shut(self) -> None:
        """Prefill first: then decode must have back what was stranded.

        Across namespaces no death can be proved: there this is the operator, who ended those processes and waited for
        them, and says so.
        """
        for role in ("prefill", "decode"):
            group = [one for one in self.members.values() if one.job.engine.role == role and one.alive]
            if role == "decode":
                for member in group if self.site.network == "apart" else ():
                    member.send("fence")
                self._until(lambda: self._holds_nothing(stranded=False), HUNG_AFTER_S, "what was stranded is back")
            for member in group:
                member.close()
            ends_s = 10.0 + 3 * CONFIG.drain_s
            self._until(lambda group=group: not any(one.alive for one in group), ends_s, f"{role} closes")
        self._until(lambda: not self._listed(), _WAIT_S, "the directory is empty")

    def _leave_nothing(self) -> None:
        for member in self.members.values():
            if member.alive:
                member.kill()
        paths = {Path(f"/proc/{pid}") for member in self.members.values() for pid in member.pids}
        until = time.monotonic() + 5.0
        while (left := [path.name for path in paths if path.exists()]) and time.monotonic() < until:
            time.sleep(0.01)  # the forkserver reaps them
        self.wrong += [f"process {pid} is left behind" for pid in left]

    def _judge(self) -> None:
        """By what the ranks traced in all lives that they closed in order."""
        wrong, n_writes = judge(load((self._folder / "traces").iterdir()))
        self.wrong += [f"judged: {what}" for what in wrong]
        self.counts["judged: writes held against both ends"] += n_writes

    # Rooms.

    def _route(self) -> None:
        """Of each pair of engines as many as of the others, but for those with a rank down."""
        for _ in range(self._window - len(self._rooms)):
            pair = self._rng.choice(self._pairs)
            if all(self.members[rank].serves for one in pair for rank in one.ranks) or self._rng.random() < _STALE:
                again = self._again.pop() if self._again and self._rng.random() < 0.5 else None
                self._order(again or self._new_order(), pair)

    def _new_order(self) -> Order:
        rng, serial = self._rng, next(self._numbers)
        tokens = rng.choice(
            (rng.randrange(1, 40), rng.randrange(40, 300), rng.randrange(40, 300), rng.randrange(1000, 2000))
        )
        prefix = rng.randrange(tokens) if rng.random() < 0.2 else 0
        return Order(f"room-{serial}", serial, tokens, prefix, "", self._calm)

    def _order(self, order: Order, pair: tuple[Engine, Engine]) -> None:
        order = order._replace(instance=pair[0].name)
        members = [self.members[rank] for one in pair for rank in one.ranks if self.members[rank].serves]
        if members:
            self._rooms[order.key] = Room(order, pair, {(member, member.life) for member in members})
        for member in members:
            member.send("order", order)

    def _ended(self, member: Member, room: Room, reason: str) -> None:
        room.awaited.discard((member, member.life))
        if reason:
            room.failed = True
            self._note(f"{member.name}: {room.order.key} failed: {reason}")
        if room.awaited:
            return
        del self._rooms[room.order.key]
        if not room.failed:
            self.counts["rooms succeeded"] += 1
            self._moved.add(room.pair)
            return
        self.counts["rooms failed"] += 1
        if not self._calm and self._rng.random() < _REORDERED:
            self._again.append(room.order)

    def _gone(self, member: Member) -> None:
        for room in [room for room in self._rooms.values() if (member, member.life) in room.awaited]:
            self._ended(member, room, "its process ended")

    # Faults.

    def _note(self, what: str) -> None:
        """Kept beside the ranks' last words, to be read when something was wrong."""
        with (self._folder / "timeline.log").open("a") as file:
            file.write(f"{time.monotonic() - self._began_at:8.3f} {what}\n")

    def _at(self, at: float, what: Act) -> None:
        heapq.heappush(self._agenda, (at, next(self._numbers), what))

    def _befall(self, fault: Fault) -> None:
        member = self.members[fault.whom]
        if member.state != "up" or member.busy or ("cut" in fault.kind and not self.site.network):
            self.counts["faults missed"] += 1
            return
        self.counts[fault.kind] += 1
        self._note(f"{fault.kind} of {fault.whom} for {fault.for_s:.2f} s")
        member.busy = True
        begin, end = self._act(fault, member)
        begin()
        self._at(time.monotonic() + fault.for_s, end)

    def _act(self, fault: Fault, member: Member) -> tuple[Act, Act]:
        """What begins it, and what ends it."""
        whom, net = fault.whom, self._net
        start, heal = partial(self._start, member, fault.same_port), partial(self._heal, member)
        return {
            "kill": (partial(self._kill, member), start),
            "stop": (member.stop, partial(self._resume, member)),
            "stop, then kill": (member.stop, lambda: (self._kill(member), start())),
            "cut": (partial(net.cut, whom), heal),
            "cut, one way": (partial(net.cut, whom, one_way=True), heal),
            "cut from one": (partial(net.cut, whom, fault.peer), heal),
            "restart": (member.close, start),
            "drain": (partial(self._drain, member), start),
        }[fault.kind]

    def _kill(self, member: Member) -> None:
        if member.alive:
            for kind, value in member.kill():
                self._hear(member, kind, value)
            self._gone(member)
            member.busy = True

    def _drain(self, member: Member) -> None:
        member.rests = True
        member.send("drain")

    def _start(self, member: Member, same_port: bool) -> None:
        """Again, once it has ended."""
        if member.state == "closing" or member.rests:
            self._at(time.monotonic() + 0.05, partial(self._start, member, same_port))
        elif member.alive:
            pass  # it died by itself, and was started for that
        else:
            self._note(f"{member.name} is started, life {member.life + 1}")
            member.start(same_port=same_port)

    def _resume(self, member: Member) -> None:
        if member.state == "stopped":
            member.resume()
            member.busy = False

    def _heal(self, member: Member) -> None:
        self._net.heal(member.name)
        member.busy = False

    # What the ranks say.

    def _pump(self) -> None:
        """Hears every rank, does what is due, and orders rooms."""
        wait([member.pipe for member in self.members.values() if member.pipe is not None], _STEP_S)
        for member in self.members.values():
            for kind, value in member.hear():
                self._hear(member, kind, value)
        if time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + _ASK_S * max(1, len(self.members) / 6)
            for member in self.members.values():
                member.ask()
        while self._agenda and self._agenda[0][0] <= time.monotonic():
            heapq.heappop(self._agenda)[2]()
        self._route()

    def _hear(self, member: Member, kind: str, value: object) -> None:
        if kind not in ("ended", "report"):
            self._note(f"{member.name}: {kind} {value}")
        match kind:
            case "ended":
                if (room := self._rooms.get(value[0])) and (member, member.life) in room.awaited:
                    self._ended(member, room, value[1])
            case "wrong":
                self.wrong.append(f"{member.name}, life {member.life}: {value}")
            case "closed":
                free, kinds = value
                self.counts["nodes closed that could not free their memory"] += not free
                for what, left in zip(("descriptors", "threads"), kinds, strict=True):
                    if left:
                        self.wrong.append(f"{member.name}, life {member.life}, closed and left {what}: {left}")
            case "gone":
                self._gone(member)
                if member.closed is None or value != 0:
                    if member.was_aborted_by_ucx():
                        self.counts["processes that UCX aborted"] += 1
                    else:
                        self.wrong.append(f"{member.name}, life {member.life}, died by itself: exit code {value}")
                    self._start(member, same_port=True)

    # Waiting.

    def _all_up(self) -> bool:
        return all(member.state == "up" and not member.busy for member in self.members.values())

    def _until(self, done: Act, limit_s: float, what: str) -> None:
        until = time.monotonic() + limit_s
        self._note(f"until {what}")
        while not done() and len(self.wrong) < 20:
            if time.monotonic() > until:
                reports = {name: member.last_report.get("held", {}) for name, member in self.members.items()}
                held = {name: {kind: n for kind, n in report.items() if n} for name, report in reports.items()}
                awaited = {key: [one.name for one, _ in room.awaited] for key, room in self._rooms.items()}
                self.wrong.append(f"not in {limit_s:.0f} s: {what}; held: {held}; awaited: {awaited}")
                return
            self._pump()

    def _holds_nothing(self, *, stranded: bool) -> bool:
        """Whether every living rank last told that it holds nothing; `stranded` memory aside where nothing fences."""
        for member in self.members.values():
            if member.alive:
                if member.last_report.get("life") != member.life:
                    return False
                allowed = account.STRANDED if stranded and not member.last_report["fences"] else ()
                if any(n for kind, n in member.last_report["held"].items() if kind not in allowed):
                    return False
        return True

    def _listed(self) -> set[tuple[str, str]]:
        """The prefill ranks that the directory lists, by their names here, and their endpoints."""
        with self._net.inside("operator"):
            instances = json.loads(client_of(self._directory).instances())
        adverts = [one["advert"] for held in instances.values() for one in held]
        return {(f"{one['instance']} {one['topology'].get('tp_rank', 0)}", one["endpoint"]) for one in adverts}

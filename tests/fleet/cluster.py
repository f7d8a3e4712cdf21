"""A cluster for minutes: hosts in namespaces, the directory on three etcd servers, engines that come, go and die.

Every host has a network namespace and a port of the software switch, which delays and loses frames. Prefill and decode
are scaled up and down, closed in order or killed; hosts are stopped, cut off from one, from all, or one way; members of
etcd are killed, stopped and cut off. Who killed a host says so once, with `pdstage fence`. Then everything is healed:
each pair of engines must move a room again, nothing may be held any more, and the directory must be right.
"""

from __future__ import annotations

import base64
import heapq
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

from pdstage.bench.etcd_servers import Host, Servers
from tests.fleet.member import CONFIG, Job, Member
from tests.fleet.router import Engine, Fleet
from tests.fleet.switch import Network

OPERATOR, N_ETCD = 0, 3
_TPS = (1, 2, 4)
_HEAL_S = 240.0
_REPORT_S = 20.0
_SETTLED_S = 90.0
"""A rank's memory is compared from this age on: it has met its peers by then."""
_GROWTH_NBYTES = 24 << 20
_CONFIG = CONFIG | {
    "max_silence_s": 8.0, "hello_s": 30.0, "open_s": 15.0, "open_wait_s": 25.0, "send_wait_s": 25.0, "transfer_s": 20.0,
    "drain_s": 10.0, "write_s": 20.0,
}  # fmt: skip
KINDS = {
    "scaled up": 10, "scaled down": 5, "drained": 5, "killed": 8, "stopped": 8, "cut from one": 8,
    "cut from one, one way": 5, "cut from all": 6, "slow": 10, "etcd killed": 4, "etcd stopped": 4, "etcd cut off": 3,
    "etcd without majority": 1,
}  # fmt: skip


class Cluster:
    """`low` ranks of each role at least, a fifth more at most. `run` does it all; `fleet.wrong` is what must not be."""

    def __init__(self, folder: Path, network: Network, servers: Servers, *, low: int, window: int, seed: int) -> None:
        self.network, self.servers = network, servers
        self.rng = random.Random(seed)
        self.low, self.high = low, low + max(*_TPS, low // 5)
        self.address = servers.address()
        # Shared memory would go around the switch.
        job = Job(
            role="", transport="nixl", fabric="tcp,self", progress="thread", turn_s=0.03, tokens=2048, config=_CONFIG,
            room_s=60.0, close_s=15.0,
        )  # fmt: skip
        self.fleet = Fleet(folder, self.address, job, seed, max_tokens=300)
        self.window = window
        self.events: Counter[str] = Counter()
        self.fewest, self.most = 1 << 30, 0
        """Ranks alive at once, while they were scaled."""
        self.first: dict[Member, dict] = {}
        self._free = list(range(1 + N_ETCD, len(network.namespaces)))
        self._host_of: dict[str, int] = {}
        self._numbers = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._commands: list[tuple[str, subprocess.Popen[str], Callable[[str], None]]] = []
        self._busy: set[str | int] = set()
        """Engines, and members of etcd by number, to which something is being done."""

    # Time.

    def run(self, seconds: float, *, every_s: float = 3.0) -> None:
        with self.fleet as fleet:
            self._began = time.monotonic()
            self._fill()
            fleet.until_up()
            fleet.window = self.window
            fleet.load(1)  # everybody has met everybody
            began = time.monotonic()
            self._ask()
            at = began
            while at < began + seconds:
                at += self.rng.expovariate(1 / every_s)
                self._pass(min(at, began + seconds))
                alive = sum(member.state != "gone" for member in fleet.members())
                self.fewest, self.most = min(self.fewest, alive), max(self.most, alive)
                self._befall(self.rng.choices(list(KINDS), list(KINDS.values()))[0])
                self._fill()
            self._end()

    def _pass(self, until: float) -> None:
        while time.monotonic() < until:
            self.fleet.until(lambda: time.monotonic() >= min(until, self._next()), "time passes", 60.0)
            self._do_what_is_due()

    def _next(self) -> float:
        return self._agenda[0][0] if self._agenda else float("inf")

    def _do_what_is_due(self) -> None:
        while self._agenda and self._agenda[0][0] <= time.monotonic():
            heapq.heappop(self._agenda)[2]()
        for command in [one for one in self._commands if one[1].poll() is not None]:
            self._commands.remove(command)
            name, process, then = command
            said, errors = process.communicate()
            self.events[f"pdstage {name}"] += 1
            if process.returncode:
                self.fleet.wrong.append(f"pdstage {name} failed: {said}{errors}")
            then(said)

    def _at(self, at: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at, next(self._numbers), what))

    def _in(self, seconds: float, what: Callable[[], None]) -> None:
        self._at(time.monotonic() + seconds, what)

    # Engines.

    def _n_ranks(self, role: str) -> int:
        return sum(len(e.ranks) for e in self.fleet.engines.values() if e.role == role and not e.retires)

    def _fill(self) -> None:
        for role in ("prefill", "decode"):
            while self._n_ranks(role) < self.low and self._free:
                self._start(role)

    def _start(self, role: str) -> None:
        host = self._free.pop(0)
        name = f"{role}-{next(self._numbers)}"
        self._host_of[name] = host
        self.fleet.start(
            name, role, tp=self.rng.choice(_TPS), page=self.rng.choice((8, 16)),
            hnd=self.rng.random() < 0.5, host=self.network.host(host), where=self.network.namespaces[host],
        )  # fmt: skip

    def _idle(self, role: str = "") -> list[Engine]:
        """Engines that serve, and to which nothing is being done."""
        return [
            engine
            for engine in self.fleet.engines.values()
            if engine.serves and engine.name not in self._busy and role in ("", engine.role)
        ]

    # What befalls them.

    def _befall(self, kind: str) -> None:
        engines = self._idle()
        if not engines:
            return
        engine = self.rng.choice(engines)
        host = self._host_of[engine.name]
        match kind:
            case "scaled up":
                if self._n_ranks(engine.role) + max(_TPS) > self.high or not self._free:
                    return
                self._start(engine.role)
            case "scaled down":
                if self._n_ranks(engine.role) - len(engine.ranks) < self.low:
                    return
                self._retire(engine)
            case "drained":
                if self._n_ranks(engine.role) - len(engine.ranks) < self.low:
                    return
                self._drain(engine)
            case "killed":
                self.fleet.kill(engine)
                self._fence(host)
            case "stopped":
                self._stop(engine)
            case "slow":
                delay_s, loss = self.rng.uniform(0.0, 0.01), self.rng.choice((0.0, 0.002, 0.01))
                self.network.link(host, delay_s=delay_s, jitter_s=delay_s / 2, loss=loss)
                self._in(self.rng.uniform(5.0, 40.0), lambda: self.network.link(host))
            case "cut from one" | "cut from one, one way" | "cut from all":
                self._cut(kind, host)
            case _:
                if not self._etcd(kind):
                    return
        self.events[kind] += 1

    def _retire(self, engine: Engine) -> None:
        """Its host is free for others once it has ended."""
        self.fleet.retire(engine)
        host, ranks = self._host_of[engine.name], engine.ranks

        def look() -> None:
            if all(rank.state == "gone" for rank in ranks):
                self._free.append(host)
            else:
                self._in(0.5, look)

        self._in(0.5, look)

    def _drain(self, engine: Engine) -> None:
        """As an operator does it: out of the router, then `pdstage drain`, and closed once that says so."""
        engine.rests = True
        self._busy.add(engine.name)
        endpoints = [rank.endpoint for rank in engine.ranks]

        def drained(_: str) -> None:
            self._busy.discard(engine.name)
            self._retire(engine)

        self._run("drain", *endpoints, "--wait", "120", then=drained)

    def _fence(self, host: int) -> None:
        """What an orchestrator does once it has killed a host, which is free for others then."""

        def fenced(said: str) -> None:
            self.events["processes fenced"] += sum(line.startswith("fenced ") for line in said.splitlines())
            self._free.append(host)

        self._run("fence", self.address, self.network.host(host), "--wait", "120", then=fenced)

    def _run(self, *command: str, then: Callable[[str], None]) -> None:
        """A command of pdstage, which must succeed; `then` gets what it printed."""
        process = subprocess.Popen(
            [sys.executable, "-m", "pdstage", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._commands.append((command[0], process, then))

    def _stop(self, engine: Engine) -> None:
        self._busy.add(engine.name)
        for rank in engine.ranks:
            rank.stop()

        def resume() -> None:
            for rank in engine.ranks:
                rank.resume()
            self._busy.discard(engine.name)

        self._in(self.rng.choice((0.5, 3.0, 8.0, 20.0)), resume)

    def _cut(self, kind: str, host: int) -> None:
        others = [number for number in range(1, len(self.network.namespaces)) if number != host]
        if kind != "cut from all":
            peers = [self._host_of[engine.name] for engine in self._idle() if self._host_of[engine.name] != host]
            others = [self.rng.choice(peers)] if peers else []
        pairs = [(host, other) for other in others]
        if kind != "cut from one, one way":
            pairs += [(other, host) for other in others]
        self.network.cut(pairs)
        self._in(self.rng.choice((1.0, 4.0, 12.0, 25.0)), lambda: self.network.heal(pairs))

    def _etcd(self, kind: str) -> bool:
        if any(isinstance(one, int) for one in self._busy):
            return False
        first, second, _ = self.rng.sample(range(N_ETCD), N_ETCD)
        if kind == "etcd without majority":
            self._take_down(first, "etcd killed", 6.0)
            self._take_down(second, "etcd stopped", 6.0)
        else:
            self._take_down(first, kind, self.rng.choice((2.0, 8.0, 20.0)))
        return True

    def _take_down(self, number: int, how: str, seconds: float) -> None:
        member = self.servers.members[number]
        host = 1 + number
        self._busy.add(number)
        pairs = [(a, b) for other in range(1, len(self.network.namespaces)) for a, b in ((host, other), (other, host))]
        if how == "etcd killed":
            member.kill()
        elif how == "etcd stopped":
            member.stop()
        else:
            self.network.cut(pairs)

        def bring_back() -> None:
            if how == "etcd killed":
                member.start()
            elif how == "etcd stopped":
                member.resume()
            else:
                self.network.heal(pairs)
            self._busy.discard(number)

        self._in(seconds, bring_back)

    # What they hold.

    def _ask(self) -> None:
        self._in(_REPORT_S, self._ask)
        counts, frames = self.fleet.counts, self.network.counts()["passed"]
        print(
            f"{time.monotonic() - self._began:6.0f} s: {self.most} ranks at most, {counts['rooms succeeded']:,} rooms, "
            f"{counts['rooms failed']} failed, {frames:,} frames",
            flush=True,
        )
        for member in self.fleet.members():
            if member.state == "up":
                if member.report is not None and member.age_s > _SETTLED_S:
                    self.first.setdefault(member, member.report)
                member.order("report")

    def _reports(self) -> list[tuple[Member, dict]]:
        members = [member for engine in self.fleet.engines.values() for member in engine.ranks]
        for member in members:
            member.report = None
            member.order("report")
        self.fleet.until(lambda: all(member.report is not None for member in members), "ranks report")
        return [(member, member.report) for member in members if member.report is not None]

    def grown(self) -> dict[str, int]:
        """The most that a rank that lived long grew by, since it had met its peers."""
        most: Counter[str] = Counter()
        for member, now in self._reports():
            if before := self.first.get(member):
                for what in ("resident_nbytes", "threads"):
                    most[what] = max(most[what], now[what] - before[what])
                for kind in ("socket:", "pipe:", "anon_inode:[eventfd]", "anon_inode:[pidfd]"):
                    grown = now["descriptors"].get(kind, 0) - before["descriptors"].get(kind, 0)
                    most[kind] = max(most[kind], grown)
                if now["resident_nbytes"] - before["resident_nbytes"] > _GROWTH_NBYTES:
                    self.fleet.wrong.append(f"{member.log.name} grew from {before} to {now}")
        return dict(most)

    # The end.

    def _end(self) -> None:
        """All is healed; then everything must be as if nothing had been."""
        fleet = self.fleet
        for _, _, what in sorted(self._agenda):
            if what != self._ask:
                what()
        self._agenda = []
        self.network.heal(sorted(self.network.cuts))
        self.servers.ready()
        fleet.window = 0
        fleet.until(lambda: not fleet.rooms, "rooms end after all is healed", _HEAL_S)
        while self._commands:
            self._pass(time.monotonic() + 0.5)
        fleet.until_up()
        fleet.window = self.window
        fleet.load(1)
        fleet.rest()
        self._until(
            lambda: not any(report["rooms"] or report["lent"] for _, report in self._reports()), "memory is back"
        )
        self.growth = self.grown()
        self._until(lambda: self._listed() == self._living(), "the directory is right")
        free_before = fleet.counts["ranks closed that could not free their memory"]
        fleet.close(*fleet.engines.values())
        if late := fleet.counts["ranks closed that could not free their memory"] - free_before:
            fleet.wrong.append(f"{late} ranks could not free their memory at the end")
        self._until(lambda: not self._listed(), "the directory is empty")
        for host in self._cut_off_at_the_end():
            self.events["hosts fenced that could not withdraw themselves"] += 1
            self._fence(host)
        self._until(lambda: not self._commands, "hosts are fenced")
        self.keys_left = [key for key, _ in self._keys()]
        if processes := [key for key in self.keys_left if "!ended" not in key]:
            fleet.wrong.append(f"etcd still has {processes}")

    def _until(self, done: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + _HEAL_S
        while not done():
            if time.monotonic() > until:
                held = [
                    (m.log.name, r["rooms"], r["lent"], r["unfenced"])
                    for m, r in self._reports()
                    if r["rooms"] or r["lent"]
                ]
                raise TimeoutError(f"not in {_HEAL_S:.0f} s: {what}; held: {held}; {self._listed() ^ self._living()}")
            self._pass(time.monotonic() + 1.0)

    def _listed(self) -> set[tuple[str, int, str]]:
        """Instance, rank and endpoint, as `pdstage instances` prints them."""
        command = [sys.executable, "-m", "pdstage", "instances", self.address]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return {(done.stderr.strip(), -1, "")}
        return {
            (name, one["advert"]["topology"].get("tp_rank", 0), one["advert"]["endpoint"])
            for name, held in json.loads(done.stdout).items()
            for one in held
        }

    def _living(self) -> set[tuple[str, int, str]]:
        return {
            (engine.name, rank.job.rank, rank.endpoint)
            for engine in self.fleet.engines.values()
            for rank in engine.ranks
            if engine.role == "prefill"
        }

    def _cut_off_at_the_end(self) -> set[int]:
        """Hosts of processes that closed while etcd was out of their reach: their records are left."""
        left = [value for key, value in self._keys() if "!ended" not in key]
        return {
            number for number in range(len(self.network.namespaces)) if f"//{self.network.host(number)}:" in str(left)
        }

    def _keys(self) -> list[tuple[str, str]]:
        """All that etcd holds."""
        answer = self.servers.ask("kv/range", {"key": "AA==", "range_end": "AA=="})
        return [
            tuple(base64.b64decode(one[part]).decode() for part in ("key", "value")) for one in answer.get("kvs", [])
        ]


def hosts_of(network: Network) -> list[Host]:
    """One member of etcd on each of the hosts after the operator's."""
    return [
        Host(network.host(1 + number), 2379, 2380, ("ip", "netns", "exec", network.namespaces[1 + number]))
        for number in range(N_ETCD)
    ]

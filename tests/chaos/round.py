"""One site's life: ranks start, rooms flow, faults befall them, all is healed, and everything must come back.

`run()` is a generator that yields wherever it waits, so one thread drives several sites; `pump` feeds it meanwhile.
"""

from __future__ import annotations

import heapq
import itertools
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from pdstage.tools.judge import judge
from tests.chaos import account, network
from tests.chaos.engine import Order
from tests.chaos.member import Directory, Member, left_behind
from tests.chaos.plan import HUNG_AFTER_S, Fault, Site, draw_faults
from tests.chaos.worker import Job

_START_S = 60.0
_WINDOW = 12
_FDS = {"mooncake": (130, 70)}  # docs/transports.md, mooncake: Resources
_FDS_ELSE = (0, 10)
"""What a node may have more than at first: at all, and for each session."""
_REORDERED = 0.25
_RECYCLE_AT = 0.5
_ASK_S = 0.3
_ENDS_S = 10.0
"""From the order to close to the process's end."""


class Round:
    """`wrong` holds what must not be; `counts` and `reasons` what happened; `longest_end_s` how long a process took to
    end that was told to close.
    """

    def __init__(self, seed: int, number: int, site: Site, seconds: float, *, sabotage: bool = False) -> None:
        self.number, self.site, self.seconds = number, site, seconds
        self.wrong: list[str] = []
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.longest_end_s = 0.0
        self._rng = random.Random(f"router {seed} {number}")
        self._faults = draw_faults(seed, number, site, seconds)
        self._folder = Path(tempfile.mkdtemp(prefix="pdstage-chaos-"))
        self._journals = self._folder / "journals"
        self._journals.mkdir()
        names = [f"{role} {rank}" for role, rank in site.ranks]
        self._net = network.Namespaces(str(number), names) if site.namespaces else network.SameNetwork()
        self._directory = Directory(self._net)
        self.members = {}
        for role, rank in site.ranks:
            name = f"{role} {rank}"
            job = Job(
                site, role, rank, 0, f"{seed} {number}", self._directory.address, self._net.host(name), 0,
                self._net.where(name), self._folder / f"{role}{rank}.log", sabotage, self._journals,
            )  # fmt: skip
            self.members[name] = Member(job)
        self._serials = itertools.count(1)
        self._ended: dict[str, list[str]] = {}
        self._awaited: dict[str, set[tuple[str, int]]] = {}
        self._orders: dict[str, Order] = {}
        self._again: list[Order] = []
        self._calm = False
        self._began_at = time.monotonic()
        self._ask_at = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._n = itertools.count()

    # What happens, in order.

    def run(self) -> Iterator[None]:
        for member in self.members.values():
            member.start()
        yield from self._until(lambda: self._all("up"), _START_S, "the ranks start")
        self._began_at = time.monotonic()
        for fault in self._faults:
            self._at(self._began_at + fault.at_s, lambda fault=fault: self._befall(fault))
        while (time.monotonic() < self._began_at + self.seconds or self._agenda) and not self._broken:
            self._route()
            yield
        yield from self._until(lambda: self._all("up"), _START_S, "every rank is up again")
        yield from self._until(lambda: not self._awaited, HUNG_AFTER_S, "every room ends")
        yield from self._healthy()
        yield from self._drain()
        yield from self._shut()

    def _healthy(self) -> Iterator[None]:
        """After all that the site serves as ever. A loaded machine may still be late, so it has several tries."""
        self._calm, tries = True, 6
        for n in range(tries):
            before = self.counts["rooms succeeded"]
            for _ in range(_WINDOW // 2):
                self._order(self._new_order())
            yield from self._until(lambda: not self._awaited, HUNG_AFTER_S, "the last rooms end")
            if self.counts["rooms succeeded"] - before == _WINDOW // 2:
                return
            self.counts["tries before all was well"] = n + 1
        if self._keeps_stranded():
            self.counts["sites that stranded memory kept from serving"] += 1
        else:
            self.wrong.append("the site does not recover: calm rooms still fail")

    def _keeps_stranded(self) -> bool:
        held = [member.last_report.get("held", {}) for member in self.members.values()]
        return any(one.get(kind) for one in held for kind in account.STRANDED)

    def _drain(self) -> Iterator[None]:
        """Everything is given back, but for what lost sessions of living peers keep."""
        more, a_session = _FDS.get(self.site.transport, _FDS_ELSE)
        for member in self.members.values():
            member.last_report = {}
        yield from self._until(self._at_rest, HUNG_AFTER_S, "every node is at rest")
        for name, member in self.members.items():
            report = member.last_report
            if not report:  # it died, or never answered: that was said already
                continue
            for kind in account.STRANDED:
                self.counts[kind] += report["held"].get(kind, 0)
            fds, most = report["fds"], member.fds_at_start + more + a_session * report["sessions"]
            if fds > most:
                self.wrong.append(
                    f"{name} has {fds} descriptors for {report['sessions']} sessions, {member.fds_at_start} at first"
                )

    def _shut(self) -> Iterator[None]:
        """Prefill first: then decode must have back what was stranded.

        Across namespaces no death can be proved: there this is the operator, who ended those processes and waited for
        them, and says so.
        """
        for role in ("prefill", "decode"):
            group = [member for member in self.members.values() if member.job.role == role and member.alive]
            if role == "decode":
                for member in group if self.site.namespaces else ():
                    member.send("fence")
                yield from self._until(
                    lambda: self._at_rest(allow_stranded=False), HUNG_AFTER_S, "what was stranded comes back"
                )
            for member in group:
                member.close()
            yield from self._until(lambda group=group: not any(m.alive for m in group), _ENDS_S, f"{role} closes")

    def end(self) -> None:
        """Leaves nothing behind, however the round went."""
        pids = [pid for member in self.members.values() for pid in member.pids]
        for member in self.members.values():
            member.end()
        self._directory.close()
        self._net.close()
        self.wrong += left_behind([*pids, self._directory.pid])
        self._judge()
        for name in sorted(set().union(*(member.shm for member in self.members.values()))):
            if Path(name).exists():
                self.counts["shared memory files left"] += 1
                Path(name).unlink(missing_ok=True)
        if self.wrong:
            self.wrong.append(f"the ranks' last words are in {self._folder}")
        else:
            shutil.rmtree(self._folder)

    def _judge(self) -> None:
        """By the model: what the ranks wrote down in all their lives, killed ones included."""
        verdict = judge([self._journals])
        self.wrong += [f"judged: {what}" for what in verdict.wrong]
        if not verdict.judged:
            self.wrong.append("the ranks wrote nothing down that could be judged")
        for what in ("moves", "leases", "writes seen at both ends"):
            self.counts[f"judged: {what}"] += verdict.counts[what]

    # Rooms.

    def _route(self) -> None:
        """Orders rooms while few are under way; with a rank down only a trickle, as routers do not know at once."""
        here = [member for member in self.members.values() if member.serves]
        down = len(here) < len(self.members)
        while here and len(self._awaited) < (2 if down else _WINDOW):
            again = self._again.pop() if self._again and self._rng.random() < 0.5 else None
            self._order(again or self._new_order())

    def _new_order(self) -> Order:
        rng, serial = self._rng, next(self._serials)
        tokens = rng.choice(
            (rng.randrange(1, 40), rng.randrange(40, 300), rng.randrange(40, 300), rng.randrange(1000, 2000))
        )
        prefix = rng.randrange(tokens) if rng.random() < 0.2 else 0
        return Order(f"room-{serial}", serial, tokens, prefix, self._calm)

    def _order(self, order: Order) -> None:
        members = [member for member in self.members.values() if member.serves]
        if members:
            self._orders[order.key] = order
            self._awaited[order.key] = {(member.name, member.life) for member in members}
        for member in members:
            member.send("order", order)

    def _answered(self, member: Member, key: str, reason: str) -> None:
        self._ended.setdefault(key, []).append(reason)
        self._no_longer(key, member)

    def _no_longer(self, key: str, member: Member) -> None:
        awaited = self._awaited.get(key)
        if awaited is None:
            return
        awaited.discard((member.name, member.life))
        if not awaited:
            del self._awaited[key]
            self._settle(self._orders.pop(key), self._ended.pop(key, []))

    def _settle(self, order: Order, reasons: list[str]) -> None:
        failed = [reason for reason in reasons if reason]
        if reasons and not failed:
            self.counts["rooms succeeded"] += 1
            return
        self.counts["rooms failed"] += 1
        self.reasons.update(set(failed) or {"all of its ranks were killed"})
        if not self._calm and self._rng.random() < _REORDERED:
            self._again.append(order)
            self.counts["rooms sent again"] += 1

    # Faults.

    def _note(self, what: str) -> None:
        """Kept beside the ranks' last words, to be read when something was wrong."""
        with (self._folder / "timeline.log").open("a") as file:
            file.write(f"{time.monotonic() - self._began_at:8.3f} {what}\n")

    def _at(self, at: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (at, next(self._n), what))

    def _befall(self, fault: Fault) -> None:
        member = self.members[f"{fault.rank[0]} {fault.rank[1]}"]
        if member.state != "up" or member.busy:
            self.counts["faults missed: the rank was not up"] += 1
            return
        member.busy = True
        until = time.monotonic() + fault.for_s
        self._note(f"{fault.kind} of {member.name} for {fault.for_s:.2f} s")
        match fault.kind:
            case "kill":
                self._kill(member, until, fault)
            case "stop" | "long stop":
                self.counts["stops" if fault.kind == "stop" else "stops beyond max_silence_s"] += 1
                member.stop()
                self._at(until, lambda: self._resume(member))
            case "stop, then kill":
                self.counts["stops"] += 1
                member.stop()
                self._at(until, lambda: self._kill(member, until, fault) if member.state == "stopped" else None)
            case "cut" | "long cut":
                kind = self._rng.choice(network.KINDS)
                self.counts[f"cuts, {kind}" + (" beyond max_silence_s" if fault.kind == "long cut" else "")] += 1
                self._note(f"cut, {kind}")
                self._net.cut(member.name, kind)
                self._at(until, lambda: self._heal(member))
            case "restart":
                self._restart(member, until, fault.same_port)

    def _kill(self, member: Member, until: float, fault: Fault) -> None:
        self.counts["kills"] += 1
        for kind, value in member.kill():
            self._hear(member, kind, value)
        self._gone(member)
        member.busy = True
        self._at(until, lambda: self._start(member, fault.same_port))

    def _restart(self, member: Member, until: float, same_port: bool) -> None:
        """Closed in order, by the operator, and started again."""
        self.counts["closed and started again"] += 1
        member.close()
        self._at(until, lambda: self._start(member, same_port))

    def _start(self, member: Member, same_port: bool) -> None:
        if member.alive and member.state != "closing":  # it died by itself, and was started for that
            return
        if member.alive:
            if time.monotonic() < member.closing_since + _ENDS_S:
                self._at(time.monotonic() + 0.05, lambda: self._start(member, same_port))
                return
            self.wrong.append(f"{member.name}, life {member.life}, does not close")
            member.end()
        self.counts["starts under the same address" if same_port else "starts under another port"] += 1
        self._note(f"{member.name} is started, life {member.life + 1}")
        member.start(same_port=same_port)
        member.busy = False

    def _resume(self, member: Member) -> None:
        if member.state == "stopped":
            member.resume()
            member.busy = False

    def _heal(self, member: Member) -> None:
        self._note(f"{member.name} is healed")
        self._net.heal(member.name)
        member.busy = False

    def _recycle(self, member: Member) -> None:
        """What an operator does with a rank most of whose memory is kept from use."""
        if member.state == "up" and not member.busy:
            member.busy = True
            self.counts["ranks recycled for their stranded memory"] += 1
            self._restart(member, time.monotonic(), same_port=True)

    # What the ranks say.

    def pump(self) -> None:
        """Hears every rank, and does what is due."""
        for member in self.members.values():
            for kind, value in member.hear():
                self._hear(member, kind, value)
        if time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + _ASK_S
            for member in self.members.values():
                member.ask()
        while self._agenda and self._agenda[0][0] <= time.monotonic():
            heapq.heappop(self._agenda)[2]()

    def _hear(self, member: Member, kind: str, value: object) -> None:
        if kind not in ("ended", "report"):
            self._note(f"{member.name}: {kind} {value}")
        match kind:
            case "ended":
                self._answered(member, *value)
            case "wrong":
                self.wrong.append(f"{member.name}, life {member.life}: {value}")
            case "report":
                if value["carved"] > _RECYCLE_AT:
                    self._recycle(member)
            case "closed":
                free, kinds = value
                self.counts["nodes closed that could not free their memory"] += not free
                for what, left in zip(("descriptors", "threads"), kinds, strict=True):
                    if left:
                        self.wrong.append(f"{member.name}, life {member.life}, closed and left {what}: {left}")
            case "gone":
                if member.closed is not None:
                    self.longest_end_s = max(self.longest_end_s, time.monotonic() - member.closing_since)
                self._gone(member)
                if member.closed is None or value != 0:
                    if member.was_aborted_by_ucx():
                        self.counts["processes that UCX aborted"] += 1
                    else:
                        self.wrong.append(f"{member.name}, life {member.life}, died by itself: exit code {value}")
                    self._at(time.monotonic(), lambda: self._start(member, same_port=True))

    def _gone(self, member: Member) -> None:
        for key in [key for key, awaited in self._awaited.items() if (member.name, member.life) in awaited]:
            self._no_longer(key, member)

    # Waiting.

    @property
    def _broken(self) -> bool:
        return len(self.wrong) > 20

    def _all(self, state: str) -> bool:
        return all(member.state == state and not member.busy for member in self.members.values())

    def _until(self, done: Callable[[], bool], limit_s: float, what: str) -> Iterator[None]:
        until = time.monotonic() + limit_s
        self._note(f"until {what}")
        while not done():
            if self._broken:
                return
            if time.monotonic() > until:
                held = {
                    m.name: {k: n for k, n in m.last_report.get("held", {}).items() if n} for m in self.members.values()
                }
                self.wrong.append(f"not in {limit_s:.0f} s: {what}; held: {held}; awaited: {self._awaited}")
                for member in self.members.values():
                    member.show_stacks()
                return
            yield

    def _at_rest(self, *, allow_stranded: bool = True) -> bool:
        """Whether every living rank last told that it holds nothing; stranded memory aside where nothing fences."""
        for member in self.members.values():
            if member.alive:
                if member.last_report.get("life") != member.life:
                    return False
                allowed = account.STRANDED if allow_stranded and not member.last_report["fences"] else ()
                if any(n for kind, n in member.last_report["held"].items() if kind not in allowed):
                    return False
        return True

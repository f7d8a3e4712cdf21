"""Who is asked for prefill ranks: the real table, behind answers that take their time, fail, or are none."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdstage.control.directory import Advert, Directory
from pdstage.errors import PeerError, TransportError, UsageError

if TYPE_CHECKING:
    from tests.sim.manager.scheduler import Scheduler

ADDRESSES = ("one:1", "two:1")
"""One table under two names, so that a node has two threads that ask."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Chances of each request: that nothing answers, that what answers is wrong, that the client itself breaks, that it
    lasts up to `late_s`.
    """

    none: float = 0.0
    wrong: float = 0.0
    broken: float = 0.0
    late: float = 0.0
    late_s: float = 0.5


class Bootstrap:
    def __init__(self, scheduler: Scheduler, rng: random.Random, answers: Answers) -> None:
        self._scheduler, self._rng, self._answers = scheduler, rng, answers
        self.table = Directory(lambda: scheduler.now)
        self.n_broken = 0

    def client(self, address: str, keys: object = None) -> Client:
        if address not in ADDRESSES:
            raise UsageError(f"{address!r} is no address", remedy="give one")
        return Client(self, address)

    def request(self) -> None:
        rng, answers = self._rng, self._answers
        self._scheduler.block("a directory", rng.uniform(0, answers.late_s if rng.random() < answers.late else 2e-3))
        if rng.random() < answers.none:
            raise TransportError("nothing answers")
        if rng.random() < answers.wrong:
            raise PeerError("the answer is none")
        if rng.random() < answers.broken:
            self.n_broken += 1
            raise ValueError("scripted")


class Client:
    """`BootstrapClient`."""

    def __init__(self, bootstrap: Bootstrap, address: str) -> None:
        self._bootstrap, self.given, self.address = bootstrap, address, address

    def publish(self, advert: Advert, ttl_s: float = 15.0) -> None:
        self._bootstrap.request()
        self._bootstrap.table.publish(advert, ttl_s)

    def withdraw(self, advert: Advert) -> None:
        self._bootstrap.request()
        self._bootstrap.table.withdraw(advert.instance, advert.topology.unique_rank, advert.incarnation)

    def lookup(self, dp_rank: int | None = None, *, instance: str | None = None) -> list[Advert]:
        self._bootstrap.request()
        return self._bootstrap.table.lookup(instance, dp_rank)

"""Who is asked for prefill ranks: the real table, behind answers that take their time, fail, or are none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdstage.control.directory import Advert, Directory
from pdstage.errors import TransportError, UsageError

if TYPE_CHECKING:
    from tests.sim.manager.world import World

ADDRESSES = ("one:1", "two:1")
"""One table under two names, so that a node has two threads that ask."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Chances of each request: that nothing answers, that the client itself breaks, that it lasts up to `late_s`."""

    none: float = 0.0
    broken: float = 0.0
    late: float = 0.0
    late_s: float = 0.5


class Client:
    """`BootstrapClient`."""

    def __init__(self, world: World, address: str) -> None:
        if address not in ADDRESSES:
            raise UsageError(f"{address!r} is no address", remedy="give one")
        self._world, self.given, self.address = world, address, address

    def publish(self, advert: Advert, ttl_s: float = 15.0) -> None:
        self._table().publish(advert, ttl_s)

    def withdraw(self, advert: Advert) -> None:
        self._table().withdraw(advert)

    def lookup(self, dp_rank: int | None = None, *, instance: str | None = None) -> list[Advert]:
        return self._table().lookup(instance, dp_rank)

    def _table(self) -> Directory:
        """Where the request arrives."""
        world, rng, answers = self._world, self._world.rng, self._world.scenario.answers
        world.scheduler.block("a directory", rng.uniform(0, answers.late_s if rng.random() < answers.late else 2e-3))
        if rng.random() < answers.none:
            raise TransportError("nothing answers")
        if rng.random() < answers.broken:
            world.n_broken_lookups += 1
            raise ValueError("scripted")
        return world.directory

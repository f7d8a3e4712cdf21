"""What a seed stands for."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from pdstage.transport.base import Traits
from tests.sim.manager.bootstrap import Answers
from tests.sim.manager.fabric import Faults
from tests.sim.manager.network import Delays

WAITS = ("wait", "short waits", "poll", "poll_many", "async")
MOST_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Room:
    """One room's jobs: seconds from its begin, and how its engines wait for its end."""

    name: str
    tokens: int
    n_chunks: int
    aux: bytes | None
    """Where nodes have rows, what a row's column holds."""
    send_s: float
    receive_s: float
    bind_s: float
    after_s: float
    ready_s: float
    chunk_s: float
    address: str
    waits: tuple[str, str]
    """At prefill, at decode."""
    abort: tuple[str, float | None] = ("", 0.0)
    """By which side's second thread, and when; None: just as the handle changes for the first time."""
    watched: bool = False
    """Two more threads of each side poll the room meanwhile."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What happens to a process at a time: it stops for a while, its clock jumps, its connections break, it ends, or
    its engine closes it: `twice`, from two threads, while a third still begins rooms.
    """

    kind: str
    process: str
    at_s: float
    for_s: float = 0.0
    twice: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    n_prefill: int
    n_decode: int
    threads: tuple[bool, bool]
    """Whether the nodes of each side have a thread."""
    traits: Traits
    announces: bool
    path: str
    rows: str
    """How aux rows travel; empty where nodes have none."""
    large_nbytes: int
    ahead_s: dict[str, float]
    switches: float
    lines: float
    deep: bool
    delays: Delays
    faults: Faults
    answers: Answers
    bad_copies: float
    no_threads: float
    rooms: tuple[Room, ...]
    disturbances: tuple[Disturbance, ...] = field(default=())
    turner: bool = False
    """Where nodes are inline, a thread of the engine turns them."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*(f"p{n}" for n in range(self.n_prefill)), *(f"d{n}" for n in range(self.n_decode)))

    @property
    def calm(self) -> bool:
        """Nothing goes wrong: then every room must succeed."""
        quiet = self.delays.late == 0 and self.faults == Faults() and self.answers == Answers()
        aborted = any(room.abort[0] for room in self.rooms)
        return quiet and not aborted and not self.disturbances and not self.bad_copies and not self.no_threads


def draw(seed: int) -> Scenario:
    rng = random.Random(f"scenario {seed}")
    chance = rng.random
    calm = chance() < 0.25
    n_prefill, n_decode = rng.choice([(1, 1), (1, 1), (1, 1), (2, 1), (1, 2)])
    threads = (chance() < 0.7, chance() < 0.7)
    names = [*(f"p{n}" for n in range(n_prefill)), *(f"d{n}" for n in range(n_decode))]
    notifies = chance() < 0.7
    traits = Traits(
        name="sim", notifies=notifies, max_descriptors=rng.choice([2, 1 << 20]), kinds=frozenset({"cpu"}),
        post_blocks=chance() < 0.3, fences=chance() < 0.5, stops_reads=chance() < 0.6, bytes_per_s=5e9,
        descriptor_s=1e-6, post_s=1e-5, maps=notifies and chance() < 0.3,
    )  # fmt: skip

    def rate(most: float, likely: float = 0.3) -> float:
        return chance() * most if not calm and chance() < likely else 0.0

    return Scenario(
        seed=seed,
        n_prefill=n_prefill,
        n_decode=n_decode,
        threads=threads,
        traits=traits,
        announces=chance() < 0.6,
        path=rng.choice(["staged", "direct", "auto"]),
        rows=rng.choice(["", "", "tcp", "rdma"]),
        large_nbytes=rng.choice([64, 128 << 10]),
        ahead_s={name: rng.choice([0.0, 5.0, 1e6]) for name in names},
        switches=rng.choice([0.02, 0.1, 0.4]),
        lines=rng.choice([0.0, 0.002, 0.02, 0.1]),
        deep=chance() < 0.3,
        delays=Delays(late=rate(0.1)),
        faults=Faults(slow=rate(0.3), refuse=rate(0.2), fail=rate(0.3), lose_tag=rate(0.2)),
        answers=Answers(none=rate(0.5), broken=rate(0.2), late=rate(0.5)),
        bad_copies=rate(0.2, 0.2),
        no_threads=rate(0.3, 0.2),
        rooms=tuple(_room(rng, n, calm) for n in range(rng.randint(1, 3))),
        disturbances=() if calm else tuple(_disturbance(rng, names) for _ in range(rng.choice([0, 0, 1, 1, 2]))),
        turner=chance() < 0.3,
    )


def _room(rng: random.Random, n: int, calm: bool) -> Room:
    def soon() -> float:
        return rng.choice([0.0, 0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.5)])

    return Room(
        name=f"r{n}",
        tokens=rng.randint(1, MOST_TOKENS),
        n_chunks=rng.randint(1, 3),
        aux=rng.choice([None, b"aux %d" % n]),
        send_s=soon(),
        receive_s=soon(),
        bind_s=soon(),
        after_s=soon(),
        ready_s=soon(),
        chunk_s=soon(),
        address=rng.choice(["one:1", "two:1"]),
        waits=(rng.choice(WAITS), rng.choice(WAITS)),
        abort=("", 0.0) if calm or rng.random() < 0.6 else (rng.choice("pd"), rng.choice([None, soon()])),
        watched=rng.random() < 0.3,
    )


def _disturbance(rng: random.Random, names: list[str]) -> Disturbance:
    return Disturbance(
        kind=rng.choice(["stop", "jump", "cut", "cut", "end", "close", "close", "close"]),
        process=rng.choice(names),
        at_s=rng.choice([rng.uniform(0, 0.05), rng.uniform(0, 0.6)]),
        for_s=rng.choice([0.01, rng.uniform(0, 0.5), rng.uniform(0, 3.0)]),
        twice=rng.random() < 0.5,
    )

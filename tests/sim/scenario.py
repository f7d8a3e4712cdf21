"""What a seed stands for: the ranks, the sizes, the transport's promises and how often each fault comes.

Must not know the world it describes. Equal seeds are equal scenarios in every process and on every Python.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

DEADLINES = {
    "hello_s": 4.0,
    "open_s": 6.0,
    "wait_s": 10.0,
    "transfer_s": 8.0,
    "recall_after_s": 0.6,
    "stuck_after_s": 0.4,
    "drain_s": 4.0,
    "open_wait_s": 10.0,
    "send_wait_s": 10.0,
    "write_s": 5.0,
    "max_silence_s": 3.0,
    "idle_s": 0.5,
    "fall_back_after_s": 2.0,
}
PATIENT = dict.fromkeys(DEADLINES, 1000.0) | {
    "recall_after_s": 0.6,
    "stuck_after_s": 0.4,
    "fall_back_after_s": 2.0,
}
"""For calm seeds: what ends a room there is never a deadline (I11)."""


@dataclass(frozen=True, slots=True)
class Faults:
    """How often, per delivery (`loss`, `tag_loss`, `twice`, `fail`, `alter`) or per step (the others)."""

    loss: float = 0.0
    tag_loss: float = 0.0
    twice: float = 0.0
    fail: float = 0.0
    alter: float = 0.0
    crash: float = 0.0
    close: float = 0.0
    stall: float = 0.0
    cut: float = 0.0
    abort: float = 0.0
    unreachable: float = 0.0
    slow: float = 0.0
    """How often a kind of thing between two ranks becomes slow, or quick again: passed over while anything else moves.
    """


@dataclass(frozen=True, slots=True)
class Scenario:
    """One seed's world. `in_order` is how often the oldest thing under way is taken before any other."""

    seed: int
    prefill: int
    decode: int
    heads: int
    instances: bool
    path: str
    checksums: bool
    fences: bool
    stops_reads: bool
    notifies: bool
    """Tags come with the data; else their writers say them as messages."""
    placed: bool
    """Gathers write straight into the lease. Nothing stops them then: never where `fences`."""
    n_lanes: int
    lane_nbytes: int
    n_buffers: int
    buffer_nbytes: int
    n_pages: int
    dst_hnd: bool
    dst_page: int
    kind: str
    """"" for tokens; "slots" without positions, of which the sides name different numbers; "exact" where as many."""
    roles: tuple[str, ...]
    """A token's views in a layer. Each takes 128 bytes of a lease and a lane counts in 256, so one alone makes leases
    that do not fill what they occupy.
    """
    n_pieces: int
    """A post lands in so many pieces, at as many moments."""
    in_order: float
    patience: float
    """How many things are under way before no time passes."""
    eager: float
    """How soon a chunk's data is computed: the chance each time that an engine might say so."""
    calm: bool
    parting: bool = False
    """Sessions that nobody needs end soon. That frees all there is to free, and so hides what was left: not often."""
    aux: str = ""
    """"" for bytes; "packed" for rows in messages, "rows" for rows written in place."""
    advance: bool = True
    """Decode lends staging memory with Open."""
    more_columns: str = ""
    """The side, "P" or "D", that has one the other lacks."""
    faults: Faults = field(default_factory=Faults)

    @property
    def config(self) -> dict[str, float]:
        deadlines = PATIENT if self.calm else DEADLINES
        return deadlines if self.parting else deadlines | {"idle_s": 1000.0}

    @property
    def deadline_s(self) -> float:
        return 1000.0 if self.calm else 30.0


def draw(seed: int) -> Scenario:
    """The scenario of a seed. One in five is calm: only the scheduler's whims, or messages that are lost, late or there
    twice; then every room must succeed (I4, I11).
    """
    rng = random.Random(f"scenario/{seed}")
    calm = rng.random() < 0.2
    return Scenario(
        seed=seed,
        prefill=rng.choice([1, 1, 2, 2, 3, 4]),
        decode=rng.choice([1, 1, 2, 2, 3, 4]),
        heads=rng.choice([2, 4]),
        instances=rng.random() < 0.3,
        path=rng.choice(["staged", "staged", "direct", "auto"]),
        checksums=rng.random() < 0.5,
        fences=rng.random() < 0.6,
        stops_reads=rng.random() < 0.6,
        notifies=random.Random(f"notifies/{seed}").random() < 0.7,
        placed=random.Random(f"placed/{seed}").random() < 0.5,
        n_lanes=rng.choice([1, 1, 2, 3]),
        lane_nbytes=rng.choice([512, 768, 1024, 2048]),
        n_buffers=rng.choice([1, 2, 2, 3]),
        buffer_nbytes=rng.choice([512, 768, 1024]),
        n_pages=64 if calm else rng.choice([6, 8, 16, 32]),
        dst_hnd=rng.random() < 0.4,
        dst_page=rng.choice([2, 4, 4, 8]),
        kind=random.Random(f"kind/{seed}").choice([*[""] * 13, "slots", "slots", "exact"]),
        roles=random.Random(f"roles/{seed}").choice([("k", "v"), ("k", "v"), ("latent",), ("k", "v", "index")]),
        n_pieces=rng.choice([1, 2, 2, 3]),
        in_order=rng.choice([0.3, 0.6, 0.8, 0.9]),
        patience=rng.choice([2, 6, 12]),
        eager=rng.choice([0.02, 0.1, 1.0]),
        calm=calm,
        parting=random.Random(f"parting/{seed}").random() < 0.25,
        advance=random.Random(f"advance/{seed}").random() < 0.7,
        aux=random.Random(f"aux/{seed}").choice(["", "packed", "rows", "rows"]),
        more_columns=random.Random(f"columns/{seed}").choice(["", "P", "D"]),
        faults=_draw_noise(rng) if calm else _draw_faults(rng),
    )


def _draw_noise(rng: random.Random) -> Faults:
    """What costs time and never correctness."""
    if rng.random() < 0.3:
        return Faults()
    return Faults(loss=rng.choice([0.02, 0.1, 0.3]), twice=rng.choice([0.0, 0.1]), slow=rng.choice([0.0, 0.02]))


def _draw_faults(rng: random.Random) -> Faults:
    """Every kind is possible in every seed; which are frequent differs, so that rooms also get far."""
    return Faults(
        loss=rng.choice([0.002, 0.02, 0.1, 0.3]),
        tag_loss=rng.choice([0.0, 0.0, 0.01, 0.05]),
        twice=rng.choice([0.01, 0.1]),
        fail=rng.choice([0.0, 0.005, 0.02, 0.1]),
        alter=rng.choice([0.0, 0.02, 0.1]),
        crash=rng.choice([0.0, 0.0, 0.002, 0.005]),
        close=rng.choice([0.0, 0.0, 0.002]),
        stall=rng.choice([0.0, 0.002, 0.008]),
        cut=rng.choice([0.0, 0.002, 0.008]),
        abort=rng.choice([0.001, 0.003, 0.01]),
        unreachable=rng.choice([0.0, 0.0, 0.001]),
        slow=rng.choice([0.0, 0.005, 0.02]),
    )


Script = tuple[tuple[str, object], ...]
"""What one rank's engine does for one room, in order: (verb, argument)."""


class Job:
    """One life of one room, as its engines mean it: drawn from the seed and its own number alone, so that a schedule
    with other events left out still means the same.
    """

    def __init__(self, scenario: Scenario, uid: int) -> None:
        rng = random.Random(f"job/{scenario.seed}/{uid}")
        self.uid = uid
        again = uid > 0 and not scenario.calm and rng.random() < 0.25
        self.number = rng.randrange(uid) if again else uid
        room = random.Random(f"room/{scenario.seed}/{self.number}")
        self.tokens = room.choice([3, 4, 8, 8, 11])
        self.n_asked = self.tokens
        """Of slots, decode's number; prefill's is `tokens`."""
        if scenario.kind == "slots" or (scenario.kind == "exact" and not scenario.calm):
            self.n_asked += random.Random(f"asked/{scenario.seed}/{self.number}").choice([0, -2, -1, 1, 4])
        self.prefix = rng.choice([0, 0, 0, 2])
        self.priority = rng.randrange(2)
        self.aux = b"aux of %d" % self.number
        self.writer = rng.randrange(scenario.prefill) if scenario.instances else None
        sure = scenario.calm
        self.scripts: dict[str, Script] = {}
        for rank in range(scenario.decode):
            if sure or rng.random() < 0.96:
                bind = [("bind", None)] if sure or rng.random() < 0.93 else []
                self.scripts[f"D{rank}"] = (("receive", None), *bind)
        for rank in range(scenario.prefill):
            if self.writer in {None, rank} and (sure or rng.random() < 0.96):
                self.scripts[f"P{rank}"] = tuple(self._sending(rng, sure))

    def _sending(self, rng: random.Random, sure: bool) -> list[tuple[str, object]]:
        """Chunks by tokens and by layers, some given before their data exists, and the end that some never reach."""
        size = rng.choice([2, 4, 11])
        steps: list[tuple[str, object]] = [("submit", None)]
        late = []
        for start in range(0, self.tokens, size):
            for layers in [(0, 1), (1, 2)] if rng.random() < 0.3 else [(0, 2)]:
                ready = rng.random() < 0.6
                steps.append(("chunk", (start, min(start + size, self.tokens), *layers, ready)))
                if not ready:
                    late.append(len(steps) - 1)
        if sure or rng.random() < 0.95:
            steps.append(("finish", None))
        for n, at in reversed(list(enumerate(late))):
            steps.insert(rng.randrange(at + 1, len(steps) + 1), ("ready", n))
        return steps

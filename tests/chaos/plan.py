"""What a round draws from its seed and number alone: a site, which is a few ranks and a directory, and its faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

from pdstage import Config

CONFIG = Config(
    retry_s=0.05, hello_s=6.0, open_s=4.0, wait_s=5.0, transfer_s=4.0, recall_after_s=0.3,
    stuck_after_s=0.2, drain_s=2.0, open_wait_s=6.0, send_wait_s=6.0, write_s=3.0, max_silence_s=1.5,
)  # fmt: skip
ROOM_S = 8.0
"""`deadline_s` of every room."""
HUNG_AFTER_S = 2.5 * (CONFIG.hello_s + CONFIG.open_wait_s + ROOM_S)
"""The longest path through the deadlines (a lookup, a greeting, a room), 2.5 times over, in time awake."""


class Kind(NamedTuple):
    """How often it befalls a rank, of all faults, and for how long, in units of `max_silence_s`."""

    often: int
    shortest: float
    longest: float


KINDS = {
    "kill": Kind(30, 0.0, 0.8),
    "stop": Kind(44, 0.01, 2.2),
    "stop, then kill": Kind(8, 0.0, 1.6),
    "cut": Kind(10, 0.1, 2.5),
    "cut, one way": Kind(5, 0.1, 1.7),
    "cut from one": Kind(4, 0.1, 2.5),
    "restart": Kind(4, 0.0, 0.2),
    "drain": Kind(2, 0.0, 2.0),
}


class Engine(NamedTuple):
    """One instance: `tp` ranks."""

    name: str
    role: str
    tp: int
    page: int
    hnd: bool
    progress: str

    @property
    def ranks(self) -> list[str]:
        return [f"{self.name} {rank}" for rank in range(self.tp)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Who is there. `fabric`: UCX_TLS of every rank, or empty."""

    engines: tuple[Engine, ...]
    transport: str = "local"
    path: str = "auto"
    n_lanes: int = 1
    checksums: bool = False
    network: str = ""
    """"apart": each rank in a namespace of its own; "shared": all in one; "": where the supervisor is, and uncut."""
    fabric: str = ""
    faults: dict[str, float] = field(default_factory=dict)
    """Of a rank's transport in its first life (`transport.faults.Faults`). They end before the round."""


class Fault(NamedTuple):
    """`kind` befalls `whom` `at_s` after the rooms began, for `for_s` (killed ranks: until they are started again)."""

    at_s: float
    kind: str
    whom: str
    peer: str
    for_s: float
    same_port: bool


def draw_site(seed: int, number: int, transport: str, seconds: float, *, namespaces: bool) -> Site:
    rng = random.Random(f"site {seed} {number}")
    transport = rng.choice(("local", "nixl")) if transport == "both" else transport
    network = "" if not namespaces else "apart" if transport == "nixl" else "shared"
    path = rng.choice(("staged", "direct", "auto", "direct"))
    engines = [
        Engine(f"{role} {n}", role, rng.choice((1, 2)), rng.choice((8, 16)), rng.random() < 0.5,
               rng.choice(("inline", "thread")))
        for role in ("prefill", "decode")
        for n in range(2)
    ]  # fmt: skip
    faults = {}
    if rng.random() < 0.4:  # a transport with faults maps no memory, so the others are without
        faults = {name: rng.choice((0.0, 0.002, 0.02)) for name in ("refuse", "fail", "fail_written", "lose_tag")}
        faults |= {"delay": rng.choice((0.0, 0.1)), "delay_s": rng.choice((0.01, 0.5))}
        faults |= {"seed": number, "for_s": 0.8 * seconds}
    return Site(
        engines=tuple(engines), transport=transport, path=path, n_lanes=rng.choice((1, 2, 3)), network=network,
        checksums=rng.random() < 0.3 and path != "direct", faults=faults,
        fabric="tcp,self" if network == "apart" or (transport == "nixl" and rng.random() < 0.5) else "",
    )  # fmt: skip


def draw_faults(seed: int, number: int, site: Site, seconds: float) -> list[Fault]:
    """Those that find their rank busy with another are missed."""
    rng = random.Random(f"faults {seed} {number}")
    kinds = list(KINDS)
    weights = [kind.often for kind in KINDS.values()]
    ranks = [rank for engine in site.engines for rank in engine.ranks]
    faults = []
    at_s = 0.3
    while (at_s := at_s + rng.expovariate(2.0)) < seconds:
        kind = rng.choices(kinds, weights)[0]
        whom, peer = rng.sample(ranks, 2)
        for_s = CONFIG.max_silence_s * rng.uniform(KINDS[kind].shortest, KINDS[kind].longest)
        faults.append(Fault(at_s, kind, whom, peer, for_s, rng.random() < 0.75))
    return faults

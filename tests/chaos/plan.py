"""What a round draws from its seed and number alone: the site, and the faults that befall it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from pdstage import Config

CONFIG = Config(
    retry_s=0.05, hello_s=6.0, open_s=4.0, wait_s=5.0, transfer_s=4.0, recall_after_s=0.3,
    stuck_after_s=0.2, drain_s=2.0, open_wait_s=6.0, send_wait_s=6.0, write_s=3.0, max_silence_s=1.5,
)  # fmt: skip
ROOM_S = 8.0
"""`deadline_s` of every room."""
HUNG_AFTER_S = 2.5 * (CONFIG.hello_s + CONFIG.open_wait_s + ROOM_S)
"""The longest path through the deadlines (a lookup, a greeting, a room), 2.5 times over. Counted in time awake."""
SIZES = ((2, 1), (1, 2), (2, 2))


@dataclass(frozen=True, slots=True)
class Site:
    """Who is there. `fabric`: UCX_TLS of every rank, or empty. `namespaces`: each rank in a network of its own."""

    src_tp: int
    dst_tp: int
    transport: str
    path: str
    src_progress: str
    dst_progress: str
    src_hnd: bool
    dst_hnd: bool
    src_page: int
    dst_page: int
    n_lanes: int
    checksums: bool
    fabric: str
    namespaces: bool
    faults: tuple[tuple[str, float], ...] = ()
    """Of a rank's transport in its first life (docs/transports.md, Deliberate faults). They end before the round."""

    @property
    def ranks(self) -> list[tuple[str, int]]:
        return [("prefill", rank) for rank in range(self.src_tp)] + [("decode", rank) for rank in range(self.dst_tp)]

    def __str__(self) -> str:
        cut = "namespaces" if self.namespaces else "proxy"
        fabric = f"({self.fabric})" if self.fabric else ""
        return (
            f"tp {self.src_tp}->{self.dst_tp} {self.transport}{fabric} {self.path} "
            f"{self.src_progress}->{self.dst_progress} {cut}{' faulty' if self.faults else ''}"
        )


class Fault(NamedTuple):
    """`kind` befalls a rank `at_s` after the rooms began, for `for_s` (killed ranks: until it is started again)."""

    at_s: float
    rank: tuple[str, int]
    kind: str
    for_s: float
    same_port: bool


KINDS = {"kill": 30, "stop": 22, "long stop": 22, "stop, then kill": 8, "cut": 8, "long cut": 6, "restart": 4}


def draw_site(seed: int, number: int, transport: str, seconds: float, *, namespaces: bool) -> Site:
    rng = random.Random(f"site {seed} {number}")
    kind = rng.choice(("local", "nixl")) if transport == "both" else transport
    src_tp, dst_tp = SIZES[number % len(SIZES)]
    page = rng.choice((8, 16))
    apart = namespaces and kind == "nixl"
    path = rng.choice(("staged", "direct", "auto", "direct"))
    return Site(
        src_tp, dst_tp, kind, path=path,
        src_progress=rng.choice(("inline", "thread")), dst_progress=rng.choice(("inline", "thread")),
        src_hnd=rng.random() < 0.5, dst_hnd=rng.random() < 0.5,
        src_page=page, dst_page=rng.choice((page, 16)),
        n_lanes=rng.choice((1, 2, 3)), checksums=rng.random() < 0.3 and path != "direct",
        # Within one network shared memory would go around every cut.
        fabric="tcp,self" if apart or (kind == "nixl" and rng.random() < 0.5) else "",
        namespaces=apart, faults=_draw_transport_faults(seed, number, seconds),
    )  # fmt: skip


def _draw_transport_faults(seed: int, number: int, seconds: float) -> tuple[tuple[str, float], ...]:
    """Those of two rounds in five. A transport with faults maps no memory, so the others are without."""
    rng = random.Random(f"transport faults {seed} {number}")
    if rng.random() > 0.4:
        return ()
    chances = {name: rng.choice((0.0, 0.002, 0.02)) for name in ("refuse", "fail", "fail_written", "lose_tag")}
    late = {"delay": rng.choice((0.0, 0.1)), "delay_s": rng.choice((0.01, 0.5))}
    return tuple((chances | late | {"seed": number, "for_s": 0.8 * seconds}).items())


def draw_faults(seed: int, number: int, site: Site, seconds: float) -> list[Fault]:
    """One after the other at each rank; those of different ranks meet as they may."""
    rng = random.Random(f"faults {seed} {number}")
    kinds, weights = list(KINDS), list(KINDS.values())
    silence_s = CONFIG.max_silence_s
    spans = {
        "kill": (0.0, 1.2), "stop": (0.02, 0.7 * silence_s), "long stop": (1.1 * silence_s, 2.2 * silence_s),
        "stop, then kill": (0.0, 1.6 * silence_s), "cut": (0.1, 0.7 * silence_s),
        "long cut": (1.1 * silence_s, 2.5 * silence_s), "restart": (0.0, 0.3),
    }  # fmt: skip
    faults = []
    for rank in site.ranks:
        at_s = rng.uniform(0.3, 2.0)
        while at_s < seconds:
            kind = rng.choices(kinds, weights)[0]
            for_s = rng.uniform(*spans[kind])
            faults.append(Fault(at_s, rank, kind, for_s, rng.random() < 0.75))
            at_s += for_s + 0.4 + rng.expovariate(1 / 1.5)
    return sorted(faults)

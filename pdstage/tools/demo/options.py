"""The options of a demo run. `pdstage demo --help` imports only this and `families`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pdstage.errors import UsageError
from pdstage.layout.topology import Topology
from pdstage.tools.demo.families import FAMILIES, N_LAYERS, VOCAB, Family

MODELS = tuple(FAMILIES)
LAYOUTS = ("nhd", "hnd")
TRANSPORTS = ("auto", "nixl", "local", "mooncake")
PATHS = ("auto", "direct", "staged")
AUX = ("tcp", "rdma")
ROUNDS = 3
_MAX_RANKS, _MAX_PAGE, _MAX_SEED = 32, 1024, (1 << 32) - 1
_MAX_REQUESTS = 256  # all prompts differ in length, so this is at most the number of lengths
_SHORTEST_PROMPT, _LONGEST_PROMPT = 40, 360


@dataclass(frozen=True, slots=True)
class Side:
    """One side's layout: its sizes, its pages, and the order of heads and tokens in them."""

    tp: int
    pp: int
    page: int
    layout: str

    def places(self) -> list[Topology]:
        """Its ranks, by number."""
        return [
            Topology(tp_size=self.tp, tp_rank=tp_rank, pp_size=self.pp, pp_rank=pp_rank)
            for pp_rank in range(self.pp)
            for tp_rank in range(self.tp)
        ]

    def __str__(self) -> str:
        return f"TP {self.tp}" + (f" x PP {self.pp}" if self.pp > 1 else "")


@dataclass(frozen=True, slots=True)
class Options:
    """One run. Decode generates `new_tokens` after the first one, which prefill computes.

    `chunk_tokens` is deliberately not a multiple of decode's page: a chunk ends inside a page. `transport`: None for
    nixl if it starts, else one that does. `device`, "cpu" or "cuda:1", has all ranks' pages. The model computes in
    float64, on the CPU. Raises `UsageError` for a value out of range.
    """

    model: str = "llama"
    transport: str | None = None
    path: str = "auto"
    aux: str = "tcp"
    prefill_tp: int = 4
    decode_tp: int = 2
    prefill_pp: int = 1
    decode_pp: int = 1
    prefill_page: int = 16
    decode_page: int = 32
    prefill_layout: str = "nhd"
    decode_layout: str = "hnd"
    device: str = "cpu"
    requests: int = 4
    seed: int = 0
    picture: Path | None = None
    trace: Path | None = None
    new_tokens: int = 32
    chunk_tokens: int = 48

    def __post_init__(self) -> None:
        for name, side in (("prefill", self.prefill), ("decode", self.decode)):
            _within(f"{name}-tp", side.tp, 1, _MAX_RANKS)
            _within(f"{name}-pp", side.pp, 1, N_LAYERS)
            _within(f"{name}-page", side.page, 1, _MAX_PAGE)
            if side.tp * side.pp > _MAX_RANKS:
                raise UsageError(
                    f"--{name}-tp {side.tp} and --{name}-pp {side.pp} make {side.tp * side.pp} ranks",
                    remedy=f"at most {_MAX_RANKS} a side",
                )
        _within("requests", self.requests, 1, _MAX_REQUESTS)
        _within("seed", self.seed, 0, _MAX_SEED)

    @property
    def prefill(self) -> Side:
        return Side(self.prefill_tp, self.prefill_pp, self.prefill_page, self.prefill_layout)

    @property
    def decode(self) -> Side:
        return Side(self.decode_tp, self.decode_pp, self.decode_page, self.decode_layout)

    @property
    def family(self) -> Family:
        return FAMILIES[self.model]

    @property
    def moves(self) -> tuple[str, ...]:
        """The paths of the transfers at the end of the run, in order; empty if one path is selected, or a trace."""
        return ("direct", "staged") * ROUNDS if self.path == "auto" and self.trace is None else ()

    def prompts(self) -> list[list[int]]:
        """Random prompts of different lengths."""
        rng = np.random.default_rng(self.seed)
        lengths = rng.choice(np.arange(_SHORTEST_PROMPT, _LONGEST_PROMPT), size=self.requests, replace=False)
        return [rng.integers(0, VOCAB, size=int(n)).tolist() for n in lengths]


def _within(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"--{option} is {value}", remedy=f"give a number from {low} to {high}")

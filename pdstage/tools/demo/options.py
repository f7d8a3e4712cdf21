"""The options of a demo run; `families` has the models.

`pdstage demo --help` imports only this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003  (a field's type, kept readable at run time)

import numpy as np

from pdstage.errors import UsageError
from pdstage.layout.topology import Topology
from pdstage.tools.demo.families import FAMILIES, N_LAYERS, VOCAB, Family
from pdstage.tools.watch.option import checked

MAX_RANKS = 32
MAX_REQUESTS = 256  # all prompts differ in length, so this is the number of lengths
MAX_PAGE = 1024
MODELS = tuple(FAMILIES)
LAYOUTS = ("nhd", "hnd")
TRANSPORTS = ("auto", "nixl", "local", "mooncake")
PATHS = ("auto", "direct", "staged")
ROUNDS = 3
AUX = ("tcp", "rdma")
KV_DTYPES = ("float64", "bfloat16")
SHORTEST_PROMPT, LONGEST_PROMPT = 40, 360


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
    nixl if it starts, else one that does. `kv_heads`: None for the model's own. `decode_aux`: None for the same as
    `aux`. `device`, "cpu" or "cuda:1", is shared by all ranks. `kv_dtype`: None for bfloat16 on a GPU, as in engines,
    and float64 otherwise. The model always computes in float64, on the CPU. Raises `UsageError` for a value out of
    range.
    """

    model: str = "llama"
    transport: str | None = None
    path: str = "auto"
    aux: str = "tcp"
    decode_aux: str | None = None
    prefill_tp: int = 4
    decode_tp: int = 2
    prefill_pp: int = 1
    decode_pp: int = 1
    prefill_page: int = 16
    decode_page: int = 32
    prefill_layout: str = "nhd"
    decode_layout: str = "hnd"
    kv_heads: int | None = None
    device: str = "cpu"
    kv_dtype: str | None = None
    requests: int = 4
    seed: int = 0
    json: Path | None = None
    metrics_port: int | None = None
    trace: Path | None = None
    new_tokens: int = 32
    chunk_tokens: int = 48
    deadline_s: float = 300.0

    def __post_init__(self) -> None:
        for name, chosen, known in (
            ("model", self.model, MODELS),
            ("transport", self.transport or "auto", TRANSPORTS),
            ("path", self.path, PATHS),
            ("aux", self.aux, AUX),
            ("decode-aux", self.decode_aux or self.aux, AUX),
            ("prefill-layout", self.prefill_layout, LAYOUTS),
            ("decode-layout", self.decode_layout, LAYOUTS),
            ("kv-dtype", self.kept_as, KV_DTYPES),
        ):
            if chosen not in known:
                raise UsageError(f"--{name} is {chosen!r}", remedy=f"choose one of {', '.join(known)}", field=name)
        for name, value, most in (
            ("prefill-tp", self.prefill_tp, MAX_RANKS),
            ("decode-tp", self.decode_tp, MAX_RANKS),
            ("prefill-pp", self.prefill_pp, N_LAYERS),
            ("decode-pp", self.decode_pp, N_LAYERS),
            ("prefill-page", self.prefill_page, MAX_PAGE),
            ("decode-page", self.decode_page, MAX_PAGE),
            ("kv-heads", self.heads, MAX_RANKS),
            ("requests", self.requests, MAX_REQUESTS),
        ):
            if not 1 <= value <= most:
                raise UsageError(f"--{name} is {value}", remedy=f"give a number from 1 to {most}", field=name)
        self._check_together()

    def _check_together(self) -> None:
        """Checks combinations, and values without an upper bound."""
        for name, side in (("prefill", self.prefill), ("decode", self.decode)):
            if side.tp * side.pp > MAX_RANKS:
                raise UsageError(
                    f"--{name}-tp {side.tp} and --{name}-pp {side.pp} make {side.tp * side.pp} ranks",
                    remedy=f"at most {MAX_RANKS} a side",
                    field=f"{name}-pp",
                )
        if self.kv_heads is not None and not self.family.kv_heads:
            raise UsageError(
                f"--kv-heads with {self.model}, which has no KV heads", remedy="leave it out", field="kv-heads"
            )
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device):
            raise UsageError(f"--device is {self.device!r}", remedy="give cpu, cuda or cuda:N", field="device")
        if self.model != "llama" and (self.device != "cpu" or self.kept_as != KV_DTYPES[0]):
            raise UsageError(
                f"{self.model} with --device {self.device} and --kv-dtype {self.kept_as}",
                remedy=f"choose --model llama, or --device cpu and {KV_DTYPES[0]}",
                field="device",
            )
        if self.seed < 0:
            raise UsageError(f"--seed is {self.seed}", remedy="give 0 or a positive number", field="seed")
        checked(self.metrics_port)
        for name, file in (("json", self.json), ("trace", self.trace)):
            if file is not None and not file.absolute().parent.is_dir():
                raise UsageError(f"--{name} {file}: its folder does not exist", remedy="create it", field=name)

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
    def heads(self) -> int:
        """The model's KV heads; 1 for one that has none."""
        return self.kv_heads if self.kv_heads is not None else self.family.kv_heads or 1

    @property
    def kept_as(self) -> str:
        """The dtype of the pools, one of `KV_DTYPES`."""
        return self.kv_dtype or KV_DTYPES[self.device != "cpu"]

    @property
    def moves(self) -> tuple[str, ...]:
        """The paths of the transfers at the end of the run, in order; empty if one path is selected, or a trace."""
        return ("direct", "staged") * ROUNDS if self.path == "auto" and self.trace is None else ()

    @property
    def described(self) -> str:
        return f"{self.family}, {'KV cache in ' * (self.kept_as != KV_DTYPES[0])}{self.kept_as}"

    @property
    def components(self) -> tuple[str, ...]:
        """The components that the model keeps of a request."""
        return tuple(self.family.components(self.heads))

    def prompts(self) -> list[list[int]]:
        """Random prompts of different lengths."""
        rng = np.random.default_rng(self.seed)
        lengths = rng.choice(np.arange(SHORTEST_PROMPT, LONGEST_PROMPT), size=self.requests, replace=False)
        return [rng.integers(0, VOCAB, size=int(n)).tolist() for n in lengths]

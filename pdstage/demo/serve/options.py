"""What a server, a router and the whole of them are started with.

Layer 6. Must not know torch, HTTP or the manager: `pdstage serve --help` imports only this.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003  (a field's type, kept readable at run time)

from pdstage.demo.options import LAYOUTS, MODELS, PATHS, TRANSPORTS, Options
from pdstage.errors import UsageError
from pdstage.topology import Topology
from pdstage.watch.option import checked

PREFILL, DECODE, ROUTER = "prefill", "decode", "router"
TOLD = "serving at "  # then the URL: a process that is ready says so on its standard output
MOST_RANKS = 16  # beyond, the tiny Llama would need another shape, and the two sides another model
_DEFAULT_TP = {PREFILL: 4, DECODE: 2}
_DEFAULT_PAGE = {PREFILL: 16, DECODE: 32}
_DEFAULT_LAYOUT = {PREFILL: "nhd", DECODE: "hnd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a process listens. `port` 0: a free one. `with_parent`: it ends when its standard input does.

    `drain_s` is how long running requests may take to end once it was told to go, `timeout_s` how long one may take.
    """

    host: str = "127.0.0.1"
    port: int = 0
    with_parent: bool = False
    drain_s: float = 60.0
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """One prefill or decode server: a group of `tp` ranks. None stands for the role's usual value.

    `pool_tokens` is what the ranks' pages hold, `max_model_len` the most tokens of one request, its answer included;
    `max_running` requests are stepped together. `chunk_tokens` of a prompt at most are computed in one step.
    `trace` is a file that is written in the end.
    Raises `UsageError` for a value out of range.
    """

    role: str
    listening: Listening
    model: str = "llama"
    seed: int = 0
    tp: int = 0
    page: int = 0
    layout: str = ""
    transport: str = "nixl"
    path: str = "auto"
    keys: Path | None = None
    metrics_port: int | None = None
    pool_tokens: int = 8192
    max_model_len: int = 512
    max_running: int = 32
    max_waiting: int = 1024
    chunk_tokens: int = 48
    trace: Path | None = None

    def __post_init__(self) -> None:
        checked(self.metrics_port)
        for name, usual in (("tp", _DEFAULT_TP), ("page", _DEFAULT_PAGE), ("layout", _DEFAULT_LAYOUT)):
            object.__setattr__(self, name, getattr(self, name) or usual[self.role])
        for name, chosen, known in (
            ("model", self.model, MODELS),
            ("layout", self.layout, LAYOUTS),
            ("transport", self.transport, TRANSPORTS),
            ("path", self.path, PATHS),
        ):
            if chosen not in known:
                raise UsageError(f"--{name} is {chosen!r}", remedy=f"choose one of {', '.join(known)}", field=name)
        for name, value, low, high in (
            ("tp", self.tp, 1, MOST_RANKS),
            ("page", self.page, 1, 1024),
            ("max-model-len", self.max_model_len, 2, 1 << 16),
            ("pool-tokens", self.pool_tokens, self.max_model_len + 2 * self.page, 1 << 24),
            ("max-running", self.max_running, 1, 1024),
            ("max-waiting", self.max_waiting, 1, 1 << 20),
            ("chunk-tokens", self.chunk_tokens, 1, 1 << 16),
            ("seed", self.seed, 0, (1 << 63) - 1),
        ):
            if not low <= value <= high:
                raise UsageError(f"--{name} is {value}", remedy=f"give a number from {low} to {high}", field=name)

    @property
    def places(self) -> list[Topology]:
        return [Topology(tp_size=self.tp, tp_rank=rank) for rank in range(self.tp)]

    @property
    def demo(self) -> Options:
        """The same model, as the rest of the demo names it."""
        return Options(model=self.model, seed=self.seed, prefill_tp=self.tp, decode_tp=self.tp)

    @property
    def model_name(self) -> str:
        """As the OpenAI API names it."""
        return f"pdstage-{self.model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """`prefill` and `decode` are the servers' URLs."""

    listening: Listening
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    check_s: float = 0.5

    def __post_init__(self) -> None:
        for role, urls in ((PREFILL, self.prefill), (DECODE, self.decode)):
            if not urls:
                raise UsageError(f"a router without {role} servers", remedy=f"give --{role} URL", field=role)
            for url in urls:
                if not url.startswith(("http://", "https://")):
                    raise UsageError(f"--{role} {url!r} is no URL", remedy="give http://HOST:PORT", field=role)

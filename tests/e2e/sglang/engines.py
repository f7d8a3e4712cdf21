"""SGLang's servers: what is launched, and how its router asks a prefill and a decode engine: both at once.

In a request `bootstrap_host` and `bootstrap_port` say where decode finds prefill, `bootstrap_room` its number there.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e import load, operated, servers
from tests.e2e.servers import Server
from tests.processes import free_port

if TYPE_CHECKING:
    import aiohttp

ENV = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_PLUGINS": "pdstage",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(Path(__file__).parents[3]),
}
RUN = (sys.executable, "-m", "tests.e2e.sglang.run")
MAX_TOKENS = 16384
"""Of a pool."""
CHUNKED = ("--chunked-prefill-size", "128")
WINDOWS_WHOLE = ("--disable-hybrid-swa-memory",)
"""Layers with a window keep all tokens. Else SGLang's torch_native backend reads them by the other layers' numbers."""


@dataclass(frozen=True)
class Engine:
    """What tells one server from another. `role` is "prefill", "decode", or "" for an engine that transfers nothing.

    `options` are more of SGLang's arguments.
    """

    model: str = "llama"
    dtype: str = "float32"
    tp: int = 1
    pp: int = 1
    page: int = 16
    role: str = ""
    options: tuple[str, ...] = ()
    radix: bool = False
    node: str = '{"transport": "nixl"}'
    """PDSTAGE_NODE."""
    instance: str = ""
    """Its name in tests.e2e.operated's directory, if it is listed there."""

    @property
    def near(self) -> float:
        """What fp32 rounding was seen to change lay within 0.0004."""
        return {"float32": 0.002, "bfloat16": 0.1}[self.dtype]

    @property
    def name(self) -> str:
        """All in which it is not as usual."""
        return servers.name_of(self)

    def command(self, folder: Path, port: int, bootstrap: int) -> list[str]:
        made = [*RUN, "sglang.launch_server", "--model-path", str(folder)]
        made += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
        made += ["--attention-backend", "torch_native", "--disable-cuda-graph", "--skip-server-warmup"]
        made += ["--sleep-on-idle"]  # else each rank that idles takes a core
        made += ["--dtype", self.dtype, "--page-size", str(self.page), "--max-total-tokens", str(MAX_TOKENS)]
        made += ["--max-running-requests", "16", "--tp-size", str(self.tp), "--pp-size", str(self.pp)]
        made += [] if self.radix else ["--disable-radix-cache"]
        if self.role:
            made += ["--disaggregation-mode", self.role, "--disaggregation-transfer-backend", "pdstage"]
            made += ["--disaggregation-bootstrap-port", str(bootstrap)]
        if self.role == "decode":  # SGLang's default needs CUDA
            made += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
            made += ["--disaggregation-decode-enable-radix-cache"] * self.radix
        return [*made, *self.options]

    def server(self, folder: Path, logs: Path) -> SglangServer:
        env = ENV | {"PDSTAGE_NODE": json.dumps(json.loads(self.node) | operated.options(self.instance))}
        if (n_ranks := self.tp * self.pp) > 1:
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(n % 2) for n in range(n_ranks))
        bootstrap = free_port()
        command = lambda port: self.command(folder, port, bootstrap)  # noqa: E731
        return SglangServer(self.name, command, logs / f"{self.name}.log", env, bootstrap=bootstrap)


@dataclass
class SglangServer(Server):
    """`bootstrap` is the port of a prefill engine's bootstrap server."""

    bootstrap: int = 0

    def loads(self) -> list[dict[str, Any]]:
        """What SGLang says of each of its data-parallel ranks."""
        with urllib.request.urlopen(self.url + "/v1/loads", timeout=30) as answer:
            told: list[dict[str, Any]] = json.load(answer)["loads"]
        return told

    @property
    def is_idle(self) -> bool:
        """No request, and nothing of the pool in use. SGLang checks by itself then that no page is lost, or ends."""
        names = ("num_used_tokens", "num_running_reqs", "num_waiting_reqs")
        return self.runs and all(one[name] == 0 for one in self.loads() for name in names)


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine, and the engine that transfers nothing and knows the right tokens."""

    prefill: Engine
    decode: Engine
    full: bool = field(default=True, compare=False)

    @property
    def reference(self) -> Engine:
        return Engine(self.decode.model, self.decode.dtype, options=WINDOWS_WHOLE * (self.decode.model == "gemma3"))

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self.prefill, self.decode, self.reference

    @property
    def name(self) -> str:
        return f"{self.prefill.name}-to-{self.decode.name}"


def pair(prefill: dict[str, Any], decode: dict[str, Any], *, full: bool = True, **common: Any) -> Pair:
    return Pair(Engine(role="prefill", **(common | prefill)), Engine(role="decode", **(common | decode)), full=full)


FOUND = pair({"tp": 2, "options": CHUNKED, "instance": "prefill"}, {"instance": "decode"}, full=False)
"""Operators find both in a directory, which may come later."""


def handed_over(prefill: SglangServer, decode: SglangServer, *, n_tokens: int = load.N_TOKENS) -> load.Ask:
    """Asks both engines at once, as SGLang's router does; the answer is decode's. Where decode fails, the connection to
    prefill is closed, which else would wait minutes for a decode engine that never comes.
    """

    async def ask(session: aiohttp.ClientSession, prompt: load.Prompt) -> load.Answer:
        told = load.body(
            prompt, n_tokens=n_tokens, bootstrap_host="127.0.0.1", bootstrap_port=prefill.bootstrap,
            bootstrap_room=random.getrandbits(62),
        )  # fmt: skip
        at_prefill = asyncio.ensure_future(load.post(session, prefill.url, prompt, told))
        try:
            answer = await load.post(session, decode.url, prompt, told)
            if answer.is_ok:
                await at_prefill
            return answer
        finally:
            at_prefill.cancel()

    return ask


def router(prefill: SglangServer, decode: SglangServer, logs: Path) -> Server:
    """SGLang's own router, from the package sglang-router."""

    def command(port: int) -> list[str]:
        made = [*RUN, "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        made += ["--pd-disaggregation", "--prefill", prefill.url, str(prefill.bootstrap), "--decode", decode.url]
        return [*made, "--prometheus-port", str(free_port()), "--disable-retries", "--policy", "round_robin"]

    return Server("router", command, logs / "router.log", ENV, ready="/readiness")


FREE_S = 15.0
"""Nothing is held on either side by then, after whatever happened."""


def check_free(*used: SglangServer) -> None:
    """Fails for a server that is not idle in time, or has ended."""
    if not servers.wait_until(lambda: all(one.is_idle for one in used), FREE_S):
        told = {one.name: one.loads() if one.runs else "ended" for one in used}
        tails = "\n".join(one.tail(20) for one in used)
        raise AssertionError(f"not free after {FREE_S:.0f} s: {told}\n{tails}")

"""vLLM's servers: what is launched, and the two-step request that a proxy makes of a prefill and a decode engine."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tests.e2e import load, operated, servers
from tests.e2e.servers import Server, wait_until
from tests.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    import aiohttp

LONGEST = 1024
"""Tokens of a sequence: the models' own."""

BATCHED = 256
"""Tokens of a step at most, so that longer prompts are computed in chunks."""

UNCACHED = {"granite", "falcon-h1"}
"""Without prefix caching: with it 0.32's Mamba-2 layers fail on the CPU in a batch of several prompts (mamba_mixer2.py:
"IndexError: index 3 is out of bounds for dimension 0 with size 2", no transfer involved).
"""

ALONE = {"qwen3-next"}
"""One prompt at a time: a gated delta net's chunks depend on what else is in a step."""

LENGTHS = {"qwen3-next": (BATCHED + 1, 2 * BATCHED + 1)}
"""A gated delta net, in bf16 only, rounds otherwise where a chunk of its prompt ends elsewhere. With a connector the
last token is decode's to compute, so prompts are of whole steps and one token: there one engine's last chunk is that
token.
"""

CACHE_NBYTES = 384 << 20
"""A rank's cache: 65,536 tokens of the Llama. More would be memory that four servers of a small machine have not."""

PATIENT = tuple(
    (name, 240.0) for name in ("hello_s", "max_silence_s", "open_s", "open_wait_s", "send_wait_s", "wait_s")
)
"""For engines that nobody kills: on a busy machine one may be silent for longer than the defaults allow, and than the
lease of 30 s for which prefill holds what decode asks for. Workers of two ranks spin on one another, and on two cores
Linux was seen to leave all else waiting for a minute.
"""

DIRECTORY_PORT = free_port()
"""Of the prefill engine that proxies find by its directory."""

NAMED = "prefill"
"""The name of an engine that proxies find by its directory."""

USAGE = "vllm:kv_cache_usage_perc"
RECEIVED = "vllm:pdstage_received_seconds_count"

ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
}


@dataclass(frozen=True)
class Engine:
    """What tells one server from another. `role` is "kv_producer", "kv_consumer", or "" for an engine that transfers
    nothing.
    """

    model: str
    dtype: str = "float32"
    tp: int = 1
    block: int = 128
    role: str = ""
    transport: str = "nixl"
    policy: str = "fail"
    config: tuple[tuple[str, float], ...] = PATIENT
    """Fields of pdstage's Config."""
    shutdown_s: int = 0
    """How long it may go on with what it has, once it is asked to end."""
    directory: int = 0
    """The port of its directory, 0 for any."""
    instance: str = ""
    """Its name in tests.e2e.operated's directory, if it is listed there."""
    offloads: bool = False
    """Whether vLLM's MultiConnector has pdstage's beside its own ExampleConnector, which keeps prompts' KV in files."""
    near: ClassVar[float] = 0.0
    """Its tokens are the same whatever is in a batch."""

    @property
    def name(self) -> str:
        """All in which it is not as usual."""
        return servers.name_of(self)

    def command(self, folder: Path, port: int) -> list[str]:
        made = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        made += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
        made += ["--dtype", self.dtype, "--max-model-len", str(LONGEST), "--enforce-eager", "-tp", str(self.tp)]
        made += ["--block-size", str(self.block), "--max-num-seqs", "32"]
        made += ["--no-enable-prefix-caching" if self.model in UNCACHED else "--enable-prefix-caching"]
        made += ["--kv-cache-memory-bytes", str(CACHE_NBYTES)]
        made += ["--gpu-memory-utilization", "0.1"]  # must be free at start, though so much is not taken
        made += ["--enable-chunked-prefill", "--max-num-batched-tokens", str(BATCHED), "--seed", "0"]
        made += ["--shutdown-timeout", str(self.shutdown_s)]
        if self.role:
            made += ["--kv-transfer-config", json.dumps(self._transfer_config(folder))]
        return made

    def _transfer_config(self, folder: Path) -> dict[str, Any]:
        role = {"kv_role": self.role, "kv_load_failure_policy": self.policy}
        if self.directory:
            role["engine_id"] = NAMED  # the same after a restart: proxies ask the directory once
        ours = {
            "kv_connector": "PdStageConnector",
            "kv_connector_extra_config": {
                "transport": self.transport,
                "config": dict(self.config),
                "port": self.directory,
                **operated.options(self.instance),
            },
        }
        if not self.offloads:
            return role | ours
        path = {"shared_storage_path": str(folder.with_name(f"{self.name}-offloaded"))}
        files = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": path}
        both = {"connectors": [files, role | ours]}
        return role | {"kv_connector": "MultiConnector", "kv_connector_extra_config": both}

    def server(self, folder: Path, logs: Path) -> Server:
        return Server(self.name, lambda port: self.command(folder, port), logs / f"{self.name}.log", ENV)


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine, and the engine that transfers nothing and knows the right tokens."""

    prefill: Engine
    decode: Engine

    @property
    def reference(self) -> Engine:
        return Engine(self.decode.model, self.decode.dtype, tp=1, block=128)

    @property
    def at_a_time(self) -> tuple[int, ...]:
        """How many prompts are under way."""
        return (1,) if self.decode.model in ALONE else (8, 16)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of a prompt; none where any number will do."""
        return LENGTHS.get(self.decode.model, ())

    @property
    def engines(self) -> tuple[Engine, ...]:
        return self.prefill, self.decode, self.reference

    @property
    def name(self) -> str:
        p, d = self.prefill, self.decode
        return f"{p.model}-{p.dtype}-{p.transport}-{p.tp}x{p.block}-to-{d.tp}x{d.block}"

    def with_policy(self, policy: str) -> Pair:
        return replace(self, decode=replace(self.decode, policy=policy))


def pair(
    prefill: tuple[int, int],
    decode: tuple[int, int],
    *,
    model: str = "llama",
    dtype: str = "float32",
    transport: str = "nixl",
    config: tuple[tuple[str, float], ...] = PATIENT,
) -> Pair:
    """Each side is (tensor-parallel size, tokens a block)."""
    common: dict[str, Any] = {"model": model, "dtype": dtype, "transport": transport, "config": config}
    return Pair(
        Engine(tp=prefill[0], block=prefill[1], role="kv_producer", **common),
        Engine(tp=decode[0], block=decode[1], role="kv_consumer", **common),
    )


FOUND = pair((1, 128), (1, 128))
FOUND = Pair(
    replace(FOUND.prefill, directory=DIRECTORY_PORT, instance="prefill"), replace(FOUND.decode, instance="decode")
)
"""Of equal sizes; proxies find its prefill engine by its directory, operators both by another, which may come later."""

FREE_S = 15.0
"""All blocks of both sides are free by then, after whatever happened."""


def check_free(*used: Server) -> None:
    """Fails if a server has blocks in use, and goes on to."""
    busy = [server for server in used if not wait_until(lambda one=server: not one.metrics()[USAGE], FREE_S)]
    assert not busy, "\n".join(f"{server.name} is not free after {FREE_S:.0f} s\n{server.tail(20)}" for server in busy)


TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


async def prefilled(session: aiohttp.ClientSession, url: str, prompt: load.Prompt) -> load.Answer:
    """The first half of a request: prefill's answer, which has `kv_transfer_params` for decode."""
    return await load.post(session, url, prompt, load.body(prompt, n_tokens=1, kv_transfer_params=TO_PREFILL))


async def decoded(
    session: aiohttp.ClientSession, url: str, prompt: load.Prompt, first: load.Answer, **more: Any
) -> load.Answer:
    """The second half, with what prefill answered."""
    params = first.body["kv_transfer_params"]
    assert params, f"prefill's answer has no kv_transfer_params: {first.body}"
    return await load.post(session, url, prompt, load.body(prompt, kv_transfer_params=params, **more))


def handed_over(
    prefill: Server,
    decode: Server,
    *,
    between: Callable[[], Awaitable[None]] | None = None,
    again: bool = False,
    n_tokens: int = load.N_TOKENS,
    **more: Any,
) -> load.Ask:
    """Asks as a proxy does: prefill first, then decode with what prefill answered; `between` is awaited in the middle.
    With `again`, a prefill that does not answer is left out: decode computes the prompt, as proxies that retry do. vLLM
    aborts a request that comes just as it is asked to end: that is answered, and names no room. `more` is asked of
    decode.
    """

    async def ask(session: aiohttp.ClientSession, prompt: load.Prompt) -> load.Answer:
        first = await prefilled(session, prefill.url, prompt)
        if again and not (first.is_ok and first.body["kv_transfer_params"]):
            return await load.post(session, decode.url, prompt, load.body(prompt, n_tokens=n_tokens))
        if not first.is_ok:
            return first
        if between is not None:
            await between()
        return await decoded(session, decode.url, prompt, first, n_tokens=n_tokens, **more)

    return ask


def at_once(prefill: Server, decode: Server, directory: int) -> load.Ask:
    """Asks both at once, as a proxy for MooncakeConnector does that knows prefill by its directory. Decode answers
    whatever becomes of prefill's half.
    """

    async def ask(session: aiohttp.ClientSession, prompt: load.Prompt) -> load.Answer:
        name = {"transfer_id": uuid.uuid4().hex}
        where = {"remote_bootstrap_addr": f"http://127.0.0.1:{directory}", "remote_engine_id": NAMED}
        to_prefill, to_decode = TO_PREFILL | name, {"do_remote_prefill": True} | where | name
        _, answer = await asyncio.gather(
            load.post(session, prefill.url, prompt, load.body(prompt, n_tokens=1, kv_transfer_params=to_prefill)),
            load.post(session, decode.url, prompt, load.body(prompt, kv_transfer_params=to_decode)),
        )
        return answer

    return ask

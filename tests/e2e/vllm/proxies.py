"""The proxies that people put in front of two vLLM engines: vLLM's examples, and vLLM's router."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.servers import Server
from tests.e2e.vllm import fetch
from tests.e2e.vllm.engines import DIRECTORY_PORT
from tests.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence


def toy(prefill: Server, decode: Server, logs: Path) -> Server:
    """vLLM's own example, from its source archive."""
    ports = ["--prefiller-port", str(prefill.port), "--decoder-port", str(decode.port)]
    hosts = ["--prefiller-host", "127.0.0.1", "--decoder-host", "127.0.0.1"]
    command = [sys.executable, "-P", str(fetch.PLACE / fetch.TOY), *hosts, *ports]
    return Server("toy", lambda port: [*command, "--port", str(port)], logs / "toy.log", ready="/healthcheck")


def early(prefill: Server, decode: Server, logs: Path) -> Server:
    """vLLM's example for MooncakeConnector, which asks both engines at once. It answers 503 until it knows prefill's
    name, which only its log tells (`KNOWS`).
    """
    command = [sys.executable, "-P", str(fetch.PLACE / fetch.EARLY)]
    command += ["--prefill", prefill.url, str(DIRECTORY_PORT), "--decode", decode.url]
    return Server(
        "early", lambda port: [*command, "--port", str(port)], logs / "early.log", UNBUFFERED, ready="/openapi.json"
    )


def early_router(prefill: Server, decode: Server, logs: Path) -> Server:
    """vLLM's router as for MooncakeConnector."""
    return router(prefill, decode, logs, directory=(str(DIRECTORY_PORT),), more=("--kv-connector", "mooncake"))


def router(
    prefill: Server, decode: Server, logs: Path, *, directory: Sequence[str] = (), more: Sequence[str] = ()
) -> Server:
    """vLLM's router, from the package vllm-router."""
    command = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", *more]
    command += ["--prefill", prefill.url, *directory, "--decode", decode.url]
    command += ["--host", "127.0.0.1", "--policy", "round_robin"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--worker-startup-check-interval", "1", "--disable-retries"]
    name = "-".join(("vllm-router", *more[1:]))
    return Server(name, lambda port: [*command, "--port", str(port)], logs / f"{name}.log")


KNOWS = "All prefiller instances are ready"
UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
PROXIES = {"toy": toy, "vllm-router": router, "early": early, "vllm-router-mooncake": early_router}

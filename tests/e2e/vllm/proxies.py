"""The proxies that people put in front of two vLLM engines: vLLM's example, and vLLM's router."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tests.e2e.servers import Server, free_port
from tests.e2e.vllm import fetch

if TYPE_CHECKING:
    from pathlib import Path


def toy(prefill: Server, decode: Server, logs: Path) -> Server:
    """vLLM's own example, from its source archive."""
    ports = ["--prefiller-port", str(prefill.port), "--decoder-port", str(decode.port)]
    hosts = ["--prefiller-host", "127.0.0.1", "--decoder-host", "127.0.0.1"]
    command = [sys.executable, "-P", str(fetch.PLACE / fetch.TOY), *hosts, *ports]
    return Server("toy", lambda port: [*command, "--port", str(port)], logs / "toy.log", ready="/healthcheck")


def router(prefill: Server, decode: Server, logs: Path) -> Server:
    """vLLM's router, from the package vllm-router."""
    command = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"]
    command += ["--prefill", prefill.url, "--decode", decode.url, "--host", "127.0.0.1", "--policy", "round_robin"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--worker-startup-check-interval", "1", "--disable-retries"]
    return Server("vllm-router", lambda port: [*command, "--port", str(port)], logs / "vllm-router.log")


PROXIES = {"toy": toy, "vllm-router": router}

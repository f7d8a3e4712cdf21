"""The proxies that people put in front of two engines: vLLM's example, and vLLM's router."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e import compare, faults, load
from tests.e2e.servers import Server, free_port
from tests.e2e.vllm import fetch
from tests.e2e.vllm.engines import RECEIVED, USAGE, pair

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAIR = pair((1, 128), (1, 128))


def _toy(prefill: Server, decode: Server, port: int) -> list[str]:
    ports = ["--prefiller-port", str(prefill.port), "--decoder-port", str(decode.port)]
    hosts = ["--prefiller-host", "127.0.0.1", "--decoder-host", "127.0.0.1"]
    return [sys.executable, "-P", str(fetch.PLACE / fetch.TOY), "--port", str(port), *hosts, *ports]


def _router(prefill: Server, decode: Server, port: int) -> list[str]:
    where = ["--prefill", prefill.url, "--decode", decode.url, "--host", "127.0.0.1", "--port", str(port)]
    others = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--policy", "round_robin"]
    others += ["--worker-startup-check-interval", "1", "--disable-retries"]
    return [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", *where, *others]


PROXIES = {"toy": (_toy, "/healthcheck"), "vllm-router": (_router, "/health")}


@pytest.fixture(params=[pytest.param("toy"), pytest.param("vllm-router", marks=pytest.mark.full)])
def proxy(request: pytest.FixtureRequest, fleet) -> Iterator[Server]:
    if request.param == "vllm-router" and importlib.util.find_spec("vllm_router") is None:
        pytest.skip("vllm-router is not installed: it is in tests/engines/requirements-vllm-cpu.txt")
    prefill, decode, _ = fleet.up(*PAIR.engines)
    make, ready = PROXIES[request.param]
    log: Path = fleet.place / f"{request.param}.log"
    server = Server(request.param, lambda port: make(prefill, decode, port), log, ready=ready)
    server.start().wait(60)
    yield server
    server.stop()


def test_answers_through_a_proxy(fleet, request: pytest.FixtureRequest, proxy: Server):
    """Whole answers, all handed over, and all blocks free at the end."""
    n = 200 if request.config.getoption("--full") else 24
    asked = load.prompts(n, seed=301)
    right = fleet.right(PAIR.reference, asked)
    prefill, decode, _ = fleet.fresh(*PAIR.engines)
    before = decode.metrics()
    with fleet.timed(f"{proxy.name}: {n} prompts"):
        answers = load.ask_all(load.to(proxy.url), asked, 16)
    fleet.note(f"{proxy.name}: {compare.summary(answers, right)}")
    compare.check(answers, right)
    faults.check_free([prefill, decode], USAGE)
    assert decode.metrics()[RECEIVED] - before[RECEIVED] == n

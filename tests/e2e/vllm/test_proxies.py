"""Answers through the proxies that people put in front of two engines."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from tests.e2e import compare, load
from tests.e2e.servers import wait_until
from tests.e2e.vllm.engines import FOUND, RECEIVED, check_free
from tests.e2e.vllm.proxies import KNOWS, PROXIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.servers import Server

ROUTERS = ("vllm-router", "vllm-router-mooncake")


@pytest.fixture(params=["toy", "early", *(pytest.param(name, marks=pytest.mark.full) for name in ROUTERS)])
def proxy(request: pytest.FixtureRequest, fleet) -> Iterator[Server]:
    if request.param in ROUTERS and importlib.util.find_spec("vllm_router") is None:
        pytest.skip("vllm-router is not installed: it is in tests/engines/requirements-vllm-cpu.txt")
    prefill, decode, _ = fleet.up(*FOUND.engines)
    server = PROXIES[request.param](prefill, decode, fleet.place)
    server.start().wait()
    assert request.param != "early" or wait_until(lambda: server.says(KNOWS), 60)
    yield server
    server.stop()


def test_answers_through_a_proxy(fleet, request: pytest.FixtureRequest, proxy: Server):
    """Whole answers, all handed over, and all blocks free at the end."""
    n = 200 if request.config.getoption("--full") else 24
    asked = load.prompts(n, seed=301)
    right = fleet.right(FOUND.reference, asked)
    prefill, decode, _ = fleet.fresh(*FOUND.engines)
    before = decode.metrics()
    with fleet.timed(f"{proxy.name}: {n} prompts"):
        answers = load.ask_all(load.to(proxy.url), asked, 16)
    fleet.note(f"{proxy.name}: {compare.summary(answers, right)}")
    compare.check(answers, right)
    check_free(prefill, decode)
    assert decode.metrics()[RECEIVED] - before[RECEIVED] == n

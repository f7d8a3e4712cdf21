"""These tests need what `pdstage serve` needs, and the client that they drive it with."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = (
    [] if all(map(find_spec, ("torch", "transformers", "starlette", "uvicorn", "httpx", "openai", "nixl"))) else ["*"]
)

"""What ranks' processes are forked from: SGLang with its plugins and all that ranks import, once."""

from __future__ import annotations

from importlib import import_module

from tests.engines import stubs

stubs.install()
for name in (
    "tests.engines.sglang.ranks",
    "pdstage.integrations.sglang.manager",
    "sglang.srt.model_executor.runner",
    "nixl._api",
):
    import_module(name)

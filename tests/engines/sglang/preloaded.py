"""What ranks' processes are forked from: SGLang, imported once."""

from __future__ import annotations

from importlib import import_module

from tests.engines import stubs

stubs.install()
import_module("tests.engines.sglang.ranks")

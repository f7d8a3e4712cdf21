"""Saves a model of `tests.e2e.models` with what stands in for a GPU's libraries: `python -m tests.e2e.sglang.save`."""

from __future__ import annotations

import runpy

from tests.e2e.sglang import stand_ins

stand_ins.install()

if __name__ == "__main__":
    runpy.run_module("tests.e2e.models", run_name="__main__")

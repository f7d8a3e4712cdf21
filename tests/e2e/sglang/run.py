"""Runs a module with the stand-ins, in each of its processes: `python -m tests.e2e.sglang.run MODULE ARGUMENTS`.

SGLang spawns its schedulers, and Python imports the main module anew in a spawned process: what stands outside of the
condition below is run in each of them.
"""

from __future__ import annotations

import runpy
import sys

from tests.e2e.sglang import stand_ins

stand_ins.install()

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__")  # not as sys.modules["__main__"], which spawned processes import

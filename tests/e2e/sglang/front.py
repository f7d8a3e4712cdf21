"""SGLang's router with the stand-ins, since it imports SGLang: `python -m tests.e2e.sglang.front ARGUMENTS`."""

from __future__ import annotations

import runpy

from tests.e2e.sglang import stand_ins

stand_ins.install()

if __name__ == "__main__":
    runpy.run_module("sglang_router.launch_router", run_name="__main__", alter_sys=True)

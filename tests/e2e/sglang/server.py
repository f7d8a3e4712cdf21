"""SGLang's own server with the stand-ins in each of its processes: `python -m tests.e2e.sglang.server ARGUMENTS`.

SGLang spawns its schedulers, and Python imports the main module anew in a spawned process: what stands outside of the
condition below is run in each of them.
"""

from __future__ import annotations

import runpy

from tests.e2e.sglang import stand_ins

stand_ins.install()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")

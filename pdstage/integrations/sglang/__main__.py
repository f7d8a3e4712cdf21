"""`python -m pdstage.integrations.sglang MODULE ARGUMENTS` runs a program that parses SGLang's arguments before SGLang
has loaded its plugins, and so would not know the backend's name, such as a worker of NVIDIA Dynamo (`dynamo.sglang`).
"""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    from sglang.srt.plugins import load_plugins

    load_plugins()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__")

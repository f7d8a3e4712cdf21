"""NVIDIA Dynamo's frontend and vLLM workers, which find one another in a folder.

`python -m tests.e2e.vllm.dynamo MODULE ARGUMENTS` runs one of its modules, with what Dynamo expects of vLLM 0.31 and
torchvision, in each of its processes.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.servers import Server
from tests.engines import stubs
from tests.processes import free_port

if TYPE_CHECKING:
    from tests.e2e.vllm.engines import Engine

PACKAGES = ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1", "redis==8.1.0", "torchvision==0.29.1")
PLACE = Path(__file__).parents[3] / "build" / "dynamo"
MODES = {"kv_producer": "prefill", "kv_consumer": "decode"}
RUN = (sys.executable, "-m", "tests.e2e.vllm.dynamo")


def install() -> None:
    """Into a folder of their own: transformers would import torchvision in vLLM's other servers too."""
    if not (PLACE / "redis").exists():
        pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", PLACE)
        subprocess.run([*pip, *PACKAGES], check=True)


def environment(folder: Path) -> dict[str, str]:
    """In which servers find one another in `folder`."""
    path = os.pathsep.join([str(Path(__file__).parents[3]), str(PLACE), os.environ.get("PYTHONPATH", "")])
    return {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(folder), "DYN_EVENT_PLANE": "zmq", "PYTHONPATH": path}


def worker(engine: Engine, model: Path, logs: Path) -> Server:
    """A worker with that engine. A decode worker of one rank serves its node's metrics at its port."""

    def command(port: int) -> list[str]:
        options = engine.command(model, port)[3:]
        for name in ("--host", "--port", "--shutdown-timeout"):
            at = options.index(name)
            del options[at : at + 2]
        mode = ("--endpoint-types", "completions", "--disaggregation-mode", MODES[engine.role])
        return [*RUN, "dynamo.vllm", *options, *mode]

    made = engine.server(model, logs)
    name, port = f"dynamo-{made.name}", free_port()
    env = made.env | environment(logs / "dynamo")
    if MODES[engine.role] == "decode":
        env["PDSTAGE_NODE"] = json.dumps({"metrics_port": port})
    return Server(name, command, logs / f"{name}.log", env, port=port)


def frontend(logs: Path) -> Server:
    command = lambda port: [*RUN, "dynamo.frontend", "--http-port", str(port), "--router-mode", "round-robin"]  # noqa: E731
    return Server("dynamo", command, logs / "dynamo.log", environment(logs / "dynamo"))


def _run() -> None:
    stubs.libraries()
    from vllm.v1.engine import utils  # noqa: PLC0415

    if not hasattr(utils, "get_engine_zmq_addresses"):  # imported for workers of embeddings
        utils.get_engine_zmq_addresses = None


if __name__ in ("__main__", "__mp_main__"):
    _run()
if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__")

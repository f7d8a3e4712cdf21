"""docs/kubernetes.md with vLLM."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.chaos.network import permitted
from tests.e2e import cluster
from tests.e2e.vllm.engines import ENV, Engine


def on_cpu(command: list[str], n_ranks: int) -> tuple[list[str], dict[str, str]]:
    """vLLM's package for the CPU has no `vllm serve`."""
    if not n_ranks:
        return [sys.executable, *command[1:]], {}
    assert command[:2] == ["vllm", "serve"]
    here = Engine("llama", tp=n_ranks).command(Path(command[2]), 8000)
    del here[: here.index("--served-model-name")]
    for given in ("--host", "--shutdown-timeout"):
        at = here.index(given)
        del here[at : at + 2]
    server = ["-m", "vllm.entrypoints.openai.api_server", "--model", command[2]]
    return [sys.executable, *server, *command[3:], *here], ENV


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("etcdctl") or not permitted(), reason="it needs etcd, root and iproute2")
def test_all_are_replaced_under_load(fleet, tmp_path: Path):
    cluster.check_replaced(fleet, tmp_path, "vllm", Engine("llama", block=128), on_cpu)

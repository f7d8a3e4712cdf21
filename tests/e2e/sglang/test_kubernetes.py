"""docs/kubernetes.md with SGLang."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.chaos.network import permitted
from tests.e2e import cluster
from tests.e2e.sglang.engines import ENV, FOUND, RUN, Engine


def on_cpu(command: list[str], n_ranks: int) -> tuple[list[str], dict[str, str]]:
    if command[1] != "-m":
        return [sys.executable, *command[1:]], {}
    here: list[str] = []
    if n_ranks:
        (role,) = (word.partition("=")[2] for word in command if word.startswith("--disaggregation-mode="))
        here = Engine(tp=n_ranks, role=role).command(Path(), 8000, 8998)
        del here[: here.index("--host") + 2]
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(n_ranks)))} if n_ranks > 1 else {}
    return [*RUN, *command[2:], *here, *(["--served-model-name", "tiny"] if n_ranks else [])], ENV | bound


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("etcdctl") or not permitted(), reason="it needs etcd, root and iproute2")
def test_all_are_replaced_under_load(fleet, tmp_path: Path):
    """The router knows prompts as text."""
    cluster.check_replaced(fleet, tmp_path, "sglang", FOUND.reference, on_cpu, as_text=True)

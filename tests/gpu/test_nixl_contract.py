"""Transport `nixl` over a GPU's memory: the contract suite, within a process and to another; and rooms of nodes."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")
pytest.importorskip("zmq")
pytest.importorskip("nixl")

from gpu import ranks  # needs torch
from gpu.contract import *  # noqa: F403  (the suite)
from gpu.contract import fixtures

pytestmark = pytest.mark.gpu
kept, pair, linked, mortal = fixtures("nixl+gpu:0")


def test_rooms_between_two_processes(tmp_path):
    """Staged by this side's kernels, written by NIXL into the other process's device memory, and judged."""
    stats, verdict = ranks.between_processes("cuda:0", "nixl", tmp_path)
    assert stats["sessions_over_nixl"] == 1
    assert not verdict.wrong, "\n".join(verdict.wrong)

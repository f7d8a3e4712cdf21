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


def test_rooms_between_two_processes():
    """Staged by this side's kernels, written by NIXL into the other process's device memory."""
    stats = ranks.between_processes("cuda:0", "nixl")
    assert stats["sessions_over_nixl"] == 1

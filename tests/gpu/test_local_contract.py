"""Transport `local` over a GPU's memory: the contract suite, within a process and to another that maps by CUDA IPC."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("msgspec")
pytest.importorskip("cupy")

from gpu.contract import *  # noqa: F403  (the suite)
from gpu.contract import fixtures

pytestmark = pytest.mark.gpu
kept, pair, linked, mortal = fixtures("local+gpu:0")

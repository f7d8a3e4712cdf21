"""The loops that the host kernels stand beside move the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

from pdstage import UsageError
from pdstage.bench import host_kernels, limits


@pytest.fixture(scope="module", autouse=True)
def compiled():
    try:
        limits.loops()
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("access", host_kernels.ACCESSES, ids=lambda access: access.name)
@pytest.mark.parametrize("run", [64, 128, 1024, 4096])
def test_loops_and_kernels_move_the_same_bytes(access, run):
    case = host_kernels._Case(access, 4 << 20, run)
    memory, peer, out = case.own.memory, case.peer.memory, case.out
    memory[:] = np.random.default_rng(1).integers(0, 256, len(memory), np.uint8)
    ours, loops = case.ours(), case.loops()
    found = {}
    for way, touched in (("gather", out), ("scatter", memory), ("pool to pool", peer)):
        for works in (ours, loops):
            kept = memory.copy()
            touched[:] = 0
            if way == "scatter":
                out[:] = np.random.default_rng(2).integers(0, 256, len(out), np.uint8)
            works[way]()
            found.setdefault(way, []).append(touched.copy())
            memory[:] = kept
    for way, (one, other) in found.items():
        assert one.any(), way
        assert np.array_equal(one, other), way


def test_without_a_compiler_it_is_said(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(UsageError, match=r"limits.c cannot be compiled: .*no-such-compiler") as info:
        limits.loops.__wrapped__()
    assert "install a C compiler" in info.value.remedy

"""Planning a chunk costs by views, never by tokens: counted in executed bytecodes, which no clock disturbs."""

from __future__ import annotations

import sys

import pytest

from pdstage import native
from pdstage.bench.plan import HybridChunk


def bytecodes(work):
    """How many bytecodes `work` executes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    held = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(held)
    return count


@pytest.mark.skipif(native.ext is None, reason="numpy's half goes view by view")
@pytest.mark.parametrize("page", [64, 1])
@pytest.mark.parametrize("side", ["at_prefill", "at_decode"])
def test_nothing_is_done_per_token_in_python(side, page):
    counts = []
    for n_tokens in (2048, 8192):
        work = getattr(HybridChunk(page, n_tokens), side)
        work()
        counts.append(bytecodes(work))
    assert counts[0] == counts[1] > 0


def test_a_first_chunk_costs_by_views():
    """What the counter above sees, if there is something to see."""
    chunk = HybridChunk(64, 256)
    chunk.at_prefill()
    assert bytecodes(lambda: chunk.anew(chunk.src)) > bytecodes(chunk.at_prefill)

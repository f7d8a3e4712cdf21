"""Conversions on a GPU to the reference's bit: its own instructions for fp8, which no double has, and its division."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from coded import ALL_BF16, INLINE, edge_cells, pools_of  # noqa: E402  (needs torch)
from pools import GUARD  # noqa: E402

from pdstage.convert import fp8_token_head, mxfp8, pair  # noqa: E402
from pdstage.errors import UsageError  # noqa: E402
from pdstage.kernels import Index, Pool  # noqa: E402
from pdstage.kernels.pool import choose_converting  # noqa: E402
from pdstage.plan import Select  # noqa: E402

pytestmark = pytest.mark.gpu

APART = [(fp8_token_head("data"), fp8_token_head("scale", "r0"))]
APART += [(mxfp8(rule, "data"), mxfp8(rule, "scale", "r0")) for rule in ("floor", "ceil")]
CELLS = {"every value": ALL_BF16.reshape(-1, 128), "edges": edge_cells(96)}


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("format,companion", [(format, "") for format in INLINE] + APART)
@pytest.mark.parametrize("cells", CELLS)
def test_every_value_is_the_references(backend, format, companion, cells):
    checksum = backend == "cuda"
    try:
        choose_converting(backend, "cuda:0", checksum=checksum)
    except UsageError as error:
        pytest.skip(str(error))
    held, own, peer, rows = pools_of(format, CELLS[cells], companion=companion)
    memory = torch.from_numpy(held.memory[0]).to("cuda:0")
    region = replace(own.regions[0], base=memory.data_ptr() + GUARD, kind="cuda")
    there = replace(own, regions=(region,))
    tokens, index = {"kv": (0, rows)}, {"kv": Index.of(np.arange(rows, dtype=np.int32))}
    select = [Select(view.key, 0, view.shards) for view in pair(own, peer).offered.views()]

    here = Pool.of(own).plan(select, backend="reference", staged=pair(own, peer).offered, checksum=True)
    n, want_sum = here.nbytes(tokens), np.zeros(2, np.uint64)
    want = np.full(n, 0xA5, np.uint8)
    here.gather(want.ctypes.data, n, index, tokens, sum_ptr=want_sum.ctypes.data)
    anything = np.random.default_rng(9).integers(0, 256, n, dtype=np.uint8)
    here.scatter(anything.ctypes.data, n, index, tokens, sum_ptr=want_sum[1:].ctypes.data)

    plan = Pool.of(there, "cuda:0").plan(select, backend=backend, staged=pair(there, peer).offered, checksum=checksum)
    assert plan.backend == backend
    sums = torch.zeros(2, dtype=torch.int64, device="cuda:0")
    out = torch.full((n,), 0xA5, dtype=torch.uint8, device="cuda:0")
    plan.gather(out.data_ptr(), n, index, tokens, sum_ptr=sums.data_ptr() if checksum else 0)
    np.testing.assert_array_equal(out.cpu().numpy(), want)
    staged = torch.from_numpy(anything).to("cuda:0")
    plan.scatter(staged.data_ptr(), n, index, tokens, sum_ptr=sums[1:].data_ptr() if checksum else 0)
    np.testing.assert_array_equal(memory.cpu().numpy(), held.memory[0])
    if checksum:
        assert sums.cpu().numpy().view(np.uint64).tolist() == want_sum.tolist()

"""Every backend that converts, to the reference's bit: bf16 in the pool, fp8 in staging, both ways."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pdstage.errors import UsageError  # noqa: E402
from pdstage.kernels import Index, Pool  # noqa: E402
from pdstage.plan import Select  # noqa: E402
from pdstage.plan.convert import Encoding, fp8_tensor, fp8_token_head, mxfp8, pair  # noqa: E402  (needs torch)
from pdstage.tensors import build, paged_nhd  # noqa: E402

PAGES, PAGE, HEADS, DIM = 16, 16, 4, 64
HEADS_OF = {"total_heads": HEADS, "tp": (1, 0)}
ITEMS = [8, 1, 5, 3, 15, 0, 9, 12, 2, 4, 14, 7, 6, 13, 11, 10]
TOKENS = {"kv": (0, len(ITEMS) * PAGE)}
FORMATS = [fp8_tensor(0.1), fp8_tensor(0.1, "bf16"), fp8_token_head(), mxfp8("floor"), mxfp8("ceil")]


ABLE = [
    pytest.param(name, device, id=f"{name} on {device}", marks=[pytest.mark.gpu] * (device != "cpu"))
    for device, names in (("cpu", ("host",)), ("cuda:0", ("cuda", "triton")))
    for name in names
]


def values():
    """K of every bf16 number, V of edge cases and rows of one size."""
    drawn = torch.Generator().manual_seed(4)
    k = torch.randperm(1 << 16, generator=drawn).to(torch.uint16).view(PAGES, PAGE, HEADS, DIM)
    v = torch.randn(PAGES, PAGE, HEADS, DIM, generator=drawn).bfloat16()
    v[::2, ::3, :, :5] = torch.tensor([0.0, -0.0, float("inf"), 448.0, 2.0**-133])
    return [k.view(torch.bfloat16), v]


def plan_on(device, backend, held, format):
    """The plan of a bf16 pool whose peer keeps `format`; skips, saying why, where it cannot be made."""
    own = build(paged_nhd([held[0]], [held[1]], **HEADS_OF))
    width = Encoding.parse(format).nbytes(DIM)
    theirs = [torch.zeros(PAGES, PAGE, HEADS, width, dtype=torch.uint8) for _ in "kv"]
    staged = pair(own, build(paged_nhd([theirs[0]], [theirs[1]], **HEADS_OF, format=format))).offered
    select = [Select(view.key, 0, view.shards) for view in staged.views()]
    try:
        return Pool.of(own, device, keep=held).plan(select, backend=backend, staged=staged, checksum=True)
    except UsageError as error:
        if "cannot be used here" in str(error):
            pytest.skip(f"converting by {backend}: {error}")
        raise


def outcome(device, backend, format, staged=None):
    """What a gather stages, and the pool after a scatter of `staged`, or of just that; and their checksums."""
    held = [one.to(device) for one in values()]
    plan = plan_on(device, backend, held, format)
    index, sums = {"kv": Index.of(np.array(ITEMS, np.int32))}, torch.zeros(2, dtype=torch.int64, device=device)
    added = [sums[way:].data_ptr() for way in range(2)]
    out = torch.full((plan.nbytes(TOKENS),), 0xA5, dtype=torch.uint8, device=device)
    plan.gather(out.data_ptr(), out.numel(), index, TOKENS, sum_ptr=added[0])
    given = out.clone() if staged is None else torch.from_numpy(staged[: out.numel()]).to(device)
    for one in held:
        one.zero_()
    plan.scatter(given.data_ptr(), given.numel(), index, TOKENS, sum_ptr=added[1])
    return out.cpu().numpy(), [one.cpu().view(torch.int16).numpy() for one in held], sums.tolist()


@pytest.mark.parametrize(("backend", "device"), ABLE)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("drawn", [False, True], ids=["what was gathered", "any bytes"])
def test_a_gather_encodes_and_a_scatter_decodes_as_defined(backend, device, format, drawn):
    """A peer's staging may hold any code, those of NaN among them."""
    staged = np.random.default_rng(8).integers(0, 256, 1 << 20, np.uint8) if drawn else None
    want, after, want_sums = outcome("cpu", "reference", format, staged)
    found, pool, sums = outcome(device, backend, format, staged)
    assert sums == want_sums
    np.testing.assert_array_equal(found, want)
    for mine, its in zip(pool, after, strict=True):
        np.testing.assert_array_equal(mine, its)

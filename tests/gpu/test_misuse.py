"""What is refused before a launch, and what a kernel leaves out when only it can see it: no byte outside is touched."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpu.plain import Plain  # noqa: E402  (needs torch)

from pdstage.errors import UsageError  # noqa: E402
from pdstage.kernels import Index, Pool  # noqa: E402
from pdstage.layout import Layout, Region  # noqa: E402

pytestmark = pytest.mark.gpu

N_VIEWS, N_ITEMS, WIDTH = 3, 32, 256
OUTSIDE = [-1, N_ITEMS, -(2**63), 2**63 - 1, 2**32 + 5, -(2**31) - 1]
GUARD = 1 << 20


class Guarded(Plain):
    """A pool between two guards of a MiB, where the bytes of items just outside it would lie."""

    def __init__(self, variant, **options):
        inner = N_VIEWS * N_ITEMS * WIDTH
        self.whole = torch.randint(0, 256, (inner + 2 * GUARD,), dtype=torch.uint8, device="cuda:0")
        memory = self.whole[GUARD : GUARD + inner]
        super().__init__(variant, n_views=N_VIEWS, n_items=N_ITEMS, width=WIDTH, memory=memory, **options)


@pytest.fixture
def guarded(variant):
    return Guarded(variant)


def mixed():
    """In-range items with everything that is not among them, and which they are."""
    items = [5, *OUTSIDE[:3], 31, 0, *OUTSIDE[3:], 17]
    return items, [at for at, item in enumerate(items) if 0 <= item < N_ITEMS]


@pytest.mark.parametrize("bits", [32, 64])
def test_what_a_device_list_names_outside_is_left_out(guarded, bits):
    items, good = mixed() if bits == 64 else ([4, -1, 2**31 - 1, N_ITEMS, -(2**31), 9], [0, 5])
    held = torch.tensor(items, dtype=torch.int32 if bits == 32 else torch.int64, device="cuda:0")
    index = {"kv": Index(held.data_ptr(), bits, len(items), 0, held, "cuda:0")}
    out, expected = guarded.staging(len(items)), guarded.whole.clone()
    staged, inside = out.view(N_VIEWS, len(items), WIDTH), [items[at] for at in good]
    guarded.plan.gather(*guarded.at(out, index))
    torch.cuda.synchronize()
    want = torch.full_like(staged, 0xA5)
    want[:, good] = guarded.cells[:, inside]
    assert torch.equal(staged, want)
    out.random_(0, 256)
    expected[GUARD:-GUARD].view(N_VIEWS, N_ITEMS, WIDTH)[:, inside] = staged[:, good]
    guarded.plan.scatter(*guarded.at(out, index))
    torch.cuda.synchronize()
    assert torch.equal(guarded.whole, expected)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_copy_to_leaves_out_what_either_list_names_outside(variant, side):
    src, dst = Guarded(variant), Guarded(variant)
    items, good = mixed()
    fine = list(range(len(items)))
    src_items, dst_items = (items, fine) if side == "source" else (fine, items)
    expected = dst.whole.clone()
    inner = expected[GUARD:-GUARD].view(N_VIEWS, N_ITEMS, WIDTH)
    for at in good:
        inner[:, dst_items[at]] = src.cells[:, src_items[at]]
    src.plan.copy_to(
        dst.plan,
        src.list(src_items, on_device=True),
        dst.list(dst_items, on_device=True),
        src.tokens(len(items)),
    )
    torch.cuda.synchronize()
    assert torch.equal(dst.whole, expected)


def test_a_checksum_is_of_the_items_inside(variant):
    guarded = Guarded(variant, checksum=True)
    sums = []
    # The same positions, outside items and their neighbours apart: cells are named by token, so a list is compared with
    # itself cut into ranges of good items.
    items, good = mixed()
    out = guarded.staging(len(items))
    for ranges in ([(0, len(items))], [(at, at + 1) for at in good]):
        total = torch.zeros(1, dtype=torch.int64, device="cuda:0")
        for start, stop in ranges:
            guarded.plan.gather(
                out.data_ptr(),
                out.numel(),
                guarded.list(items, on_device=True),
                {"kv": (start, stop)},
                sum_ptr=total.data_ptr(),
            )
        sums.append(int(total.item()))
    assert sums[0] == sums[1]
    assert sums[0] != 0


def test_a_device_that_is_not_there_is_refused(guarded):
    n = torch.cuda.device_count()
    region = guarded.pool.layout.regions[0]
    layout = Layout((Region(region.base, region.nbytes, "cuda", n),), guarded.pool.layout.components)
    with pytest.raises(UsageError, match=f"cuda:{n}"):
        Pool.of(layout, f"cuda:{n}").plan(guarded.select, backend=guarded.plan.backend)

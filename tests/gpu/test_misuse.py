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


def test_a_gather_leaves_out_what_a_device_list_names_outside(guarded):
    items, good = mixed()
    out = guarded.staging(len(items))
    before = guarded.whole.clone()
    guarded.gather(out, items)
    torch.cuda.synchronize()
    staged = out.view(N_VIEWS, len(items), WIDTH)
    for at, item in enumerate(items):
        if at in good:
            assert torch.equal(staged[:, at], guarded.cells[:, item]), f"item {item}"
        else:
            assert bool((staged[:, at] == 0xA5).all()), f"something was staged for item {item}"
    assert torch.equal(guarded.whole, before)


def test_a_scatter_leaves_out_what_a_device_list_names_outside(guarded):
    items, good = mixed()
    src = torch.randint(0, 256, (N_VIEWS * len(items) * WIDTH,), dtype=torch.uint8, device="cuda:0")
    staged = src.view(N_VIEWS, len(items), WIDTH)
    expected = guarded.whole.clone()
    inner = expected[GUARD:-GUARD].view(N_VIEWS, N_ITEMS, WIDTH)
    for at in good:
        inner[:, items[at]] = staged[:, at]
    guarded.scatter(src, items)
    torch.cuda.synchronize()
    assert torch.equal(guarded.whole, expected)


def test_items_of_32_bits_outside_are_left_out(guarded):
    held = torch.tensor([4, -1, 2**31 - 1, N_ITEMS, -(2**31), 9], dtype=torch.int32, device="cuda:0")
    index = {"kv": Index(held.data_ptr(), 32, 6, 0, held, "cuda:0")}
    out = guarded.staging(6)
    guarded.plan.gather(out.data_ptr(), out.numel(), index, guarded.tokens(6))
    torch.cuda.synchronize()
    staged = out.view(N_VIEWS, 6, WIDTH)
    assert torch.equal(staged[:, [0, 5]], guarded.cells[:, [4, 9]])
    assert bool((staged[:, 1:5] == 0xA5).all())


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


@pytest.mark.parametrize("item", [-1, N_ITEMS, 2**40])
@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_an_item_outside_on_the_host_is_refused(guarded, way, item):
    out, before = guarded.staging(3), guarded.whole.clone()
    with pytest.raises(UsageError, match=rf"item {item} at position 1 of component 'kv' is outside"):
        getattr(guarded, way)(out, [2, item, 3], on_device=False)
    untouched(guarded, out, before)


def test_a_destination_named_twice_is_refused(guarded):
    out, before = guarded.staging(3), guarded.whole.clone()
    with pytest.raises(UsageError, match="item 2 at position 2 of component 'kv' is a destination twice"):
        guarded.scatter(out, [2, 1, 2], on_device=False)
    untouched(guarded, out, before)


@pytest.mark.parametrize("on_device", [True, False], ids=["list-on-device", "list-on-host"])
@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_staging_too_small_or_askew_is_refused(guarded, way, on_device):
    out, before = guarded.staging(3), guarded.whole.clone()
    index, tokens = guarded.list([1, 2, 3], on_device=on_device), guarded.tokens(3)
    call = getattr(guarded.plan, way)
    with pytest.raises(UsageError, match="too small"):
        call(out.data_ptr(), out.numel() - 1, index, tokens)
    with pytest.raises(UsageError, match="aligned"):
        call(out.data_ptr() + 8, out.numel(), index, tokens)
    untouched(guarded, out, before)


@pytest.mark.parametrize("on_device", [True, False], ids=["list-on-device", "list-on-host"])
def test_too_few_items_are_refused(guarded, on_device):
    out, before = guarded.staging(4), guarded.whole.clone()
    with pytest.raises(UsageError, match="3 items where its tokens need 4"):
        guarded.plan.gather(
            out.data_ptr(), out.numel(), guarded.list([1, 2, 3], on_device=on_device), guarded.tokens(4)
        )
    untouched(guarded, out, before)


def test_a_list_on_another_device_is_refused(guarded):
    out, before = guarded.staging(3), guarded.whole.clone()
    index = {"kv": guarded.list([1, 2, 3], on_device=True)["kv"]._replace(device="cuda:1")}
    with pytest.raises(UsageError, match="cuda:1"):
        guarded.plan.gather(out.data_ptr(), out.numel(), index, guarded.tokens(3))
    untouched(guarded, out, before)


def test_a_device_that_is_not_there_is_refused(guarded):
    n = torch.cuda.device_count()
    region = guarded.pool.layout.regions[0]
    layout = Layout((Region(region.base, region.nbytes, "cuda", n),), guarded.pool.layout.components)
    with pytest.raises(UsageError, match=f"cuda:{n}"):
        Pool.of(layout, f"cuda:{n}").plan(guarded.select, backend=guarded.plan.backend)


def test_a_checksum_needs_a_plan_for_it(guarded):
    out, total = guarded.staging(1), torch.zeros(1, dtype=torch.int64, device="cuda:0")
    with pytest.raises(UsageError, match="no checksums"):
        guarded.gather(out, [1], sum_ptr=total.data_ptr())


@pytest.mark.parametrize("max_sms", [0, -3])
def test_no_multiprocessors_are_refused(guarded, max_sms):
    with pytest.raises(UsageError, match=f"max_sms is {max_sms}"):
        guarded.gather(guarded.staging(1), [1], max_sms=max_sms)


def untouched(guarded, out, before):
    """Nothing was launched: no byte moved, and the context is sound."""
    torch.cuda.synchronize()
    assert torch.equal(guarded.whole, before)
    assert bool((out == 0xA5).all())

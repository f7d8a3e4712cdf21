"""Memory of others: another process's on the same GPU through CUDA IPC, and a peer GPU's."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gpu import workers  # noqa: E402  (needs torch)
from gpu.plain import Plain  # noqa: E402

SHAPE = (5, 64, 384)
SRC_ITEMS, DST_ITEMS = [3, 60, 8, 8, 0], [9, 1, 44, 63, 20]
JOIN_S = 90


@pytest.mark.gpu
def test_a_process_copies_straight_into_anothers_pool(variant):
    """The destination maps its pool for the source by CUDA IPC; no staging, one pass."""
    n_views, n_items, width = SHAPE
    dst = Plain(variant, n_views=n_views, n_items=n_items, width=width)
    staging = dst.staging(len(SRC_ITEMS))
    source = workers.pattern(SHAPE).view(SHAPE)
    expected = dst.cells.clone()
    expected[:, DST_ITEMS] = source[:, SRC_ITEMS]
    torch.cuda.synchronize()
    child = torch.multiprocessing.get_context("spawn").Process(
        target=workers.push, args=(variant, dst.memory, staging, SHAPE, SRC_ITEMS, DST_ITEMS)
    )
    child.start()
    child.join(JOIN_S)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode == 0
    assert torch.equal(dst.cells, expected)
    assert torch.equal(staging, source[:, SRC_ITEMS].reshape(-1))


@pytest.mark.multigpu
@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 0)])
def test_a_gpu_copies_straight_into_its_peers_pool(variant, source, target):
    if not torch.cuda.can_device_access_peer(source, target):
        pytest.skip(f"device {source} cannot access device {target}")
    n_views, n_items, width = SHAPE
    sizes = {"n_views": n_views, "n_items": n_items, "width": width}
    src = Plain(variant, **sizes, device=f"cuda:{source}")
    dst = Plain(variant, **sizes, device=f"cuda:{target}")
    expected = dst.cells.clone()
    # torch enables access between the two with the first copy.
    expected[:, DST_ITEMS] = src.cells[:, SRC_ITEMS].to(dst.device)
    torch.cuda.synchronize(target)
    with torch.cuda.device(source):
        src.plan.copy_to(
            dst.plan,
            src.list(SRC_ITEMS, on_device=False),
            dst.list(DST_ITEMS, on_device=False),
            src.tokens(len(SRC_ITEMS)),
        )
        torch.cuda.synchronize()
    assert torch.equal(dst.cells, expected)


@pytest.mark.multigpu
def test_staging_may_lie_on_the_peer(variant):
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("device 0 cannot access device 1")
    src = Plain(variant)
    items = [3, 60, 8]
    out = src.staging(len(items), "cuda:1")
    expected = src.expected(items)
    out.copy_(torch.zeros_like(expected))  # enables access
    torch.cuda.synchronize(1)
    src.gather(out, items)
    torch.cuda.synchronize(0)
    assert torch.equal(out.to("cuda:0"), expected)


@pytest.mark.multigpu
def test_a_rank_on_the_second_gpu_leaves_the_first_alone(variant):
    """Neither a plan nor a call, from a new thread at that, makes a context on a device that is another rank's."""
    child = torch.multiprocessing.get_context("spawn").Process(target=workers.on_the_second, args=(variant,))
    child.start()
    child.join(JOIN_S)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode == 0

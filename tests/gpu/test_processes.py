"""Two GPUs of one process: a peer's memory, and a rank that leaves the other alone."""

from __future__ import annotations

import ctypes
import threading

import pytest

torch = pytest.importorskip("torch")

from gpu.plain import Plain  # noqa: E402  (needs torch)

pytestmark = pytest.mark.multigpu

SHAPE = (5, 64, 384)
SRC_ITEMS, DST_ITEMS = [3, 60, 8, 8, 0], [9, 1, 44, 63, 20]
JOIN_S = 90


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


def on_the_second(variant):
    """In a process of its own. Fails if a context on device 0 comes of a rank's life on device 1."""
    torch.cuda.set_device(1)
    plain = Plain(variant, device="cuda:1")
    out = plain.staging(3)
    thread = threading.Thread(target=plain.gather, args=(out, [3, 60, 8]), kwargs={"on_device": False})
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(out, plain.expected([3, 60, 8]))
    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
    assert not active.value


def test_a_rank_on_the_second_gpu_leaves_the_first_alone(variant):
    """Neither a plan nor a call, from a new thread at that, makes a context on a device that is another rank's."""
    child = torch.multiprocessing.get_context("spawn").Process(target=on_the_second, args=(variant,))
    child.start()
    child.join(JOIN_S)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode == 0

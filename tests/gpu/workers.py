"""What the processes of test_processes.py run."""

from __future__ import annotations

import ctypes
import threading

import torch
from gpu.plain import Plain


def push(variant, mapped, staging, shape, src_items, dst_items):
    """In the source's process: its pool's cells straight into the other's pool, and a gather into its staging."""
    n_views, n_items, width = shape
    torch.cuda.set_device(0)
    src = Plain(variant, n_views=n_views, n_items=n_items, width=width, memory=pattern(shape))
    dst = Plain(variant, n_views=n_views, n_items=n_items, width=width, memory=mapped)
    src.plan.copy_to(
        dst.plan,
        src.list(src_items, on_device=False),
        dst.list(dst_items, on_device=False),
        src.tokens(len(src_items)),
    )
    src.gather(staging, src_items, on_device=False)
    torch.cuda.synchronize()


def on_the_second(variant):
    """Fails if a context on device 0 comes of a rank's life on device 1."""
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


def pattern(shape):
    """The same bytes in every process."""
    n_views, n_items, width = shape
    rng = torch.Generator().manual_seed(11)
    return torch.randint(0, 256, (n_views * n_items * width,), dtype=torch.uint8, generator=rng).to("cuda:0")

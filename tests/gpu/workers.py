"""What the processes of test_processes.py run."""

from __future__ import annotations

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


def pattern(shape):
    """The same bytes in every process."""
    n_views, n_items, width = shape
    rng = torch.Generator().manual_seed(11)
    return torch.randint(0, 256, (n_views * n_items * width,), dtype=torch.uint8, generator=rng).to("cuda:0")

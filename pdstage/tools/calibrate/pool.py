"""The pool on both sides of a calibration: one allocation, viewed as runs of many lengths."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from pdstage.kernels import Pool
from pdstage.layout import Key, Layout, Region, RowLevel, View
from pdstage.layout.topology import Axis
from pdstage.plan import Rect, Share

if TYPE_CHECKING:
    from numpy.typing import NDArray

RUNS = (*(256 << n for n in range(9)), 256 << 10)  # 256 B to 64 KiB, and whole pages
POOL_NBYTES = 128 << 20  # several times a core's caches, and larger than a room
LAYERS, PAGE = 8, 16
N_VIEWS = 2 * LAYERS


def component(run_nbytes: int) -> str:
    return f"runs of {run_nbytes}"


def make(device: str, nbytes: int = POOL_NBYTES) -> Pool:
    """One component for each of `RUNS` that fits into `nbytes`, all over the same bytes.

    Each is K and V of 8 layers in pages of 16 rows of one run. Rows are two runs apart, as if one side held twice the
    heads of the other, so that no two runs join.
    """
    kind, _, number = device.partition(":")
    held, base = allocate(device, nbytes)
    views = [
        View(
            key=Key(component(run), role, layer), region=0, offset=number_of * n_items(run, nbytes) * 2 * PAGE * run,
            n_items=n_items(run, nbytes), item_stride=2 * PAGE * run, tokens_per_item=PAGE,
            rows=(RowLevel(1, 2 * run),), shards=1, shard_stride=run,
            width=run, axis=Axis("kv_head", 1, 0, 1), format="bytes",
        )
        for run in RUNS
        if n_items(run, nbytes)
        for number_of, (role, layer) in enumerate((role, layer) for role in "kv" for layer in range(LAYERS))
    ]  # fmt: skip
    return Pool.of(Layout.of([Region(base, nbytes, kind, int(number or 0))], views), device, keep=held)


def allocate(device: str, nbytes: int) -> tuple[Any, int]:
    """Bytes on `device`, as a numpy array or a torch tensor, and their address."""
    if device == "cpu":
        held = np.ones(nbytes, np.uint8)
        return held, held.ctypes.data
    import torch  # noqa: PLC0415

    tensor = torch.ones(nbytes, dtype=torch.uint8, device=device)
    return tensor, tensor.data_ptr()


def n_items(run_nbytes: int, pool_nbytes: int = POOL_NBYTES) -> int:
    return pool_nbytes // (2 * PAGE * N_VIEWS * run_nbytes)


def tokens(run_nbytes: int, nbytes: int) -> int:
    """How many tokens of this component are about `nbytes`: at least one, at most half of the pool."""
    return max(1, min(nbytes // (N_VIEWS * run_nbytes), n_items(run_nbytes) * PAGE // 2))


def pages(run_nbytes: int, n_tokens: int, seed: int) -> NDArray[np.int32]:
    """Items for `n_tokens`, in an order with hardly any neighbours."""
    order = np.random.default_rng(seed).permutation(n_items(run_nbytes))
    return order[: -(-n_tokens // PAGE)].astype(np.int32)


def shares(run_nbytes: int) -> tuple[Share, ...]:
    return tuple(Share(component(run_nbytes), role, (0, LAYERS, 1), 0, 1) for role in "kv")


def rect(run_nbytes: int, n_tokens: int) -> Rect:
    return Rect(component(run_nbytes), 0, n_tokens, 0, LAYERS)


def fill(pool: Pool, seed: int) -> None:
    """Random bytes: no two places of a pool from `make` hold the same."""
    held: Any = pool.keep
    draw = np.random.Generator(np.random.SFC64(seed))
    data = draw.integers(0, 1 << 64, -(-len(held) // 8), np.uint64).view(np.uint8)[: len(held)]
    if isinstance(held, np.ndarray):
        held[:] = data
    else:
        import torch  # noqa: PLC0415

        held.copy_(torch.from_numpy(data.copy()))


def content(pool: Pool, run_nbytes: int, n_tokens: int, items: NDArray[np.int32]) -> bytes:
    """The content of the first `n_tokens` of `items` in a pool from `make`: view by view, token by token."""
    held: Any = pool.keep
    n = n_items(run_nbytes, len(held))
    rows = held[: N_VIEWS * n * 2 * PAGE * run_nbytes].reshape(N_VIEWS, n, PAGE, 2, run_nbytes)
    rows = rows[:, :, :, 0][:, items.tolist()]
    data = rows if isinstance(held, np.ndarray) else rows.cpu().numpy()
    return bytes(data.reshape(N_VIEWS, -1, run_nbytes)[:, :n_tokens].tobytes())


def digest(pool: Pool, run_nbytes: int, n_tokens: int, items: NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(content(pool, run_nbytes, n_tokens, items), digest_size=32).digest()

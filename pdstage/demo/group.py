"""The ranks of one side, joined by torch.distributed over loopback: what an engine's TP group does.

Layer 6 (demo). Must not know models or transfers.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray


class Group:
    """`tp` ranks that meet at the file `meeting`; alone (`tp == 1`) every call is the identity."""

    def __init__(self, tp: int, rank: int, meeting: Path, deadline_s: float) -> None:
        self._joined = tp > 1
        if self._joined:
            # gloo else picks the address that the host's name resolves to, which need not exist in a container.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            distributed.init_process_group(
                "gloo", f"file://{meeting}", timedelta(seconds=deadline_s), world_size=tp, rank=rank
            )

    def sum(self, partial: torch.Tensor) -> None:
        """Adds up `partial` of all ranks in place."""
        if self._joined:
            distributed.all_reduce(partial)

    def agree(self, values: Sequence[int]) -> list[int]:
        """Rank 0's `values`, on every rank: a token is chosen once, whatever the last bit of a sum is elsewhere."""
        chosen = torch.tensor(values)
        if self._joined:
            distributed.broadcast(chosen, src=0)
        return chosen.tolist()

    def lowest(self, states: NDArray[np.int8]) -> NDArray[np.int8]:
        """Elementwise minimum over the ranks: a room has come when it has come on all of them."""
        held = torch.from_numpy(states.copy())
        if self._joined:
            distributed.all_reduce(held, op=distributed.ReduceOp.MIN)
        return held.numpy()

    def close(self) -> None:
        if self._joined:
            distributed.destroy_process_group()

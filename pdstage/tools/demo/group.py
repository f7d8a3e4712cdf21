"""The ranks of one side, joined by torch.distributed over loopback, as an engine's TP and PP groups."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from pdstage.layout.topology import Topology


class Group:
    """The ranks of `place`'s side, which rendezvous at the file `meeting`. For a single rank every call is the
    identity.
    """

    def __init__(self, place: Topology, meeting: Path, deadline_s: float) -> None:
        self.size, self.rank = place.group_size, place.group_rank
        self._joined = self.size > 1
        if not self._joined:
            return
        # By default gloo uses the address that the host's name resolves to, which may not exist in a container.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group(
            "gloo", f"file://{meeting}", timedelta(seconds=deadline_s), world_size=self.size, rank=self.rank
        )

    def gather(self, part: Any) -> list[Any]:  # noqa: ANN401  (anything that can be pickled)
        """Every rank's `part` in the order of ranks, at rank 0; nothing elsewhere."""
        if not self._joined:
            return [part]
        parts = [None] * self.size if self.rank == 0 else None
        distributed.gather_object(part, parts, dst=0)
        return parts or []

    def agree(self, values: Sequence[int]) -> list[int]:
        """Rank 0's `values`, on every rank."""
        chosen = torch.tensor(values)
        if self._joined:
            distributed.broadcast(chosen, src=0)
        return chosen.tolist()

    def lowest(self, states: NDArray[np.int8]) -> NDArray[np.int8]:
        """Elementwise minimum over the ranks: a room has arrived when it has arrived on all of them."""
        held = torch.from_numpy(states.copy())
        if self._joined:
            distributed.all_reduce(held, op=distributed.ReduceOp.MIN)
        return held.numpy()

    def close(self) -> None:
        if self._joined:
            distributed.destroy_process_group()

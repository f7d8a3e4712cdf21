"""The two ranks of `gpu_rooms`: a node each over torch tensors on one device."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pdstage.kernels import Pool
from pdstage.layout.topology import Topology
from pdstage.manager import DecodeNode, PrefillNode
from pdstage.protocol.state import State
from pdstage.tensors import build, paged_hnd, paged_nhd

from .ranks import Actor, observers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

LAYERS, HEADS, DIM = 16, 8, 128
TOKEN_NBYTES = 2 * LAYERS * HEADS * DIM * 2
AT_ONCE = 8
PREFILL_PAGE, DECODE_PAGE = 16, 32
_WAIT_S = 30.0
_SEED = 5


def truth(tokens: int) -> torch.Tensor:
    """K and V of a room, `[2, layers, tokens, heads, dim]`, the same in both processes."""
    drawn = torch.Generator().manual_seed(_SEED)
    raw = torch.randint(-(2**15), 2**15, (2, LAYERS, tokens, HEADS, DIM), dtype=torch.int16, generator=drawn)
    return raw.view(torch.bfloat16)


class _RoomRank(Actor):
    """K and V, `[2, layers, pages, ...]`, and where each of `AT_ONCE` rooms lies: pages in random order."""

    page: int

    def __init__(self, device: str, tokens: int) -> None:
        per_room = -(-tokens // self.page)
        inner = (HEADS, self.page) if self.page == DECODE_PAGE else (self.page, HEADS)
        n_pages = AT_ONCE * per_room
        self.memory = torch.zeros((2, LAYERS, n_pages, *inner, DIM), dtype=torch.bfloat16, device=device)
        order = np.random.default_rng(self.page).permutation(n_pages)
        self.pages: list[NDArray[Any]] = [order[n * per_room : (n + 1) * per_room] for n in range(AT_ONCE)]

    def pool(self, device: str) -> Pool:
        make = paged_hnd if self.page == DECODE_PAGE else paged_nhd
        return Pool.of(build(make(*map(list, self.memory), total_heads=HEADS, tp=(1, 0))), device, keep=self.memory)

    def of_room(self, n: int, tokens: int) -> NDArray[Any]:
        return self.pages[n][: -(-tokens // self.page)]

    def idle(self) -> None:
        if self.node.driver.inline:
            self.node.turn(1e-3)
        else:  # asking would wake its thread again and again
            time.sleep(2e-4)

    def close(self) -> None:
        self.node.close()

    node: PrefillNode | DecodeNode


class Prefill(_RoomRank):
    page = PREFILL_PAGE

    def __init__(self, bootstrap: str, device: str, tokens: int, options: dict[str, Any]) -> None:
        super().__init__(device, tokens)
        values = truth(tokens).to(device)
        for n in range(AT_ONCE):
            self._write(n, values)
            if self.memory.is_cuda:
                torch.cuda.synchronize(device)
        self.node: PrefillNode = PrefillNode(
            self.pool(device), Topology(), bootstrap=bootstrap, observers=observers(), **options
        )

    def _write(self, n: int, values: torch.Tensor) -> None:
        """`values` as in `truth`, with the last page filled up."""
        pages = torch.from_numpy(self.pages[n]).to(values.device)
        fill = len(pages) * self.page - values.shape[2]
        whole = torch.nn.functional.pad(values, (0, 0, 0, 0, 0, fill))
        self.memory[:, :, pages] = whole.view(2, LAYERS, len(pages), self.page, HEADS, DIM)

    def give(self, names: Sequence[str], tokens: int) -> None:
        senders = []
        for n, name in enumerate(names):
            senders.append(self.node.send(name))
            senders[-1].chunk(self.of_room(n, tokens), tokens)
            senders[-1].finish()
        for sender in senders:
            sender.wait_released(_WAIT_S)
        self.node.completions()


class Decode(_RoomRank):
    page = DECODE_PAGE

    def __init__(self, bootstrap: str, device: str, tokens: int, options: dict[str, Any]) -> None:
        super().__init__(device, tokens)
        self.bootstrap = bootstrap
        self.truth = truth(tokens)
        if self.memory.is_cuda:
            torch.cuda.synchronize(device)
        self.node: DecodeNode = DecodeNode(self.pool(device), Topology(), observers=observers(), **options)

    def take(self, names: Sequence[str], tokens: int) -> tuple[float, bool]:
        begun = time.perf_counter()
        receivers = [self.node.receive(name, self.bootstrap) for name in names]
        for n, receiver in enumerate(receivers):
            receiver.bind(self.of_room(n, tokens), tokens)
        for receiver in receivers:
            receiver.wait(_WAIT_S)
        took = time.perf_counter() - begun
        assert all(receiver.status & 0x7F == State.SUCCESS for receiver in receivers)
        for receiver in receivers:
            receiver.wait_released(_WAIT_S)
        self.node.completions()
        return took, names[0].startswith("first") and self._holds(tokens)

    def _holds(self, tokens: int) -> bool:
        pages = torch.from_numpy(self.of_room(0, tokens)).to(self.memory.device)
        came = self.memory[:, :, pages].transpose(3, 4).reshape(2, LAYERS, -1, HEADS, DIM)[:, :, :tokens]
        return torch.equal(came.cpu().view(torch.int16), self.truth[:, :, :tokens].view(torch.int16))

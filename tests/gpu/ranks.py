"""Nodes whose pools lie on a GPU, and rooms between them: what test_local_ipc.py runs in each of its processes."""

from __future__ import annotations

import numpy as np
import torch

from pdstage import Pool
from tests.manager.engine import Rank, decode_node, drive, truth

TOKENS, N_ROOMS = 50, 6


class GpuRank(Rank):
    """A rank whose pages are torch tensors on `device`."""

    def __init__(self, device, **shape):
        super().__init__(**{"n_pages": 128} | shape)
        self.device = torch.device(device)
        self.k, self.v = ([torch.from_numpy(one).to(device) for one in tensors] for tensors in (self.k, self.v))
        self.pool = Pool.of(self.layout_of(), device, keep=(self.k, self.v))
        self.finish_work()

    def finish_work(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def write(self, room, tokens, pages):
        for layer in range(self.layers):
            for role, tensors in (("k", self.k), ("v", self.v)):
                values = torch.from_numpy(truth(room, layer, role, tokens, self.heads)).to(self.device)
                for t in range(tokens):
                    self._row(tensors[layer], int(pages[t // self.page]), t % self.page).copy_(values[t])
        self.finish_work()

    def read(self, layer, role, tokens, pages):
        tensor = (self.k if role == "k" else self.v)[layer].cpu().numpy()
        return np.stack([self._row(tensor, pages[t // self.page], t % self.page) for t in range(tokens)])


def send(node, rank):
    """Sends all rooms, each in two chunks."""
    senders = []
    for room in range(N_ROOMS):
        pages = rank.allocate(TOKENS)
        rank.write(room, TOKENS, pages)
        senders.append(node.send(room))
        senders[-1].chunk(pages, (0, 20))
        senders[-1].chunk(pages, (20, TOKENS))
        senders[-1].finish()
    return senders


def serve_decode(pipe, address, device, transport, journal):
    """Receives all rooms, and says how each ended and whether it holds what it must."""
    rank = GpuRank(device, page=8, hnd=True)
    with decode_node(rank, transport=transport, path="staged", journal=journal) as node:
        pages = [rank.allocate(TOKENS) for _ in range(N_ROOMS)]
        receivers = [node.receive(room, address) for room in range(N_ROOMS)]
        for receiver, into in zip(receivers, pages, strict=True):
            receiver.bind(into, TOKENS)
        drive([node], lambda: all(receiver.released for receiver in receivers), 60)
        pipe.send([(int(one.state), rank.holds(n, TOKENS, pages[n])) for n, one in enumerate(receivers)])
        drive([node], pipe.poll, 60)

"""Nodes whose pools lie on a GPU, and rooms between them, in two processes and in one."""

from __future__ import annotations

import multiprocessing

import numpy as np
import torch

from pdstage import Pool, State
from pdstage.control.bootstrap import BootstrapServer
from tests.manager.engine import Rank, decode_node, drive, prefill_node, truth

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


def write(rank):
    """The pages of all rooms, which hold what they must."""
    pages = [rank.allocate(TOKENS) for _ in range(N_ROOMS)]
    for room, held in enumerate(pages):
        rank.write(room, TOKENS, held)
    return pages


def send(node, pages):
    """Sends all rooms, each in two chunks."""
    senders = []
    for room, held in enumerate(pages):
        senders.append(node.send(room))
        senders[-1].chunk(held, (0, 20))
        senders[-1].chunk(held, (20, TOKENS))
        senders[-1].finish()
    return senders


def between_processes(target, transport, path="staged"):
    """All rooms from `cuda:0` here to a process with its pool on `target`; our node's counts."""
    spawn = multiprocessing.get_context("spawn")
    rank, (ours, theirs) = GpuRank("cuda:0"), spawn.Pipe()
    with BootstrapServer("127.0.0.1:0") as server:
        args = (theirs, server.address, target, transport, path)
        process = spawn.Process(target=serve_decode, args=args, daemon=True)
        with prefill_node(rank, server.address, transport=transport, path=path) as node:
            process.start()
            try:
                senders = send(node, write(rank))
                drive([node], lambda: all(sender.released for sender in senders) and ours.poll(), 60)
                assert ours.recv() == [(int(State.SUCCESS), True)] * N_ROOMS
                stats = node.stats()
                ours.send("end")
                process.join(60)
            finally:
                process.kill()
                process.join()
    return stats


def serve_decode(pipe, address, device, transport, path):
    """Receives all rooms, and says how each ended and whether it holds what it must."""
    rank = GpuRank(device, page=8, hnd=True)
    with decode_node(rank, transport=transport, path=path) as node:
        pages = [rank.allocate(TOKENS) for _ in range(N_ROOMS)]
        receivers = [node.receive(room, address) for room in range(N_ROOMS)]
        for receiver, into in zip(receivers, pages, strict=True):
            receiver.bind(into, TOKENS)
        drive([node], lambda: all(receiver.released for receiver in receivers), 60)
        pipe.send([(int(one.state), rank.holds(n, TOKENS, pages[n])) for n, one in enumerate(receivers)])
        drive([node], pipe.poll, 60)

"""Nodes whose pools lie on a GPU, and rooms between them, in two processes and in one."""

from __future__ import annotations

import multiprocessing

import torch

from pdstage import Pool
from pdstage.control.bootstrap import BootstrapServer
from tests.manager.engine import Rank, all_arrive, decode_node, prefill_node, serve_all


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
        super().write(room, tokens, pages)
        self.finish_work()

    def stored(self, values):
        return torch.from_numpy(values).to(self.device)

    def fetched(self, tensor):
        return tensor.cpu().numpy()


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
                all_arrive(ours, node, rank)
                stats = node.stats()
                ours.send("end")
                process.join(60)
            finally:
                process.kill()
                process.join()
    return stats


def serve_decode(pipe, address, device, transport, path):
    rank = GpuRank(device, page=8, hnd=True)
    with decode_node(rank, transport=transport, path=path) as node:
        serve_all(pipe, node, rank, address)

"""An endpoint of a transport over a GPU's memory, for the contract suite, and in a process of its own."""

from __future__ import annotations

import numpy as np
import torch
from transport.endpoint import NBYTES, Endpoint

from pdstage.kernels import driver
from pdstage.kernels.torch_runtime import TorchRuntime
from pdstage.kernels.virtual_memory import DESCRIPTOR, VirtualMemory, map_all
from pdstage.layout import Region
from pdstage.probe import _bytes_of
from pdstage.transport import open_transport


class GpuEndpoint(Endpoint):
    """Of "local+gpu" or "nixl+gpu:1". Its memory is torch's, in blocks that hold other tensors too; or, where `sizes`
    are given, of as many allocations of cuMemCreate, one behind the other.
    """

    def __init__(self, name: str, sizes: tuple[int, ...] = ()) -> None:
        transport, _, place = name.partition("+")
        self.device, self.sizes = torch.device(place.replace("gpu", "cuda")), sizes
        self.kind = self.device.type
        memory = self.allocate()  # and with it the thread's context, without which UCX leaves the GPU alone
        self.own(open_transport(transport), memory)

    def allocate(self):
        torch.empty(1 << 20, dtype=torch.uint8, device=self.device)
        memory = self.segments() if self.sizes else torch.empty(NBYTES, dtype=torch.uint8, device=self.device)
        memory.zero_()
        self.finish_work()
        return memory

    def segments(self):
        number = self.device.index or 0
        with TorchRuntime(str(self.device)).current():
            calls = VirtualMemory(driver.cuda())
            properties = calls.properties(number)
            properties.handle_types = DESCRIPTOR
            base = map_all(calls, number, self.sizes, lambda place: calls.create(self.sizes[place], properties))
        return _bytes_of(Region(base, NBYTES, "cuda", number))

    def finish_work(self):
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)

    def region_of(self, memory):
        return Region(memory.data_ptr(), NBYTES, self.kind, self.device.index or 0)

    def fill(self, offset, data):
        held = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        self.memory[offset : offset + len(data)] = held.to(self.device)
        self.finish_work()

    def read(self, offset, nbytes):
        return self.memory[offset : offset + nbytes].cpu().numpy().tobytes()

    def read_more(self, nbytes):
        return self.more[-1][:nbytes].cpu().numpy().tobytes()

    def give_up(self):
        """Torch keeps the block: nothing is freed that a peer may have open."""

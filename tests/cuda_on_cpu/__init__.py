"""Plans of the cuda backend over host memory: the kernels' own sources, run thread by thread by the double of CUDA.

They are launched with the argument blocks that plans build, so that tables, argument layout, index arithmetic and
bounds are judged where there is no GPU. It says nothing about timing, caches or the machine code.
"""

from __future__ import annotations

import ctypes

from pdstage.kernels.backend import Recipe
from pdstage.kernels.cuda_convert import ConvertPlan
from pdstage.kernels.cuda_runtime import Bulk, CudaRuntime
from pdstage.kernels.index_ring import IndexRing
from pdstage.plan import TOKEN_MAJOR, Staging
from pdstage.plan.convert import codings
from tests import cuda_double

COMPILER = cuda_double.COMPILER


class CpuMachine(CudaRuntime):
    """A small device of the double, whose launches are over when they return, and are recorded."""

    threads = 32
    bulk = Bulk(stages=4, stage_nbytes=512)
    small = 6, 20
    """Lists of so many items travel in the parameters."""

    def __init__(self):
        with cuda_double.use():
            super().__init__(0)
        self.double = cuda_double.double()
        self.n_sms, self.capability, self.widest, self.listed = 2, 90, 16, self.small
        self.launches = []
        self.accesses = []
        """Of each launch: bytes of an access to groups of 16 or more; None for kernels that know 16 only."""
        self.capture = False

    def allocate(self, nbytes):
        address = super().allocate(nbytes)
        ctypes.memset(address, 0xEE, nbytes)  # nobody may count on zeros
        return address

    def stream(self, stream):
        return super().stream(stream or 0)  # CuPy asks a real driver for the current one

    def capturing(self, stream):
        return self.capture or super().capturing(stream)

    def kernel(self, *given):
        with cuda_double.use():
            return super().kernel(*given)

    def launch(self, kernel, grid, stream, params, table):
        self.launches.append((grid, kernel.threads))
        (macros,) = [dict(macros) for (_, macros), one in self._kernels.items() if one.function == kernel.function]
        self.accesses.append(macros.get("PDSTAGE_ACCESS"))
        super().launch(kernel, grid, stream, params, table)
        with self.current():
            self._library.call("cuStreamSynchronize", ctypes.c_void_p(stream))
        assert not self.double.broken()


def convert_plan_of(pool, staged, select, checksum=False, machine=None):
    """A plan of the cuda backend that converts, over host memory."""
    machine = machine or CpuMachine()
    select = Staging(staged, select).select
    recipe = Recipe(pool.layout, select, TOKEN_MAJOR, "cuda:0", checksum, staged)
    recipe = recipe._replace(codings=tuple(codings(pool.layout, staged, select)))
    return ConvertPlan(recipe, machine, IndexRing(machine, 1, 64))

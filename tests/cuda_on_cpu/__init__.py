"""A test double of a CUDA device: the kernels' own sources, compiled by the host's C++ compiler, run thread by thread.

Launched through the plans of `pdstage.kernels.cuda_copy` with the argument blocks they build, so that tables, argument
layout, index arithmetic and bounds are judged where there is no GPU. It says nothing about timing, caches or the
machine code.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from functools import lru_cache

import numpy as np

from pdstage.kernels import nvrtc
from pdstage.kernels.arena import Arena
from pdstage.kernels.backend import Recipe
from pdstage.kernels.cuda_convert import ConvertPlan
from pdstage.kernels.cuda_copy import CudaPlan
from pdstage.kernels.cuda_runtime import Bulk
from pdstage.kernels.driver import Kernel
from pdstage.kernels.index_ring import IndexRing
from pdstage.plan import TOKEN_MAJOR, Staging
from pdstage.plan.convert import codings
from tests import cuda_double
from tests.cuda_double import compiler

COMPILER = cuda_double.COMPILER


@lru_cache(maxsize=128)
def _built(name, macros):
    texts = {path.name: path.read_text() for path in nvrtc.SOURCES.glob("*.cu*")}
    target, command = compiler.recipe(texts, name, [f"-D{macro}={value}" for macro, value in macros])
    if not target.exists():
        subprocess.run(command, shell=True, check=True)
    return ctypes.CDLL(str(target)).pdstage_launch


class CpuMachine:
    """What `CudaRuntime` is for a GPU. Events of uploads are done when `finish` is called, or at once if `eager`."""

    n_sms = 2
    threads = 32
    capability = 90
    widest = 16
    listed = (6, 20)
    bulk = Bulk(stages=4, stage_nbytes=512)

    def __init__(self, eager=True):
        self.eager = eager
        self.held = []
        self.launches = []
        self.accesses = []
        """Of each launch: bytes of an access to groups of 16 or more; None for kernels that know 16 only."""
        self.capture = False
        self._functions = []
        self.waits = []
        self._tables = None

    def current(self):
        return contextlib.nullcontext()

    def pinned(self, nbytes):
        return np.full(nbytes, 0xEE, np.uint8)

    def allocate(self, nbytes):
        self.held.append(np.full(nbytes + 16, 0xEE, np.uint8))
        return self.held[-1].ctypes.data + -self.held[-1].ctypes.data % 16

    @property
    def tables(self):
        """Made when first asked for: some tests count what is allocated."""
        self._tables = self._tables or Arena(self)
        return self._tables

    def event(self):
        return {"pending": False}

    def new_stream(self):
        return 0x57

    def owns(self, stream):
        return stream == 0x57

    def wait(self, event, stream):
        self.waits.append(stream)

    def upload(self, dst_ptr, src, stream):
        ctypes.memmove(dst_ptr, src.__array_interface__["data"][0], src.nbytes)

    def record(self, event, stream):
        event["pending"] = not self.eager

    def done(self, event):
        return not event["pending"]

    def stream(self, stream):
        return stream or 0

    def capturing(self, stream):
        return self.capture

    def kernel(self, name, macros, threads, shared_nbytes=0):
        self._functions.append((name, tuple(sorted(macros.items()))))  # built by the first launch: few of them have one
        return Kernel(len(self._functions) - 1, threads, shared_nbytes)

    def launch(self, kernel, grid, stream, params, table):
        table.before(stream)
        name, macros = self._functions[kernel.function]
        self.launches.append((grid, kernel.threads))
        self.accesses.append(dict(macros).get("PDSTAGE_ACCESS"))
        argument = ctypes.c_void_p.from_address(params)
        fault = _built(name, macros)(argument, grid, kernel.threads)
        assert fault == 0, (
            f"the kernel ended with fault {fault}: 1 misaligned, 2 a missed barrier, 4 a wait without end"
        )
        table.after(stream)


def plan_of(pool, select, wire, checksum=False, machine=None, bulk_from=None):
    """A plan of the cuda backend over host memory; runs of `bulk_from` bytes on take the bulk copies."""
    machine = machine or CpuMachine()
    select = Staging(pool.layout, select).select
    return CudaPlan(
        Recipe(pool.layout, select, wire, "cuda:0", checksum), machine, IndexRing(machine, 1, 64), bulk_from
    )


def convert_plan_of(pool, staged, select, checksum=False, machine=None):
    """A plan of the cuda backend that converts, over host memory."""
    machine = machine or CpuMachine()
    select = Staging(staged, select).select
    recipe = Recipe(pool.layout, select, TOKEN_MAJOR, "cuda:0", checksum, staged)
    recipe = recipe._replace(codings=tuple(codings(pool.layout, staged, select)))
    return ConvertPlan(recipe, machine, IndexRing(machine, 1, 64))

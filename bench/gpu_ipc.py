"""A gather directly into another process's memory, beside a gather here and a write there: transport `local`.

Needs what that transport needs: msgspec, and on a GPU CuPy. The other process is on the same GPU, and also on `cuda:1`
if that is writable. On the CPU the same goes through shared memory.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pdstage.layout import Region
from pdstage.plan.spans import Spans

from .gpu_kernels import CURVE_NBYTES, QUICK_REPEATS, REPEATS, runs_case
from .harness import Row

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

    from pdstage.transport import Transport

    from .bed import Bed

RUN_NBYTES = (256, 1024, 4096)
_START_S = 60.0


def rows(bed: Bed, quick: bool, nbytes: int = CURVE_NBYTES) -> Iterator[Row]:
    """By target, run length and variant: GB/s of one pass beside those of two."""
    nbytes = bed.sized(nbytes)
    for package in ("msgspec", "cupy") if bed.kind == "cuda" else ("msgspec",):
        if importlib.util.find_spec(package) is None:
            bed.left_out.append(f"ipc: {package} is not installed")
            return
    spawn = multiprocessing.get_context("spawn")
    for target in _targets(bed):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=hold, args=(theirs, target, 2 * nbytes), daemon=True)
        process.start()
        theirs.close()
        try:
            if not ours.poll(_START_S):
                raise RuntimeError(f"the process on {target} does not answer")
            yield from _to(bed, target, ours.recv(), nbytes, QUICK_REPEATS if quick else REPEATS)
        finally:
            ours.close()
            process.join(_START_S)
            process.kill()


def _targets(bed: Bed) -> list[str]:
    if bed.kind == "cpu":
        return ["cpu"]
    reachable = torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1)
    return ["cuda:0", "cuda:1"] if reachable else ["cuda:0"]


def hold(pipe: Connection, device: str, nbytes: int) -> None:
    """The other process: registers memory on `device`, describes it, and holds it until the pipe is closed."""
    from pdstage import shared  # noqa: PLC0415
    from pdstage.transport import open_transport  # noqa: PLC0415  (msgspec, which may not be here)

    transport = open_transport("local")
    if device == "cpu":
        memory: Any = shared.allocate(nbytes)
        region = Region(memory.ctypes.data, nbytes)
    else:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        torch.cuda.synchronize(device)
        region = Region(memory.data_ptr(), nbytes, "cuda", torch.device(device).index)
    transport.register([region])
    pipe.send((transport.describe(), region))
    pipe.poll(None)
    transport.close()


def _to(bed: Bed, target: str, described: tuple[bytes, Region], nbytes: int, repeats: int) -> Iterator[Row]:
    from pdstage.transport import open_transport  # noqa: PLC0415

    description, region = described
    transport = open_transport("local")
    for run_nbytes in RUN_NBYTES:
        case = runs_case(bed, run_nbytes, nbytes)
        own = Region(case.staging.data_ptr(), case.nbytes, bed.kind)
        transport.register([own])
        transport.connect("peer", description)
        transport.prepare("peer", [region])
        mapped = transport.mapped("peer", region.base, case.nbytes)
        if mapped is None:
            raise RuntimeError(f"memory on {target} is not mapped")
        write_s = _write_s(bed, transport, own, region, repeats)
        for variant in bed.variants:
            to = (mapped.address, case.nbytes, case.index, case.tokens)
            one = partial(case.plan(variant).gather, *to, stream=bed.stream())
            found = bed.seconds({"one": one, "gather": case.works(variant)["gather"]}, repeats)
            at = {"table": "ipc", "target": target, "run_nbytes": run_nbytes, "variant": variant}
            yield Row(
                name=f"gather into a process on {target}, {run_nbytes} B runs, {variant}: one pass beside two",
                value=case.nbytes / found["one"] / 1e9,
                baseline=case.nbytes / (found["gather"] + write_s) / 1e9,
                unit="GB/s",
                detail=f"the write alone {case.nbytes / write_s / 1e9:.3g} GB/s, the host's part of it included",
                point=at,
            )
        transport.disconnect("peer")
        transport.unregister([own])
    transport.close()


def _write_s(bed: Bed, transport: Transport, own: Region, region: Region, repeats: int) -> float:
    """Seconds from a post until its end is seen."""
    spans, took = Spans(*(np.array([at], np.int64) for at in (own.base, region.base, own.nbytes))), []
    for _ in range(repeats):
        bed.wait()
        start = time.perf_counter()
        transport.post("peer", spans, b"")
        while not transport.poll():
            pass
        took.append(time.perf_counter() - start)
    return statistics.median(took)

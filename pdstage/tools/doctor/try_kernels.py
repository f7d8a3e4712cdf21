"""Tries gather and scatter with each backend, and the compilers behind them.

The copies are compared byte for byte with the pool.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np

from pdstage import environment, kernels, native
from pdstage.errors import TransportError
from pdstage.kernels import nvrtc as compiler
from pdstage.layout import Key
from pdstage.plan import Select
from pdstage.plan.tables import Index
from pdstage.tools.calibrate import pool as pools

if TYPE_CHECKING:
    from pdstage.tools.doctor.probes import Say

_NBYTES, _RUN, _TOKENS = 32 << 20, 1024, 200
_MACROS = {
    "PDSTAGE_HEAD_MAJOR": 0, "PDSTAGE_NARROW": 0, "PDSTAGE_FLAT": 0, "PDSTAGE_WAY": 0, "PDSTAGE_SUM": 0,
    "PDSTAGE_THREADS": 512, "PDSTAGE_UNITS": 4,
}  # fmt: skip


def host_copy(say: Say) -> None:
    """Reports which host code is "active", and copies in host memory."""
    say.found(active=native.active())
    say.step("copy")
    _copy("cpu", "auto")


def device_copy(say: Say, *, device: str) -> None:
    """Copies with each usable GPU backend; reports "backend NAME": empty, or why not."""
    for name in ("cuda", "triton"):
        say.step(name)
        why = kernels.backends()[name]
        if not why:
            _copy(device, name)
        say.found(**{f"backend {name}": why})


def _copy(device: str, backend: str) -> None:
    src, dst = pools.make(device, _NBYTES), pools.make(device, _NBYTES)
    pools.fill(src, 1)
    name, tokens = pools.component(_RUN), {pools.component(_RUN): (0, _TOKENS)}
    select = [Select(Key(name, role, layer), 0, 1) for role in "kv" for layer in range(pools.LAYERS)]
    order = np.random.default_rng(2).permutation(pools.n_items(_RUN, _NBYTES)).astype(np.int32)
    pages = order[: -(-_TOKENS // pools.PAGE)]
    plan = src.plan(select, backend=backend)
    staging, at = pools.allocate(device, plan.nbytes(tokens))
    plan.gather(at, plan.nbytes(tokens), {name: Index.of(pages)}, tokens)
    _wait(device)
    dst.plan(select, backend=backend).scatter(at, plan.nbytes(tokens), {name: Index.of(pages[::-1].copy())}, tokens)
    _wait(device)
    del staging
    if pools.content(src, _RUN, _TOKENS, pages) != pools.content(dst, _RUN, _TOKENS, pages[::-1]):
        raise TransportError(f"backend {plan.backend} copied other bytes", remedy="do not use it; report it")


def _wait(device: str) -> None:
    if device != "cpu":
        import torch  # noqa: PLC0415

        torch.cuda.synchronize(device)


def nvrtc(say: Say, *, architecture: str) -> None:
    """Compiles the copy kernel without the cache; reports versions, seconds and bytes."""
    say.step("import cupy")
    import cupy  # noqa: PLC0415
    from cupy.cuda import nvrtc as binding  # noqa: PLC0415

    say.found(cupy=cupy.__version__, nvrtc=".".join(map(str, binding.getVersion())))
    say.step("compile")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pdstage-doctor-") as folder:
        os.environ[environment.CACHE_DIR.name] = folder
        image = compiler.compile_kernel("copy.cu", _MACROS, architecture)
    say.found(nbytes=len(image), seconds=time.monotonic() - begun)


def triton(say: Say) -> None:
    say.step("import triton")
    import triton as library  # noqa: PLC0415

    say.found(version=library.__version__)
    say.step("look for a GPU")
    say.found(why_not=kernels.backends()["triton"])


def torch(say: Say) -> None:
    say.step("import torch")
    import torch as library  # noqa: PLC0415

    say.found(version=library.__version__, cuda=library.version.cuda or "", gpus=library.cuda.device_count())

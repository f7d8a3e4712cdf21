"""The kernels to compare, by name, and how to make a plan use exactly one of them.

`cuda` has two kernels and picks one by run length; a comparison needs each alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.kernels import backends, cuda_copy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdstage.kernels import Plan, Pool
    from pdstage.plan import Select

CUDA_PLAIN, CUDA_BULK, TRITON, HOST = "cuda plain", "cuda bulk", "triton", "host"
ON_GPU = (CUDA_PLAIN, CUDA_BULK, TRITON)
_BULK_FROM = {CUDA_PLAIN: 0, CUDA_BULK: 16}  # never, and wherever its accesses can


def missing(variant: str) -> str:
    """Why it cannot run here; empty if it can."""
    problem = backends()[backend_of(variant)]
    if problem or variant == HOST:
        return problem
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return "no CUDA device here"
    major, minor = torch.cuda.get_device_capability()
    if variant == CUDA_BULK and not cuda_copy.bulk_from_nbytes(10 * major + minor):
        return f"no bulk copies on compute capability {major}.{minor}"
    return ""


def backend_of(variant: str) -> str:
    return variant.partition(" ")[0]


def plan_of(pool: Pool, select: Iterable[Select], order: str, variant: str, *, checksum: bool = False) -> Plan:
    """`pool.plan`, made to use `variant` and no other kernel wherever that one can go."""
    held = cuda_copy.BULK_FROM_NBYTES
    if variant in _BULK_FROM:
        cuda_copy.BULK_FROM_NBYTES = {known: n and _BULK_FROM[variant] for known, n in held.items()}
    try:
        return pool.plan(select, order, backend_of(variant), checksum=checksum)
    finally:
        cuda_copy.BULK_FROM_NBYTES = held

"""Gather scattered cells of a pool into dense staging bytes, and scatter them back.

Imports only the layers below; torch only where a plan needs it.

A `Pool` over a `Layout` makes a `Plan` for each selection once, and the plan gathers and scatters chunk after chunk.
All backends give equal bytes. `reference` is the definition of correct, and `backends()` lists those that work here.

Read `reference` and `checksum` (what is correct); `pool` (what callers hold); `backend` (the interface of a backend);
`host_copy`. Then for GPUs `device` (tables), `arena` (their memory), `index_ring` (uploads of item lists),
`cuda_copy` with `cuda_tables`, `cuda_runtime` and `nvrtc`, and `triton_copy` with `triton_kernels`, `triton_device` and
`torch_runtime`. Both use `driver` (contexts, stream capture) and `device_memory` with `virtual_memory`. Change of
precision has its own modules: `convert_reference` (what is correct, and host memory), `cuda_convert`, and
`triton_convert` with `triton_convert_kernels` and `triton_sum_kernels`.
"""

from __future__ import annotations

from ..plan.tables import Index
from .pool import Plan, Pool, backends

__all__ = ["Index", "Plan", "Pool", "backends"]

"""The definition of correct conversions: bf16 to the formats of pdstage/plan/convert.py and back, with torch's casts.

docs/convert.md describes the same. Every NaN is stored as 0x7F, as by the conversion instructions of GPUs, and decodes
to 0x7FC0: torch alone would keep its sign.
"""

from __future__ import annotations

import importlib.util
import math
from functools import partial
from typing import TYPE_CHECKING

from ..plan import Staging
from ..plan.convert import BLOCK, DATA, SCALE, TENSOR, TOKEN_HEAD, feeding
from ..plan.tables import memory
from . import reference

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import torch
    from numpy.typing import NDArray

    from ..plan import Tokens
    from ..plan.convert import Encoding
    from ..plan.tables import Index
    from .backend import Launch, Recipe

LARGEST = 448.0
LEAST_TOKEN_HEAD_SCALE = 1e-6
LEAST_CEIL_AMAX = 1e-30


def encode(encoding: Encoding, values: torch.Tensor) -> torch.Tensor:
    """bf16 `[n, d]` as the bytes of `n` encoded cells, `[n, encoding.nbytes(d)]`."""
    import torch  # noqa: PLC0415

    x = values.float()
    if encoding.kind == TENSOR:
        if encoding.rule == "divide":
            return _e4m3(x / torch.tensor(encoding.scale))
        return _e4m3((x * (1 / torch.tensor(encoding.scale))).bfloat16().float())
    if encoding.kind == TOKEN_HEAD:
        scale = torch.clamp(x.abs().amax(1, keepdim=True) / LARGEST, min=LEAST_TOKEN_HEAD_SCALE)
        scale = torch.where(scale.isnan(), torch.tensor(float("nan")), scale)
        data, scales = _e4m3(x * (1 / scale)), scale.view(torch.uint8)
    else:
        blocks = x.reshape(-1, BLOCK)
        byte = _e8m0(encoding.rule, blocks.abs().amax(1))
        data = _e4m3(blocks / _power(byte)[:, None]).reshape(len(x), -1)
        scales = byte.to(torch.uint8).reshape(len(x), -1)
    return {DATA: data, SCALE: scales}.get(encoding.part, torch.cat([data, scales], 1))


def decode(encoding: Encoding, cells: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
    """The bf16 values `[n, d]` of encoded cells; `scales` are those of part "data"."""
    import torch  # noqa: PLC0415

    if encoding.kind == TENSOR:
        return _bf16(_values(cells) * torch.tensor(encoding.scale))
    if scales is None:
        n = cells.shape[1] - 4 if encoding.kind == TOKEN_HEAD else cells.shape[1] // (BLOCK + 1) * BLOCK
        cells, scales = cells[:, :n], cells[:, n:]
    if encoding.kind == TOKEN_HEAD:
        aligned = scales.clone(memory_format=torch.contiguous_format)
        return _bf16(_values(cells) * aligned.view(torch.float32))
    return _bf16(_values(cells) * _power(scales.int()).repeat_interleave(BLOCK, 1))


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """float32 as e4m3fn bytes: to nearest, ties to even, saturated at 448."""
    import torch  # noqa: PLC0415

    cast = x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), torch.tensor(0x7F, dtype=torch.uint8), cast)


def _values(data: torch.Tensor) -> torch.Tensor:
    import torch  # noqa: PLC0415

    return data.contiguous().view(torch.float8_e4m3fn).float()


def _bf16(x: torch.Tensor) -> torch.Tensor:
    import torch  # noqa: PLC0415

    return torch.where(x.isnan(), torch.tensor(0x7FC0, dtype=torch.int16).view(torch.bfloat16), x.bfloat16())


def _e8m0(rule: str, amax: torch.Tensor) -> torch.Tensor:
    """Each block's scale byte for its largest magnitude: 127 + the exponent; 255 for NaN."""
    import torch  # noqa: PLC0415

    if rule == "floor":
        byte = torch.where(amax.isinf(), 128, torch.frexp(amax)[1] - 1) - 8 + 127
        byte = torch.where(amax == 0, 0, byte)
    else:
        mantissa, exponent = torch.frexp(amax.clamp(min=LEAST_CEIL_AMAX))
        # amax is 2*mantissa * 2^(exponent-1), and 448 is 1.75 * 2^8.
        byte = exponent - 1 - 8 + (2 * mantissa > 1.75).int() + 127
        byte = torch.where(amax.isinf(), 254, byte)
    return torch.where(amax.isnan(), 255, byte.clamp(0, 254)).int()


def _power(byte: torch.Tensor) -> torch.Tensor:
    """E8M0 as float32."""
    import torch  # noqa: PLC0415

    return torch.where(byte == 255, torch.tensor(float("nan")), torch.ldexp(torch.tensor(1.0), byte.float() - 127))


class ConvertPlan(reference.ReferencePlan):
    """A plan whose own views are bf16 and whose staged views are encoded: gather encodes, scatter decodes.

    Token-major only. Checksums cover the staged cells.
    """

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.staged is not None
        fed = feeding(recipe.layout, recipe.staged)
        super().__init__(fed, recipe.select, recipe.order, Staging(recipe.staged, recipe.select))
        self._codings = recipe.codings

    def gather(
        self, dst_ptr: int, dst_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        import torch  # noqa: PLC0415

        moving = self._moving(indexes, tokens, unique=False)
        self._check_size(dst_nbytes, tokens)
        for view in moving:
            cells, coding = view.cells(), self._codings[view.place]
            if coding.encoding is not None:
                values = torch.from_numpy(cells.reshape(-1, cells.shape[-1])).view(torch.bfloat16)
                cells = encode(coding.encoding, values).numpy()
            memory(dst_ptr + view.at, cells.size)[:] = cells.reshape(-1)
        reference.add(launch.sum_ptr, moving, partial(self._staged, dst_ptr))

    def scatter(
        self, src_ptr: int, src_nbytes: int, indexes: Mapping[str, Index], tokens: Tokens, launch: Launch
    ) -> None:
        import torch  # noqa: PLC0415

        moving = self._moving(indexes, tokens, unique=True)
        self._check_size(src_nbytes, tokens)
        for view in moving:
            coding, offsets = self._codings[view.place], view.canonical
            cells = self._staged(src_ptr, view)
            if coding.encoding is not None and coding.encoding.part == SCALE:
                continue
            if coding.encoding is not None:
                both = [cells, *(self._staged(src_ptr, other) for other in moving if other.place == coding.scales)]
                values = decode(coding.encoding, *(torch.from_numpy(c.reshape(-1, c.shape[-1])) for c in both))
                cells = values.contiguous().view(torch.uint8).numpy()
            view.region[offsets] = cells.reshape(offsets.shape)
        reference.add(launch.sum_ptr, moving, partial(self._staged, src_ptr))

    def _staged(self, ptr: int, view: reference.Moving) -> NDArray[np.uint8]:
        """A view's staged cells, `[row, shard, segment, byte]`."""
        shape = (*view.canonical.shape[:-1], self._codings[view.place].width)
        return memory(ptr + view.at, math.prod(shape)).reshape(shape)


def missing() -> str:
    """Why the reference cannot convert here; empty if it can."""
    return "" if importlib.util.find_spec("torch") else "install pdstage[torch]"


def compile_plan(recipe: Recipe) -> ConvertPlan:
    """Prepares nothing, as in `reference`."""
    return ConvertPlan(recipe)

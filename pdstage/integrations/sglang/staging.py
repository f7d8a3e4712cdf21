"""SGLang's two staging functions on pdstage's kernels: its own backends call them between a pool and staging memory.

With these alone, SGLang's mooncake and nixl backends work unchanged. Signatures and staged bytes are those of
sglang/srt/disaggregation/common/staging_buffer.py as of 0.5.23, so that a peer may run SGLang's own functions. The
order is writer after writer, K of all layers, then V of all layers, each `[token][head][element]` without padding.
Stream semantics are the same: a gather is done when it returns, a scatter runs in the current stream.

Calls that pdstage's kernels do not support go to SGLang's own functions, and are logged once: see `Layers.refusal`.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from sglang.srt.disaggregation.common import staging_buffer as theirs
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from pdstage import environment
from pdstage.errors import UsageError
from pdstage.kernels import Index, Plan, Pool
from pdstage.layout import Key, Layout, Region, RowLevel, View
from pdstage.layout.topology import Axis
from pdstage.plan import VIEW_ALIGNMENT, Select

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

log = logging.getLogger(__name__)

COMPONENT = "kv"
ACCESS = 16  # bytes: the alignment of staging memory that a kernel on a device needs
# Not module variables: SGLang's hooks replace a hooked function wherever they find it.
_OWN = {name: getattr(theirs, name) for name in ("gather_all_layers_to_staging", "scatter_staging_to_kv")}
_told: set[str] = set()


class Layers(NamedTuple):
    """K of all layers, then V: equal dense buffers `[slot, head, element]` at `pointers`; `width` is a head's bytes."""

    device: str
    n_slots: int
    n_heads: int
    width: int
    equal: bool
    pointers: tuple[int, ...]

    @classmethod
    def of(cls, k_buffers: Sequence[torch.Tensor], v_buffers: Sequence[torch.Tensor]) -> Layers:
        buffers = [*k_buffers, *v_buffers]
        first = buffers[0]
        shapes = {(one.shape, one.dtype, one.device) for one in buffers}
        equal = len(shapes) == 1 and all(one.is_contiguous() for one in buffers)
        n_slots, n_heads, n_elements = first.shape
        width = n_elements * first.element_size()
        return cls(str(first.device), n_slots, n_heads, width, equal, tuple([one.data_ptr() for one in buffers]))

    def nbytes(self, n_tokens: int, n_heads: int) -> int:
        """The bytes that one writer stages."""
        return n_tokens * n_heads * self.width * len(self.pointers)

    def refusal(self, n_tokens: int, n_heads: int, staging: torch.Tensor) -> str:
        """Why pdstage's kernels cannot do this; empty if they can."""
        if not self.equal:
            return "layers are not of one dense shape"
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            return f"no kernel for {self.device}"
        if n_tokens * n_heads * self.width % VIEW_ALIGNMENT:
            return f"a layer's staged bytes are not a multiple of {VIEW_ALIGNMENT}"
        if staging.data_ptr() % ACCESS:
            return f"staging memory is not aligned to {ACCESS} bytes"
        return ""


@lru_cache(maxsize=256)
def _plan(layers: Layers, page_size: int, head_start: int, n_heads: int) -> Plan:
    """Computed once for each range of heads that some peer's rank wants."""
    if not 0 <= head_start < head_start + n_heads <= layers.n_heads:
        raise UsageError(
            f"heads [{head_start}, {head_start + n_heads}) of a pool with {layers.n_heads}",
            remedy="start prefill and decode with one model and TP sizes that divide each other",
        )
    row, n_pages = layers.n_heads * layers.width, layers.n_slots // page_size  # nobody names a part of a page
    kind, _, ordinal = layers.device.partition(":")
    regions = [Region(pointer, n_pages * page_size * row, kind, int(ordinal or 0)) for pointer in layers.pointers]
    views = [
        View(
            key=Key(COMPONENT, "", number), region=number, offset=0, n_items=n_pages, item_stride=page_size * row,
            tokens_per_item=page_size, rows=(RowLevel(1, row),), shards=layers.n_heads, shard_stride=layers.width,
            width=layers.width, axis=Axis("kv_head", layers.n_heads, 0, layers.n_heads), format="bytes",
        )
        for number in range(len(regions))
    ]  # fmt: skip
    select = [Select(view.key, head_start, n_heads) for view in views]
    return Pool.of(Layout.of(regions, views), layers.device).plan(select)


def gather_all_layers_to_staging(  # noqa: PLR0917  (SGLang's signature)
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    page_indices_np: NDArray[np.int32],
    staging_buffer: Any,  # noqa: ANN401  (SGLang's StagingBuffer)
    src_head_start: int,
    num_heads: int,
    page_size: int,
) -> int:
    """Gathers heads `[src_head_start, +num_heads)` of the listed pages, of all layers, to the start of the staging
    buffer.

    `page_indices_np` are int32 or int64. Returns the bytes written. Raises `UsageError`, and writes nothing, for pages
    or heads outside the pool, and for staging memory that is too small or on another device.
    """
    layers, staging = Layers.of(k_buffers, v_buffers), staging_buffer.buffer
    n_tokens = len(page_indices_np) * page_size
    nbytes = layers.nbytes(n_tokens, num_heads)
    _check(layers, staging, nbytes)
    if refusal := layers.refusal(n_tokens, num_heads, staging):
        own = _own("gather_all_layers_to_staging", refusal)
        return int(own(k_buffers, v_buffers, page_indices_np, staging_buffer, src_head_start, num_heads, page_size))
    plan = _plan(layers, page_size, src_head_start, num_heads)
    index = Index.of(np.ascontiguousarray(page_indices_np))
    where = staging.data_ptr(), staging.numel(), {COMPONENT: index}, {COMPONENT: (0, n_tokens)}
    if not staging.is_cuda:
        plan.gather(*where)
    else:
        staging_buffer.device_module.set_device(staging.device.index)
        stream = staging_buffer.get_gather_stream()
        stream.wait_stream(staging_buffer.producer_stream())
        plan.gather(*where, stream=stream)
        stream.synchronize()
    return nbytes


def scatter_staging_to_kv(  # noqa: PLR0917  (SGLang's signature)
    staging_buffer_view: torch.Tensor,
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    page_idx_tensor: torch.Tensor,
    page_size: int,
    prefill_attn_tp_size: int,
    decode_attn_tp_size: int,
    dst_tp_rank: int,
    total_kv_heads: int,
) -> None:
    """Scatters all writers' parts, from the start of the view to the listed pages of all layers, in the current stream.

    SGLang's `compute_head_slice_params` gives the heads of each writer. Raises `UsageError` as the gather does, and for
    a page listed twice. The host cannot check a list that is on a device: then pages outside the pool are skipped.
    """
    sizes = prefill_attn_tp_size, decode_attn_tp_size
    n_writers = max(1, prefill_attn_tp_size // max(1, decode_attn_tp_size))
    slices = [theirs.compute_head_slice_params(*sizes, n, dst_tp_rank, total_kv_heads) for n in range(n_writers)]
    n_heads = slices[0][1]
    layers, n_tokens = Layers.of(k_buffers, v_buffers), len(page_idx_tensor) * page_size
    nbytes = layers.nbytes(n_tokens, n_heads)
    _check(layers, staging_buffer_view, nbytes * n_writers)
    if refusal := layers.refusal(n_tokens, n_heads, staging_buffer_view):
        own = _own("scatter_staging_to_kv", refusal)
        own(staging_buffer_view, k_buffers, v_buffers, page_idx_tensor, page_size, *sizes, dst_tp_rank, total_kv_heads)
        return
    pages = page_idx_tensor.contiguous()
    index = Index(pages.data_ptr(), pages.element_size() * 8, len(pages), 0, pages, str(pages.device))
    stream = torch.cuda.current_stream(pages.device) if pages.is_cuda else None
    for writer, (_, _, head_start, _) in enumerate(slices):
        plan = _plan(layers, page_size, head_start, n_heads)
        ptr = staging_buffer_view.data_ptr() + writer * nbytes
        plan.scatter(ptr, nbytes, {COMPONENT: index}, {COMPONENT: (0, n_tokens)}, stream=stream)


def _check(layers: Layers, staging: torch.Tensor, nbytes: int) -> None:
    if str(staging.device) != layers.device:
        raise UsageError(f"KV buffers on {layers.device}, staging on {staging.device}", remedy="put both on one device")
    if staging.numel() < nbytes:
        raise UsageError(
            f"{nbytes} bytes to stage, but staging memory of {staging.numel()}",
            remedy="raise SGLANG_DISAGG_STAGING_POOL_SIZE_MB, or send fewer pages at once",
        )


def _own(name: str, why: str) -> Any:  # noqa: ANN401  (SGLang's function)
    if why not in _told:
        _told.add(why)
        log.warning("%s: SGLang's own function copies instead of pdstage's kernels: %s", name, why)
    return _OWN[name]


def install_staging(*, apply: bool = True) -> None:
    """Replaces both of SGLang's functions in this process, through its `HookRegistry`.

    Without `apply` it only registers them: a plugin's function leaves the rest to SGLang, which applies the hooks of
    all plugins together.
    """
    for function in (gather_all_layers_to_staging, scatter_staging_to_kv):
        HookRegistry.register(f"{theirs.__name__}.{function.__name__}", function, HookType.REPLACE)
    if apply:
        HookRegistry.apply_hooks()


def plugin() -> None:
    """The entry point of SGLang's plugin loader: installs both functions if PDSTAGE_SGLANG_STAGING is 1."""
    if environment.SGLANG_STAGING.read() == "1":
        install_staging(apply=False)

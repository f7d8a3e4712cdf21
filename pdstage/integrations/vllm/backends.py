"""vLLM's attention backends whose pages are not rows of tokens with each head's K and then its V.

A backend is identified by the module and name of its class, or of a base class. `get_name()` is not unique:
ROCM_AITER_FA also returns "FLASH_ATTN". Backends that are not listed here are described by their spec alone, and proved
like all others (`writers`). docs/attention-backends.md has every backend of vLLM 0.33.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, NamedTuple


class Pages(Enum):
    """How a backend lays out a page."""

    ROWS = auto()  # one row per token: each head's K, then its V; or a latent
    CPU = auto()  # all K of a head, then all its V, ordered for the CPU's instruction set
    SLOTS = auto()  # two "heads": one with all heads' K, one with all heads' V
    INDEX = auto()  # all keys of a page, then all their scales


class Unknown(NamedTuple):
    """Pages that pdstage cannot view, and their content."""

    what: str


_BACKENDS = "vllm.v1.attention.backends."
_SCALES_BEHIND = Unknown("all latents or compressed keys of a page, then all their scales")
_VECTORS = Unknown("K and V packed in vectors of 16 bytes")

KNOWN: dict[str, Pages | Unknown] = {
    _BACKENDS + "cpu_attn.CPUAttentionBackend": Pages.CPU,
    _BACKENDS + "b12x.B12xPagedAttentionBackend": Pages.SLOTS,
    _BACKENDS + "rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend": Pages.ROWS,
    _BACKENDS + "rocm_attn.RocmAttentionBackend": _VECTORS,
    _BACKENDS + "mla.indexer.KpoolTailBackend": Unknown("a ring of pooled keys"),
    _BACKENDS + "mla.indexer.Glm5NextIndexerBackend": _SCALES_BEHIND,
    _BACKENDS + "mla.indexer.DeepseekV4IndexerBackend": _SCALES_BEHIND,
    _BACKENDS + "mla.indexer.DeepseekV32IndexerBackend": Pages.INDEX,
    _BACKENDS + "mla.sparse_swa.DeepseekSparseSWABackend": _SCALES_BEHIND,
    "vllm.models.deepseek_v4.sparse_mla.DeepseekV4SparseMLABackend": _SCALES_BEHIND,
    "vllm.models.deepseek_v4.compressor.CompressorBackend": Unknown("states of a compressor"),
    "vllm.models.deepseek_v41.sparse_mla.DeepseekV4SparseMLABackend": _SCALES_BEHIND,
    "vllm.models.deepseek_v41.compressor.CompressorBackend": Unknown("states of a compressor"),
    "vllm.models.inkling.amd.sconv_swa_attn.InklingSconvBackend": Unknown("a window of convolution inputs"),
    "vllm.models.inkling.nvidia.sconv_swa_attn.InklingSconvBackend": Unknown("a window of convolution inputs"),
    "vllm.models.qwen4_exp.common.qsa_cache.QSAStateBackend": Unknown("a QSA state"),
    "vllm.models.step5.nvidia.sparse_attention.Step5SplitKVFlashAttentionBackend": Unknown("rings and summaries"),
    "vllm.models.step5.nvidia.sparse_summary_cache.Step5SparseSummaryBackend": Unknown("summaries"),
    "vllm.models.step5.nvidia.csa_tail_ring.Step5CSATailRingBackend": Unknown("a ring"),
    "vllm.model_executor.models.extract_hidden_states.CacheOnlyAttentionBackend": Unknown("hidden states by layer"),
}


class Backend(NamedTuple):
    """A layer's backend: vLLM's name for it, and its page layout."""

    name: str
    pages: Pages | Unknown

    @staticmethod
    def of(layer: Any) -> Backend:  # noqa: ANN401  (a layer of vLLM's `static_forward_context`, or None)
        """Rows, named "unknown", if there is no layer to ask."""
        ask = getattr(layer, "get_attn_backend", None)
        if ask is None:
            return Backend("unknown", Pages.ROWS)
        backend = ask()
        paths = (f"{one.__module__}.{one.__qualname__}" for one in backend.__mro__)
        return Backend(str(backend.get_name()), next((KNOWN[path] for path in paths if path in KNOWN), Pages.ROWS))

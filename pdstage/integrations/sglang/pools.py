"""SGLang's memory pools behind a KVArgs: facts about their classes, and the names of their layers.

KVArgs has addresses only. The plugin attaches the pools that SGLang took them from: only a pool's class gives the
layout of a page, and only the pool has a writer (`writers`). Classes are compared exactly, since a subclass may store
differently. docs/engines-sglang.md has every pool of SGLang 0.5.23.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import HiSparseMHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from pdstage import UsageError

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs


class Pools(NamedTuple):
    """The pools of the target model, of the draft model (or None), and of requests' rows, which may have states.

    `owner` has the target model's pages that are handed over: `kv`, or with HiSparse the pool in host memory.
    """

    kv: Any
    draft: Any
    requests: Any
    owner: Any

    @staticmethod
    def of(args: KVArgs) -> Pools:
        """Raises `UsageError` if the plugin's hooks did not see how SGLang made `args`."""
        given = getattr(args, "pdstage_pools", None)
        if given is None:
            raise UsageError(
                "SGLang did not say which pools it hands over",
                remedy="run the SGLang release that pdstage was tested with",
            )
        return Pools(*given)

    @property
    def on_host(self) -> bool:
        """Whether the pages that are handed over are in host memory, wherever the model runs."""
        return self.owner is not self.kv

    def states(self) -> Any:  # noqa: ANN401  (SGLang's MambaPool, or None)
        """The pool of recurrent states."""
        return getattr(self.kv, "mamba_pool", None) or getattr(self.requests, "mamba_pool", None)


def inner(pool: Any, *, window: bool = False) -> Any:  # noqa: ANN401
    """The pool that has the buffers: a composite pool keeps them in inner pools."""
    if isinstance(pool, SWAKVPool):
        return pool.swa_kv_pool if window else pool.full_kv_pool
    return pool.full_kv_pool if isinstance(pool, HybridLinearKVPool) else pool


def name_of(pool: Any) -> str:  # noqa: ANN401
    """The name of the class, and of the inner pool's class."""
    outside, inside = type(pool).__name__, type(inner(pool)).__name__
    return outside if outside == inside else f"{outside} over {inside}"


def layer_ids(pool: Any, n: int, *, window: bool = False) -> list[int]:  # noqa: ANN401
    """The model's numbers of the pool's `n` layers, in the order of its buffers; from 0 on if the pool does not say.

    The numbers name layers alike on both sides, whatever pipeline stage holds them.
    """
    if isinstance(pool, SWAKVPool):
        found = sorted(
            (index, layer) for layer, (index, is_window) in pool.layers_mapping.items() if is_window == window
        )
        return [layer for _, layer in found]
    if isinstance(pool, HybridLinearKVPool):
        return list(pool.full_attention_layer_id_mapping)
    start = getattr(pool, "start_layer", None) or 0
    return list(range(start, start + n))


LATENTS = (MLATokenToKVPool, DSATokenToKVPool)
"""Classes whose writers run wherever the pool is, and store the given values unchanged."""
HOSTS = (HiSparseMHATokenToKVPoolHost, MLATokenToKVPoolHost)
"""Classes of pools in host memory in which HiSparse keeps all pages of a decode rank."""

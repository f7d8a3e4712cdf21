"""vLLM's KV cache groups as pdstage's components: which blocks of a request, for which of its tokens.

The scheduler's side, which has no tensors, names blocks with it too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.utils import clip_ssm_state_blocks
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from pdstage import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock

NULL_BLOCK = 0
"""The block id by which vLLM's block pool replaces blocks that a group no longer has."""


class Held(NamedTuple):
    """A request's blocks of one group, from that of `first_token` on, and their tokens (start, stop). If ranks share
    the tokens, `first_token` counts this rank's own.

    A group without positions has one state, and no tokens. `partly` are the blocks that also hold other tokens than
    these, which nobody has written.
    """

    blocks: tuple[int, ...]
    first_token: int = 0
    tokens: tuple[int, int] | None = None
    partly: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group to transfer. `index` is its place among all of vLLM's groups. Under decode context parallelism
    each of `n_shards` ranks has a part of every block, and a block then stands for `n_shards` times its tokens.
    """

    index: int
    component: str
    spec: KVCacheSpec
    n_shards: int = 1
    row_tokens: int = 1
    """A row of compressed caches covers so many tokens, and is not whole before all of them are computed."""

    @property
    def is_state(self) -> bool:
        """Whether a request has one state here, instead of KV per token."""
        return isinstance(self.spec, MambaSpec)

    @property
    def is_whole(self) -> bool:
        """Whether it keeps all tokens of a request."""
        return isinstance(self.spec, FullAttentionSpec)

    def needed_from(self, n_tokens: int) -> int:
        """The first token that is still read after `n_tokens` were computed, by the rule of vLLM's managers for this
        group.
        """
        if isinstance(self.spec, SlidingWindowSpec):
            window: int = self.spec.sliding_window
            retained = getattr(self.spec, "num_retained_tokens", window - 1)  # vLLM 0.32 has no such name
            return max(0, n_tokens - retained)
        if isinstance(self.spec, ChunkedLocalAttentionSpec):
            chunk: int = self.spec.attention_chunk_size
            return n_tokens // chunk * chunk
        return 0

    def n_cached(self, blocks: Sequence[KVCacheBlock], n_local: int) -> int:
        """How many of the first `n_local` tokens this group has. Beside recurrent states vLLM counts those that full
        attention has, and a window may have fewer: its blocks are then new, and not hashed yet.
        """
        new = next((i for i, block in enumerate(blocks) if block.block_hash is None and not block.is_null), len(blocks))
        block_size: int = self.spec.block_size
        return min(new * block_size * self.n_shards, n_local)

    def held(self, blocks: Sequence[int], n_tokens: int, start: int = 0) -> Held:
        """The part of `blocks` (all from the first token on) that holds the tokens from `start` up to `n_tokens`.

        Of a window it is only the part that is read: a group's blocks before it are null.
        """
        if self.is_state:
            state = clip_ssm_state_blocks(list(blocks), self.spec.num_speculative_blocks)
            return Held(tuple(block for block in state if block != NULL_BLOCK))
        size = self.spec.block_size * self.n_shards
        last = min(len(blocks), -(-n_tokens // size))
        first = min(max(self.needed_from(n_tokens), start) // size, last)
        if NULL_BLOCK in blocks[first:last]:
            first = last - blocks[first:last][::-1].index(NULL_BLOCK)
        begin = max(first * size, self.needed_from(n_tokens), start)
        partly = tuple(
            blocks[at]
            for at in sorted({first, last - 1})
            if first <= at < last and start <= at * size and (at * size < begin or n_tokens < (at + 1) * size)
        )
        return Held(tuple(blocks[first:last]), first * self.spec.block_size, (min(begin, n_tokens), n_tokens), partly)


def groups_of(kv_cache_config: KVCacheConfig, n_shards: int = 1) -> tuple[Group, ...]:
    """The groups that vLLM wants transferred, with tokens distributed over `n_shards` ranks. Raises `UsageError` for
    unsupported kinds.
    """
    found = []
    kinds: list[str] = []
    for index in kv_cache_config.transfer_group_ids:
        spec = kv_cache_config.kv_cache_groups[index].kv_cache_spec
        specs = [spec]
        if isinstance(spec, UniformTypeKVCacheSpecs):  # of one type: block table and window are the group's
            specs = list(spec.kv_cache_specs.values())
            spec = specs[0]
        kind = _kind(spec)
        n = kinds.count(kind)
        kinds.append(kind)
        row_tokens = math.lcm(*(max(1, int(getattr(one, "tokens_per_state", 1))) for one in specs))
        name = f"{kind}.{n}" if n else kind
        found.append(Group(index, name, spec, n_shards if spec.dcp_sharded else 1, row_tokens))
    return tuple(found)


def recomputed_tokens(groups: Sequence[Group], n_lookahead: int) -> int:
    """How many prompt tokens prefill leaves to decode, besides the last one, which decode always computes.

    With a window or a state it is the last one, as the package's docstring says. A drafter that looks `n_lookahead`
    tokens ahead needs `n_lookahead` minus one more.
    """
    return max(0 if all(group.is_whole for group in groups) else 1, n_lookahead - 1)


def _kind(spec: KVCacheSpec) -> str:
    match spec:
        case MambaSpec():
            return "mamba"
        case SlidingWindowSpec():
            return "swa"
        case ChunkedLocalAttentionSpec():
            return "chunked"
        case CircularBufferSpec() | CrossAttentionSpec() | EncoderOnlyAttentionSpec():
            pass
        case AttentionSpec():
            return "kv"
    raise UsageError(
        f"a KV cache group of {type(spec).__name__} cannot be handed over",
        remedy="serve this model without a KV connector, or with one of vLLM's own",
        spec=type(spec).__name__,
    )

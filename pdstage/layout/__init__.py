"""Where an engine keeps a request's state, and which part of it a rank holds. Pure: it touches no memory.

    topology         a rank's place among its engine's, and its part of an axis of shards
    views            regions, views, components and layouts: one affine addressing for all that engines store
    states           the kinds of state besides the KV cache, by their names
    arrays           the parts that constructors make of tensors, and `build`, which makes a layout of parts
    kv_shapes        constructors for the shapes of KV caches; `pdstage.tensors` exports them
    state_shapes     the same for states: convolution, SSM
    addresses        parts for engines that give only addresses and item lengths

The names of `views` are here too.
"""

from pdstage.layout.views import (
    ALL_TOKENS,
    Component,
    Key,
    Layout,
    Region,
    RowLevel,
    TokenShard,
    View,
    check_inside,
    merged,
    mismatch,
    with_views,
)

__all__ = [
    "ALL_TOKENS",
    "Component",
    "Key",
    "Layout",
    "Region",
    "RowLevel",
    "TokenShard",
    "View",
    "check_inside",
    "merged",
    "mismatch",
    "with_views",
]

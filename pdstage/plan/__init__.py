"""Who sends which bytes to whom, how they are staged, and what kernels and transports are called with. Pure.

    ownership        which tokens two ranks both hold, under context parallelism
    staging          which shards each writer sends, and the order and sizes of staged bytes
    token_slices     how pages are cut for a peer that holds other tokens
    convert          what is staged where one side stores bf16 and the other fp8
    tables           selected views as rows of integers, as the kernels take them
    spans            the direct path: from which address to which, in few descriptors
    cost             which path a chunk takes, and in how many pieces

The names of `staging` that others need are here too.
"""

from pdstage.plan.staging import (
    HEAD_MAJOR,
    TOKEN_MAJOR,
    VIEW_ALIGNMENT,
    Rect,
    Rects,
    Select,
    Share,
    Shares,
    Staging,
    Stagings,
    Tokens,
    layers_of,
    rows_of,
    selects,
    shares,
    tokens_of,
    wire_order,
)

__all__ = [
    "HEAD_MAJOR",
    "TOKEN_MAJOR",
    "VIEW_ALIGNMENT",
    "Rect",
    "Rects",
    "Select",
    "Share",
    "Shares",
    "Staging",
    "Stagings",
    "Tokens",
    "layers_of",
    "rows_of",
    "selects",
    "shares",
    "tokens_of",
    "wire_order",
]

"""What a decode engine keeps of a conversation for its next turn, which prefill loads instead of computing it again.

The next prompt contains the last answer as text, and its tokens may differ: a chat template drops the reasoning, a
tokenizer joins pieces. So decode's answer identifies its tokens by digests, and prefill loads those that are the same.
Whether decode has them still, it is asked when the next turn arrives (`loads`): no clock of another host is believed.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm.v1.request import Request

_EVERY = 256
"""Tokens between two digests."""
_DIGEST_NBYTES = 8


def kept_tokens(request: Request, n_tokens: int) -> dict[str, Any]:
    """For `kv_transfer_params`: digests of the first `n_tokens`."""
    return {"remote_token_digests": "".join(digest for _, digest in _digests(request, n_tokens))}


def n_common(request: Request, params: Mapping[str, Any]) -> int:
    """How many first tokens of this request are those in `params`."""
    there, n_there = params.get("remote_token_digests"), params.get("remote_num_tokens")
    if not isinstance(there, str) or not isinstance(n_there, int):
        return 0
    at, width = 0, 2 * _DIGEST_NBYTES
    for number, (stop, digest) in enumerate(_digests(request, n_there)):
        if stop > request.num_prompt_tokens or there[width * number : width * (number + 1)] != digest:
            break
        at = stop
    return at


def _digests(request: Request, n_tokens: int) -> Iterator[tuple[int, str]]:
    """Digests after every 256 tokens and at the end: of all tokens so far, and of the images and other inputs that
    begin in them. Nothing for a prompt without tokens (embeddings).
    """
    tokens = np.asarray(request.all_token_ids, np.int64)
    if request.prompt_token_ids is None or n_tokens < 1:
        return
    hashed = hashlib.blake2b(str(request.cache_salt or "").encode(), digest_size=_DIGEST_NBYTES)
    others = sorted((one.mm_position.offset, one.identifier) for one in request.mm_features)
    start = 0
    for stop in (*range(_EVERY, n_tokens, _EVERY), n_tokens):
        if stop > len(tokens):
            return
        hashed.update(tokens[start:stop].tobytes())
        for offset, identifier in others:
            if start <= offset < stop:
                hashed.update(f"{offset}:{identifier}\0".encode())
        start = stop
        yield stop, hashed.hexdigest()

"""What the two engines do besides moving KV: chunked prefill, and batched greedy decoding from the pool.

Layer 6 (demo). Must not know processes or transfers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdstage.demo.model import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pdstage.demo.group import Group
    from pdstage.demo.model import ShardedLlama
    from pdstage.demo.paged import PagedKV


@dataclass(frozen=True, slots=True)
class Engine:
    """One rank: its model, its pool, and the ranks it computes with."""

    model: ShardedLlama
    kv: PagedKV
    group: Group

    def prefill(
        self, prompt: Sequence[int], pages: NDArray[np.int32], chunk_tokens: int
    ) -> Iterator[tuple[int, int, int]]:
        """Computes `prompt` chunk by chunk: `(start, stop, next token)` once tokens `[start, stop)` are in the pool."""
        for start in range(0, len(prompt), chunk_tokens):
            part = prompt[start : start + chunk_tokens]
            logits = self.model.forward(part, [Segment(pages, start, len(part))], self.kv)
            (token,) = self.group.agree(logits.argmax(-1).tolist())
            yield start, start + len(part), token

    def decode(
        self,
        contexts: Sequence[tuple[NDArray[np.int32], int, int]],
        n_tokens: int,
        stepped: Callable[[], None] = lambda: None,
    ) -> list[list[int]]:
        """Continues all rooms together by `n_tokens`. A context is `(pages, tokens already in them, first token)`.

        Returns each room's tokens, the first one included.
        """
        rooms = [[first] for _, _, first in contexts]
        for step in range(n_tokens):
            segments = [Segment(pages, held + step, 1) for pages, held, _ in contexts]
            logits = self.model.forward([tokens[-1] for tokens in rooms], segments, self.kv)
            for tokens, token in zip(rooms, self.group.agree(logits.argmax(-1).tolist()), strict=True):
                tokens.append(token)
            stepped()
        return rooms

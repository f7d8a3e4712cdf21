"""The items that a room names of each component, and one builder of item lists for each kind of state.

    receiver.bind({
        "kv": prefix_items(token_slots, page_size=64),
        "swa": window_items(token_slots, page_size=64, window=4096, mapping=full_to_swa),
        "mamba": slot_items(mamba_slot),
    }, tokens={"kv": (0, n_tokens), "swa": (max(0, n_tokens - 4096), n_tokens)})

Pages do not say where a sequence ends or a window starts, so `tokens` does. Without it a room covers whole pages, and
fails if prefill has fewer tokens.

`token_slots` is the request's row of an engine's token table: entry p is the slot, in the pool, of the token at
position p. Engines that keep lists of pages pass them unchanged: `Items(pages, first_token)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pdstage.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """Pages or slots of one component: item i covers tokens `[first_token + i*T, first_token + (i+1)*T)`.

    In components with positions, `first_token` is a multiple of T: both sides then cut a sequence at the same places,
    which the head-major staged order requires.

    Under context parallelism, a rank with interleaved tokens (`TokenShard`) counts only its own: item i covers its own
    tokens from number `first_token + i*T` on. Token ranges, as in `Sender.chunk` and `Receiver.bind`, are positions in
    the sequence on every rank.

    `pages` is a one-dimensional sequence of integers; it is copied, never modified.
    """

    pages: npt.ArrayLike
    first_token: int = 0


def slot_items(*slots: int) -> Items:
    """States that a request has once: its mamba slot, or its row of a request-indexed pool. Without slots the list is
    empty: nothing to transfer.
    """
    return Items(np.array(slots, np.int64))


def prefix_items(token_slots: npt.ArrayLike, *, page_size: int, held: int = 0) -> Items:
    """Pages of the whole prefix, for caches and index keys (NSA).

    If the destination has tokens `[0, held)` already, only the pages from that of token `held` on.
    """
    slots, first = _one_a_page(_row(token_slots), held, page_size)
    return Items(slots // page_size, first)


def window_items(
    token_slots: npt.ArrayLike,
    *,
    page_size: int,
    window: int,
    held: int = 0,
    mapping: Any = None,  # noqa: ANN401  (anything that can be indexed: an array, or a tensor)
) -> Items:
    """Pages of the last `window` tokens, from the page in which the window starts.

    `mapping`, indexed by slots of the full pool, gives the slots of the sliding-window pool, if that is separate. The
    destination has the tokens below `held` already.
    """
    if window < 1:
        raise UsageError(f"window is {window}", remedy="give the tokens of a window", window=window)
    row = _row(token_slots)
    slots, first = _one_a_page(row, max(held, len(row) - window, 0), page_size)
    translated = slots if mapping is None else np.asarray(mapping[slots])
    return Items(translated // page_size, first)


def _row(token_slots: npt.ArrayLike) -> npt.NDArray[np.integer[Any]]:
    row = np.asarray(token_slots)
    if row.ndim != 1:
        raise UsageError(f"token slots of shape {row.shape}", remedy="give one slot for each token of the request")
    return row


def _one_a_page(
    row: npt.NDArray[np.integer[Any]], start: int, page_size: int
) -> tuple[npt.NDArray[np.integer[Any]], int]:
    """The slot of one token of each page, from the page of token `start` on, and the first page's first token.

    For the first page it is the slot of `start` itself: earlier tokens may be gone, and their entries invalid.
    """
    if page_size < 1:
        raise UsageError(f"page_size is {page_size}", remedy="give the tokens of a page", page_size=page_size)
    if start < 0:
        raise UsageError(f"held is {start}", remedy="give the tokens that are here already, 0 or more", held=start)
    first = min(start, len(row)) // page_size * page_size
    positions = np.arange(first, len(row), page_size)
    positions[:1] = min(start, len(row) - 1)
    return row[positions], first

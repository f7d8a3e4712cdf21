"""Rooms end to end between two processes on one GPU: gathered, written and scattered, by each available transport.

Prefill holds tokens before heads in pages of 16, decode heads before tokens in pages of 32. The bytes of the first room
are compared. On the CPU it runs with small sizes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .bed import Spread
from .harness import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .bed import Bed

TRANSPORTS = ("local", "nixl")
ROOM_NBYTES = 64 << 20


def rows(bed: Bed, quick: bool) -> Iterator[Row]:
    """By transport: GB/s of one room, and of several at once, beside a copy; and the time of one page."""
    if bed.lacks("rooms", ("msgspec", "zmq")):
        return
    missing, failed = bed.transports_missing(), []
    for transport in TRANSPORTS:
        if missing[transport]:
            bed.left_out.append(f"rooms, {transport}: {missing[transport]}")
            continue
        try:
            yield from _of(bed, transport, 3 if quick else 9)
        except (RuntimeError, TimeoutError) as error:  # go on with the other transport's numbers
            failed.append(f"rooms, {transport}: {error}")
    if failed:
        raise RuntimeError("; ".join(failed))


def _of(bed: Bed, transport: str, repeats: int) -> Iterator[Row]:
    from pdstage.control.bootstrap import BootstrapServer  # noqa: PLC0415

    from .gpu_room_ranks import AT_ONCE, DECODE_PAGE, TOKEN_NBYTES, Decode, Prefill  # noqa: PLC0415  (what nodes need)
    from .ranks import Rank  # noqa: PLC0415

    tokens = bed.sized(ROOM_NBYTES) // TOKEN_NBYTES
    page_tokens = min(DECODE_PAGE, tokens)
    with BootstrapServer() as server:
        options = {"transport": transport, "staging_nbytes": 4 * tokens * TOKEN_NBYTES, "path": "staged"}
        made = (server.address, bed.device, tokens, options)
        prefill, decode = Rank(Prefill, *made), Rank(Decode, *made)
        try:
            prefill.ready(), decode.ready()
            if not _run(prefill, decode, ("first",), tokens)[1]:
                raise RuntimeError("a room arrived with other bytes than were sent")
            for n, n_tokens, what in ((1, tokens, "a room"), (AT_ONCE, tokens, f"{AT_ONCE} rooms at once")):
                took = [_run(prefill, decode, range(n), n_tokens)[0] for _ in range(repeats + 1)][1:]
                yield _rate_row(bed, transport, what, n * n_tokens * TOKEN_NBYTES, Spread.of(took))
            took = [_run(prefill, decode, range(1), page_tokens)[0] for _ in range(4 * repeats + 1)][1:]
            yield _latency_row(bed, transport, page_tokens * TOKEN_NBYTES, Spread.of(took))
        finally:
            decode.close()
            prefill.close()


def _run(prefill: Any, decode: Any, names: Any, tokens: int) -> tuple[float, bool]:  # noqa: ANN401
    """Seconds from requesting all rooms to the last one's Success, and whether the first arrived unchanged."""
    names = [f"{name} {time.monotonic_ns()}" for name in names]
    prefill.begin("give", names, tokens)
    found: tuple[float, bool] = decode.call("take", names, tokens)
    prefill.result()
    return found


def _rate_row(bed: Bed, transport: str, what: str, nbytes: int, took: Spread) -> Row:
    copied = _copied(bed, nbytes)
    return Row(
        name=f"rooms, {transport}: {what} of {nbytes / 2**20:.0f} MiB in all",
        value=nbytes / took.median / 1e9,
        baseline=nbytes / copied.median / 1e9,
        unit="GB/s",
        detail="from the ask to Success, between two processes on one GPU; baseline: one copy of as many bytes",
        point={"table": "rooms", "transport": transport, "what": what, "nbytes": nbytes},
        quartiles=took.rates(nbytes),
        baseline_quartiles=copied.rates(nbytes),
    )


def _latency_row(bed: Bed, transport: str, nbytes: int, took: Spread) -> Row:
    copied = _copied(bed, nbytes)
    return Row(
        name=f"rooms, {transport}: a room of one page",
        value=took.median * 1e6,
        baseline=copied.median * 1e6,
        unit="us",
        better="lower",
        detail=f"{nbytes / 2**20:.1f} MiB, from the ask to Success; p99 {took.p99 * 1e6:.0f} us; baseline: one copy",
        point={"table": "rooms", "transport": transport, "what": "one page", "nbytes": nbytes},
        quartiles=(took.quartiles[0] * 1e6, took.quartiles[1] * 1e6),
    )


def _copied(bed: Bed, nbytes: int) -> Spread:
    source, target = bed.memory(nbytes), bed.memory(nbytes)
    return bed.spreads({"copy": lambda: target.copy_(source)}, 5)["copy"]

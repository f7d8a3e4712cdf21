"""How much of a transfer is left when prefill has ended: `python -m tests.e2e.vllm.exposed`, in the engine's Python.

Real servers on this host, one prompt at a time, the ways in turn:

    early     both engines are asked at once (`transfer_id`): chunks and layers go while prefill computes
    serial    prefill first, then decode with its answer: all goes when prefill has ended
    nixl      the same with vLLM's NixlConnector, where it is asked for

Measured by the client: from prefill's answer to decode's first token. `there` is decode's time to a first token of a
prompt that it has already, which is no transfer. What is exposed is the one less the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp

from tests.e2e import load
from tests.e2e.fleet import SAVING, Fleet
from tests.e2e.servers import free_port
from tests.e2e.vllm.engines import TO_PREFILL, Engine, named

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.e2e.servers import Server

LENGTHS = (256, 4096, 8192)
CHUNK = 1024
CACHE_SPARE = 512
SHORT = 16


class Sides(NamedTuple):
    """The servers of one connector; `port` of prefill's directory."""

    prefill: Server
    decode: Server
    port: int


async def first_token(session: aiohttp.ClientSession, url: str, told: dict[str, Any]) -> float:
    """When the first token came."""
    async with session.post(url + "/v1/completions", json=told | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                at = time.monotonic()
                async for _ in response.content:
                    pass
                return at
    raise AssertionError("no token came")


async def answer(session: aiohttp.ClientSession, url: str, told: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    async with session.post(url + "/v1/completions", json=told) as response:
        assert response.status == 200, await response.text()
        body = await response.json()
        return time.monotonic(), body


async def early(session: aiohttp.ClientSession, sides: Sides, prompt: load.Prompt, name: str) -> float:
    to_prefill, to_decode = named(sides.port, name)
    legs = (
        answer(session, sides.prefill.url, load.body(prompt, n_tokens=1, kv_transfer_params=to_prefill)),
        first_token(session, sides.decode.url, load.body(prompt, n_tokens=2, kv_transfer_params=to_decode)),
    )
    (prefilled_at, _), first_at = await asyncio.gather(*legs)
    return first_at - prefilled_at


async def serial(session: aiohttp.ClientSession, sides: Sides, prompt: load.Prompt, name: str) -> float:
    del name
    told = load.body(prompt, n_tokens=1, kv_transfer_params=TO_PREFILL)
    prefilled_at, body = await answer(session, sides.prefill.url, told)
    told = load.body(prompt, n_tokens=2, kv_transfer_params=body["kv_transfer_params"])
    return await first_token(session, sides.decode.url, told) - prefilled_at


async def there(session: aiohttp.ClientSession, sides: Sides, prompt: load.Prompt) -> float:
    """The same prompt once more, of which decode has all blocks."""
    began = time.monotonic()
    return await first_token(session, sides.decode.url, load.body(prompt, n_tokens=2)) - began


async def settled(session: aiohttp.ClientSession, sides: Sides, prompt: load.Prompt) -> None:
    """Servers that stood still catch up before they are measured: with timers, and with what their sockets hold."""
    for url in (sides.prefill.url, sides.decode.url):
        await answer(session, url, load.body(prompt, n_tokens=2))


@contextlib.contextmanager
def paused(others: Iterable[Sides]) -> Iterator[None]:
    """Servers that idle look for work all the time: those of other connectors stand still."""
    with contextlib.ExitStack() as stack:
        for one in {one.port: one for one in others}.values():
            stack.enter_context(one.prefill.paused())
            stack.enter_context(one.decode.paused())
        yield


async def measure(ways: dict[str, tuple[Any, Sides]], length: int, n: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in (*ways, "there")}
    limit = aiohttp.ClientTimeout(total=600)
    afresh = aiohttp.TCPConnector(force_close=True)  # a server that stood still ends those that idled meanwhile
    async with aiohttp.ClientSession(timeout=limit, connector=afresh) as session:
        for number in range(n + 1):  # the first of each greets
            for place, (name, (way, sides)) in enumerate(ways.items()):
                seed = (length * 1000 + number) * len(ways) + place
                (prompt,) = load.prompts(1, seed, shortest=length, longest=length)
                (short,) = load.prompts(1, seed, shortest=SHORT, longest=SHORT)
                with paused(other for _, other in ways.values() if other is not sides):
                    await settled(session, sides, short)
                    seconds = await way(session, sides, prompt, f"{name}-{length}-{number}")
                    known = await there(session, sides, prompt) if name == "early" else None
                if number:
                    found[name].append(seconds)
                    found["there"] += [known] if known is not None else []
    return found


def report(length: int, found: dict[str, list[float]]) -> None:
    base = statistics.median(found["there"])
    for name, seconds in found.items():
        quartiles = statistics.quantiles(seconds, n=4)
        exposed = f"{1e3 * (quartiles[1] - base):8.1f}" if name != "there" else " " * 8
        print(f"{length:>7} {name:<8} {1e3 * quartiles[1]:9.1f} {1e3 * quartiles[0]:9.1f} {1e3 * quartiles[2]:9.1f}"
              f" {exposed}  {len(seconds)}", flush=True)  # fmt: skip
    left = {name: statistics.median(seconds) - base for name, seconds in found.items() if name != "there"}
    for name in left.keys() - {"early"}:
        print(f"{length:>7} exposed, early / {name}: {left['early'] / left[name]:.2f}", flush=True)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    told = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    told.add_argument(
        "--lengths", type=int, nargs="+", default=LENGTHS, help=f"tokens of a prompt (default: {LENGTHS})"
    )
    told.add_argument("-n", type=int, default=20, help="prompts of each length and way (default: 20)")
    told.add_argument("--prefill-tp", type=int, default=1)
    told.add_argument("--block", type=int, default=128)
    told.add_argument("--transport", default="nixl")
    told.add_argument("--nixl", action="store_true", help="beside vLLM's NixlConnector")
    told.add_argument("--logs", type=Path)
    return told.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    given = arguments(argv)
    longest, port = max(given.lengths) + CACHE_SPARE, free_port()
    common: dict[str, Any] = {
        "model": "llama-long", "block": given.block, "transport": given.transport, "longest": longest, "batched": CHUNK,
    }  # fmt: skip
    ours = (
        Engine(role="kv_producer", tp=given.prefill_tp, directory=port, **common),
        Engine(role="kv_consumer", **common),
    )
    theirs = tuple(replace(one, connector="NixlConnector", directory=0) for one in ours) if given.nixl else ()
    with tempfile.TemporaryDirectory(prefix="pdstage-exposed-") as folder:
        logs = (given.logs or Path(folder)).resolve()
        logs.mkdir(parents=True, exist_ok=True)
        fleet = Fleet(logs, SAVING)
        try:
            up = fleet.up(*ours, *theirs)
            with_pdstage = Sides(up[0], up[1], port)
            ways: dict[str, tuple[Any, Sides]] = {way.__name__: (way, with_pdstage) for way in (early, serial)}
            if theirs:
                ways["nixl"] = serial, Sides(up[2], up[3], 0)
            print(f"# TP {given.prefill_tp} -> 1, {given.transport}, chunks of {CHUNK} tokens; milliseconds")
            print(f"{'tokens':>7} {'way':<8} {'median':>9} {'q1':>9} {'q3':>9} {'exposed':>8}  n")
            for length in given.lengths:
                report(length, asyncio.run(measure(ways, length, given.n)))
        finally:
            fleet.stop()


if __name__ == "__main__":
    main(sys.argv[1:])

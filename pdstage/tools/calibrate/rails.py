"""`pdstage calibrate --rails`: what NIXL writes to the peer over each NIC alone, and over several at once.

A rail is one network device among those that UCX spreads a write over. Rooms go direct, in runs of 256 KiB, so that no
copy is timed with them. Each way has nodes of its own, and all ways are measured in turn, several times over.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import msgspec

from pdstage.errors import UsageError
from pdstage.tools.calibrate import pool as pools
from pdstage.tools.calibrate.caller import AT_ONCE
from pdstage.transport import _rails

if TYPE_CHECKING:
    from pdstage.tools.calibrate.caller import Caller

_RUN = pools.RUNS[-1]
_ROOM_NBYTES = 16 << 20
_REPEATS, _QUICK_REPEATS = 5, 2


class Way(msgspec.Struct, frozen=True):
    """`devices` that UCX may use, and over how many of them it may spread a write."""

    devices: list[str]
    rails: int


class Measured(msgspec.Struct, frozen=True):
    """Bytes a second over a way: the median of its repeats, and the least and the most of them."""

    way: Way
    bytes_per_s: float
    least: float
    most: float


def devices_of(named: str, memory: str) -> list[str]:
    """Network devices by a list with commas; "auto": the ports nearest to the memory, on "cpu" or "cuda:N".

    Raises `UsageError` as `devices="auto"` does.
    """
    return _rails.auto(memory) if named == "auto" else [name for name in named.split(",") if name]


def ways(devices: list[str]) -> list[Way]:
    """Each device alone, then all of them with 2 rails, 4, 8, ... and as many as there are devices."""
    several = [1 << power for power in range(1, 16) if 1 << power < len(devices)]
    return [*(Way([device], 1) for device in devices), *(Way(devices, rails) for rails in [*several, len(devices)])]


def measure(caller: Caller, devices: list[str], *, quick: bool = False) -> list[Measured]:
    """Measures all `ways` of at least two devices. Raises what the nodes of either side raise."""
    if len(devices) < 2:
        raise UsageError(f"rails of {len(devices)} devices", remedy="name two or more", field="rails")
    tokens = pools.tokens(_RUN, _ROOM_NBYTES)
    nbytes = tokens * pools.N_VIEWS * _RUN * AT_ONCE
    tried, found = ways(devices), dict[int, list[float]]()
    for _ in range(_QUICK_REPEATS if quick else _REPEATS):
        for number, way in enumerate(tried):
            with caller.started("nixl", {"devices": way.devices, "rails": way.rails}) as node:
                caller.room(node, "direct", _RUN, tokens)  # connects the two
                took = caller.room(node, "direct", _RUN, tokens, at_once=AT_ONCE)
            found.setdefault(number, []).append(nbytes / took.seconds[0])
    return [
        Measured(way, statistics.median(rates), min(rates), max(rates))
        for way, rates in zip(tried, found.values(), strict=True)
    ]


def table(measured: list[Measured]) -> str:
    """A line per way, with its ratio to the fastest device alone."""
    alone = max(one.bytes_per_s for one in measured if len(one.way.devices) == 1)
    rows = [["devices", "rails", "GB/s", "least to most", "beside one"]]
    for one in measured:
        between = f"{one.least * 1e-9:.3g} to {one.most * 1e-9:.3g}"
        speed, ratio = f"{one.bytes_per_s * 1e-9:.3g}", f"{one.bytes_per_s / alone:.2f}"
        rows.append([",".join(one.way.devices), str(one.way.rails), speed, between, ratio])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows)


def to_json(measured: list[Measured]) -> str:
    return msgspec.json.format(msgspec.json.encode(measured), indent=2).decode()

"""What a node and its process hold, by name: descriptors, sockets, threads, memory, and the length of every table."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tests import descriptors
from tests.processes import n_tasks, resident_nbytes

if TYPE_CHECKING:
    from pdstage import DecodeNode, PrefillNode

CAPPED = {
    "HandshakeServer.lost": 4096,  # lost sessions that no late Hello may begin again
    "PrefillRooms.ended": 4096,
    "Roster._ended": 65_536,  # for `completions`
    "LogLimit._windows": 1024,
    "Inflow._open": 4096,  # by descriptor: libzmq does not say which it closed itself, and numbers are used again
}
"""Tables that remember the last so many of what is over, by design."""


def n_tcp() -> int:
    """TCP sockets of this process, whatever their state: each that connects has a local port."""
    own = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since, by a thread of libzmq
            own.add(str(link.readlink()))
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(f"socket:[{fields[9]}]" in own for fields in lines)


def tables(node: DecodeNode | PrefillNode) -> dict[str, int]:
    """The length of everything that has one, by class and field, in the node and all that it is made of."""
    lengths: Counter[str] = Counter()
    found, met = [node], {id(node)}
    for part in found:  # which grows meanwhile
        for field, value in _fields(part):
            if hasattr(value, "__len__") and not isinstance(value, str | bytes | memoryview | tuple):
                lengths[f"{type(part).__name__}.{field}"] += len(value)
            mine = type(value).__module__.startswith("pdstage") and not isinstance(value, tuple)
            if mine and id(value) not in met:
                met.add(id(value))
                found.append(value)
    return dict(lengths)


def _fields(part: object) -> list[tuple[str, object]]:
    slots = [name for kind in type(part).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(part, "__dict__", {}).items(), *((n, getattr(part, n)) for n in slots if hasattr(part, n))]


class Gauge:
    """Everything at one moment of rest."""

    def __init__(self, node: DecodeNode | PrefillNode) -> None:
        self.tables = tables(node)
        self.counts = {"descriptors": descriptors.count(), "TCP sockets": n_tcp(), "threads": n_tasks()}
        self.resident_nbytes = resident_nbytes()

    def grown(self, before: Gauge) -> dict[str, tuple[int, int]]:
        """What is more than it was, and more than its cap: (before, now)."""
        counts = {name: (before.counts[name], now) for name, now in self.counts.items() if now > before.counts[name]}
        grown = {
            name: (before.tables.get(name, 0), now)
            for name, now in self.tables.items()
            if now > max(before.tables.get(name, 0), CAPPED.get(name, 0))
        }
        return counts | grown

    def __str__(self) -> str:
        counts = ", ".join(f"{n} {name}" for name, n in self.counts.items())
        return f"{counts}, {sum(self.tables.values())} table entries, {self.resident_nbytes >> 10} KiB resident"

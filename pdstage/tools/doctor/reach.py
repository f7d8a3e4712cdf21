"""What a NIXL peer can reach: the addresses on which UCX listens, and whether writes are limited to registered memory.

Both are tried. The kernel says where UCX listens. For the second, a description is forged so that it offers memory that
was never registered, and a write goes there.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pdstage.errors import DeadlineExceeded, TransportError
from pdstage.layout import Region
from pdstage.tools.doctor.pair import WAIT_S, Way, environment
from pdstage.transport import Done, PostFailed, Spans, load, open_transport
from pdstage.transport.base import read_description, write_description

if TYPE_CHECKING:
    from pdstage.tools.doctor.probes import Say

_NBYTES = 1 << 16
_LISTEN = "0A"


def reach(say: Say, *, host: str, ways: list[dict[str, Any]]) -> None:
    """Reports the addresses on which UCX "listens" in a node at `host`, and as "way NAME" of each way whether memory
    that was not registered could be written.
    """
    say.step("listen")
    with contextlib.closing(open_transport("nixl", host=host)):
        say.found(listens=listens())
    for way in [msgspec.convert(way, Way) for way in ways]:
        say.step(f"forge, {way.name}")
        with environment(way.environment):
            say.found(**{f"way {way.name}": _lands_beside()})
    say.step("exit")


def _lands_beside() -> bool:
    """Whether a write by a forged description reaches memory that its owner did not register."""
    memory, beside, wanted = (np.full(_NBYTES, value, np.uint8) for value in (1, 2, 3))
    with contextlib.closing(open_transport("nixl")) as owner, contextlib.closing(open_transport("nixl")) as forger:
        owner.register([Region(memory.ctypes.data, _NBYTES)])
        forger.register([Region(wanted.ctypes.data, _NBYTES)])
        forger.connect("owner", _forged(owner.describe(), memory.ctypes.data, beside.ctypes.data))
        forger.prepare("owner", [Region(beside.ctypes.data, _NBYTES)])
        spans = Spans(*(np.array([value], np.int64) for value in (wanted.ctypes.data, beside.ctypes.data, _NBYTES)))
        ticket = forger.post("owner", spans, b"")
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            owner.poll()
            ended = [
                event for event in forger.poll() if isinstance(event, Done | PostFailed) and event.ticket == ticket
            ]
            if ended:
                return bool((beside == wanted).any())
    raise DeadlineExceeded(f"a write did not end in {WAIT_S:g} s", remedy="see what UCX logs")


def _forged(description: bytes, registered: int, address: int) -> bytes:
    """The same description, with the registered memory moved to another address."""
    kind: Any = load("nixl")
    honest = read_description("owner", description, kind.description_type, kind.traits)
    metadata = honest.metadata.replace(registered.to_bytes(8, "little"), address.to_bytes(8, "little"))
    if metadata == honest.metadata:
        raise TransportError("NIXL tells of memory otherwise than by its address", remedy="report it")
    return write_description(msgspec.structs.replace(honest, metadata=metadata))


def listens() -> list[str]:
    """The addresses on which this process listens for TCP, from the kernel (proc_net(5))."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(fd))  # noqa: PTH115  (no path: "socket:[inode]")
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net", table)
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in inodes:
                address = fields[1].partition(":")[0]
                words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
                found.add(str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))))
    return sorted(found)

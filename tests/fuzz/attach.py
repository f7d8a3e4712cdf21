"""Target: descriptions as a peer that lies would give them, attached by real transports in a process of their own.

Each outcome is an attached peer or the one typed error. Any other exception, a call that does not return, and an end of
the process are findings: what a description names is read by the transports' libraries, which are not ours.

One thing is left out: what UCX alone reads of NIXL's metadata, its workers' addresses above all. It trusts them, and
some end the process: docs/security.md has how many.
"""

from __future__ import annotations

import atexit
import traceback
import zlib
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from pdstage.errors import PdstageError
from pdstage.layout import Region
from pdstage.transport import open_transport
from tests.fuzz.draw import Draw, altered_bytes, altered_msgpack
from tests.processes import child
from tests.rows import usable

_NAMES = ("local", "mooncake", "nixl", "auto")
_NBYTES = 4096
_LONGEST_S = 240.0


def _attach(pipe: Connection, name: str) -> None:
    """Attaches each description that comes, as a node does with its session's, and lets go of it."""
    memory = np.zeros(_NBYTES, np.uint8)
    with open_transport(name) as transport:
        transport.register([Region(memory.ctypes.data, _NBYTES)])
        pipe.send((transport.describe(), memory.ctypes.data))
        while (given := pipe.recv()) is not None:
            description, region = given
            said = ""
            for steps in (("connect", "prepare"), ("identify",)):
                try:
                    for step in steps:
                        getattr(transport, step)("peer", region if step == "prepare" else description)
                except PdstageError as error:
                    assert len(str(error)) < 1 << 20
                except Exception:  # noqa: BLE001  (whatever it is, it is a finding)
                    said += traceback.format_exc()
                try:
                    transport.poll()
                    transport.proved_dead("peer")
                    transport.disconnect("peer")
                    transport.forget("peer")
                except Exception:  # noqa: BLE001  (whatever it is, it is a finding)
                    said += traceback.format_exc()
            pipe.send(said)


class _Process:
    """One that attaches, over `name`: made anew if an input ended it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process, self._pipe = child(_attach, name)
        self.description, base = self._hear()
        self.regions = [Region(base, _NBYTES)]

    def _hear(self) -> object:
        assert self._pipe.poll(_LONGEST_S), f"{self.name}: a description hangs who attaches it"
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            raise AssertionError(f"{self.name}: a description ended the process: {self._process.exitcode}") from None

    def attach(self, description: bytes, regions: list[Region]) -> None:
        self._pipe.send((description, regions))
        said = self._hear()
        assert not said, f"{self.name}: {said}"

    def close(self) -> None:
        self._process.kill()
        self._process.join()


@cache
def _pair(name: str) -> list[_Process]:
    """Who attaches, and an honest one whose descriptions are altered."""
    pair = [_Process(name), _Process(name)]
    atexit.register(lambda: [each.close() for each in pair])
    return pair


@cache
def _usable() -> list[str]:
    return [*usable(*_NAMES), "auto"]


def seeds() -> list[bytes]:
    return [bytes([number]) + bytes(16) for number in range(len(_NAMES))]


def run(data: bytes) -> None:
    """`data`: which transport, then choices that alter a true description of it."""
    name = _NAMES[data[0] % len(_NAMES)] if data else _NAMES[0]
    if name not in _usable():
        return
    pair = _pair(name)
    victim, honest = pair
    given = altered(honest.description, Draw(data[1:]))
    if _alters_ucx(given, honest.description):
        return
    try:
        victim.attach(given, honest.regions)
    except AssertionError:
        victim.close()
        pair[0] = _Process(name)
        raise


def altered(description: bytes, draw: Draw) -> bytes:
    """Another description: damaged, or whole and with something in it that is not so."""
    if draw.chance(32):
        return altered_bytes(description, draw)
    body = msgspec.msgpack.decode(description[4:])
    if body[0] == "pdstage.auto.1" and draw.chance(200):
        offers = body[1]
        name = sorted(offers)[draw.below(len(offers))]
        return _whole(msgspec.msgpack.encode([body[0], {**offers, name: altered(offers[name], draw)}]))
    if body[0] == "pdstage.nixl.1" and draw.chance(128):
        body[2] = altered_bytes(body[2], draw)
        return _whole(msgspec.msgpack.encode(body))
    return _whole(altered_msgpack(description[4:], draw))


def _alters_ucx(given: bytes, honest: bytes) -> bool:
    """Whether UCX's bytes are all that is wrong with NIXL's metadata in it."""
    mine, true = _nixl(given), _nixl(honest)
    if mine is None or true is None:
        return False
    try:
        import_module("pdstage.transport._nixl_agent").check_metadata(mine[1], mine[0])
    except (ValueError, TypeError, AttributeError):
        return False
    return mine[1] != true[1]


def _nixl(description: bytes) -> tuple[str, bytes] | None:
    """The agent and metadata in a description of `nixl` or `auto`; None if none can be read."""
    try:
        kind, *rest = msgspec.msgpack.decode(description[4:])
        if kind == "pdstage.auto.1":
            return _nixl(rest[0]["nixl"])
        return (rest[0], rest[1]) if kind == "pdstage.nixl.1" else None
    except (msgspec.MsgspecError, ValueError, TypeError, LookupError, RecursionError):
        return None


def _whole(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(4, "little") + body

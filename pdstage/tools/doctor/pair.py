"""Moves bytes between two processes by one transport and each of its ways: registers, writes and compares.

The process forks before it loads any library: one end holds memory, the other writes to it. A failure of one way is a
finding; the parent sees a crash of the process.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from contextlib import contextmanager
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pdstage import shared
from pdstage.errors import DeadlineExceeded, PdstageError, TransportError, UsageError
from pdstage.layout import Region
from pdstage.transport import Done, Inbound, PostFailed, Spans, load, open_transport

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from pdstage.tools.doctor.probes import Say
    from pdstage.transport import Transport

NBYTES = 1 << 20
WAIT_S = 30.0


class Way(msgspec.Struct, frozen=True):
    """`environment` is set while both ends open their transports; `shared`: memory that peers can map."""

    name: str
    environment: dict[str, str] = {}
    shared: bool = False


def pair(say: Say, *, transport: str, ways: list[dict[str, Any]]) -> None:
    """Reports if it is "installed", its "caveat", and "way NAME" of each way: `{"error", "remedy", "seconds"}`."""
    asked = [msgspec.convert(way, Way) for way in ways]
    ours, theirs = Pipe()
    pid = os.fork()
    if not pid:
        ours.close()
        _hold(theirs, transport, asked)
        raise SystemExit
    theirs.close()
    say.step("import")
    try:
        say.found(installed=True, caveat=load(transport).caveat)
    except UsageError as error:
        missing = error.__cause__
        say.found(installed=not (isinstance(missing, ModuleNotFoundError) and missing.name == transport))
        raise
    for way in asked:
        begun = time.monotonic()
        try:
            _write(say, ours, transport, way)
            problem = ("", "")
        except PdstageError as error:
            problem = (error.what, error.remedy)
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise TransportError(f"the receiving process {_how_it_ended(pid)}, at {way.name}") from error
        took_s = time.monotonic() - begun
        say.found(**{f"way {way.name}": {"error": problem[0], "remedy": problem[1], "seconds": took_s}})
    ours.close()
    say.step("exit")
    ended = _how_it_ended(pid)
    say.found(peer_ended=ended)


def _write(say: Say, pipe: Connection, name: str, way: Way) -> None:
    try:
        say.step(f"start, {way.name}")
        with _opened(name, way) as (transport, memory):
            say.step(f"connect, {way.name}")
            problem, description, base = _answer(pipe, way)
            if problem:
                raise TransportError(problem[0], remedy=problem[1])
            memory[:] = np.frombuffer(secrets.token_bytes(NBYTES), np.uint8)
            transport.connect("peer", description)
            transport.prepare("peer", [Region(base, NBYTES)])
            say.step(f"write, {way.name}")
            _post(transport, memory.ctypes.data, base)
            pipe.send("look")
            digest, has_tag = _answer(pipe, way)
            if digest != _digest(memory):
                raise TransportError("other bytes arrived than were sent", remedy="do not use it; report it")
            if transport.traits.notifies and not has_tag:
                raise TransportError("the bytes arrived, their tag did not", remedy="do not use it; report it")
            say.step(f"close, {way.name}")
    finally:
        pipe.send("next")


def _post(transport: Transport, src: int, dst: int) -> None:
    """Writes all the memory once, and waits for its end."""
    spans = Spans(*(np.array([value], np.int64) for value in (src, dst, NBYTES)))
    ticket = transport.post("peer", spans, b"doctor" if transport.traits.notifies else b"")
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        for event in transport.poll():
            if isinstance(event, PostFailed) and event.ticket == ticket:
                raise event.error
            if isinstance(event, Done) and event.ticket == ticket:
                return
    raise DeadlineExceeded(f"a write did not end in {WAIT_S:g} s", remedy="see what the library logs")


def _hold(pipe: Connection, name: str, ways: list[Way]) -> None:
    """The other end: opens the same transport, and polls it until the memory was checked."""
    try:
        for way in ways:
            try:
                with _opened(name, way) as (transport, memory):
                    pipe.send((way.name, (None, transport.describe(), memory.ctypes.data)))
                    _serve(pipe, way, transport, memory)
            except PdstageError as error:
                pipe.send((way.name, ((error.what, error.remedy), b"", 0)))
                while pipe.recv() != "next":
                    pass
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _serve(pipe: Connection, way: Way, transport: Transport, memory: NDArray[np.uint8]) -> None:
    has_tag, asked_at = False, 0.0
    while True:
        has_tag = any(isinstance(event, Inbound) for event in transport.poll()) or has_tag
        if pipe.poll(1e-3):
            if pipe.recv() == "next":
                return
            asked_at = time.monotonic()
        late = time.monotonic() > asked_at + WAIT_S / 3
        if asked_at and (has_tag or late or not transport.traits.notifies):
            pipe.send((way.name, (_digest(memory), has_tag)))
            asked_at = 0.0


@contextmanager
def _opened(name: str, way: Way) -> Iterator[tuple[Transport, NDArray[np.uint8]]]:
    with environment(way.environment):
        transport = open_transport(name)
    try:
        memory = shared.allocate(NBYTES) if way.shared else np.zeros(NBYTES, np.uint8)
        region = Region(memory.ctypes.data, NBYTES)
        transport.register([region])
        yield transport, memory
    finally:
        transport.close()


@contextmanager
def environment(added: Mapping[str, str]) -> Iterator[None]:
    """Sets these variables inside the block, for a library that is opened there."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _answer(pipe: Connection, way: Way) -> Any:  # noqa: ANN401
    """The other end's answer for this way, after skipping answers left from earlier ways."""
    while pipe.poll(2 * WAIT_S):
        name, answer = pipe.recv()
        if name == way.name:
            return answer
    raise DeadlineExceeded(
        f"the receiving process said nothing for {2 * WAIT_S:g} s", remedy="see what the library logs"
    )


def _digest(memory: NDArray[np.uint8]) -> bytes:
    return hashlib.blake2b(memory.tobytes()).digest()


def _how_it_ended(pid: int) -> str:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"died of signal {-code}" if code < 0 else f"ended with exit code {code}" if code else ""

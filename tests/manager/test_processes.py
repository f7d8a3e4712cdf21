"""Ranks in processes of their own, over the real transports."""

from __future__ import annotations

import multiprocessing

import pytest

from pdstage import State
from tests.manager.engine import Rank, drive
from tests.manager.workers import TOKENS, serve_prefill, serve_prefill_forbidden_to_write
from tests.rows import usable

TRANSPORTS = usable("local", "nixl")
spawn = multiprocessing.get_context("spawn")


class Remote:
    """Prefill ranks in processes; all that are left are killed at the end."""

    def __init__(
        self,
        address: str,
        tp: int,
        transport: str,
        path: str,
        rooms: int,
        stop: int = 1 << 30,
        keys: str | None = None,
    ) -> None:
        self.pipes, self.processes = [], []
        for rank in range(tp):
            ours, theirs = spawn.Pipe()
            args = (theirs, address, tp, rank, transport, path, rooms, stop, keys)
            process = spawn.Process(target=serve_prefill, args=args, daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            assert pipe.poll(240)
            assert pipe.recv() == "ready"

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("path", ["staged", "direct"])
def test_two_prefill_processes_to_one_decode(site, transport, path):
    rooms = 6
    dst = Rank(page=8, hnd=True, n_pages=128)
    d = site.decode(dst, transport=transport, path=path)
    with Remote(site.address, 2, transport, path, rooms) as remote:
        receivers, into = [], []
        for room in range(rooms):
            into.append(dst.allocate(TOKENS))
            receivers.append(d.receive(room, site.address))
            receivers[-1].bind(into[-1], TOKENS)
        drive([d], lambda: all(receiver.released for receiver in receivers))
        for room, (receiver, pages) in enumerate(zip(receivers, into, strict=True)):
            assert receiver.wait(0) is State.SUCCESS
            assert receiver.aux == b"%d" % room
            assert dst.holds(room, TOKENS, pages)
        drive([d], lambda: all(pipe.poll() for pipe in remote.pipes))
        for pipe in remote.pipes:
            assert pipe.recv() == [State.SUCCESS] * rooms
            pipe.send("end")


def test_pages_that_are_mapped_are_written_in_one_pass(site):
    """By nothing else here: the prefill process may not write another one's memory."""
    rooms = 4
    dst = Rank(page=8, hnd=True, n_pages=128, mappable=True)
    d = site.decode(dst, transport="local", path="direct")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve_prefill_forbidden_to_write, args=(theirs, site.address, rooms, rooms))
    process.start()
    try:
        receivers, into = [], []
        for room in range(rooms):
            into.append(dst.allocate(TOKENS))
            receivers.append(d.receive(room, site.address))
            receivers[-1].bind(into[-1], TOKENS)
        drive([d], lambda: all(receiver.released for receiver in receivers))
        for room, (receiver, pages) in enumerate(zip(receivers, into, strict=True)):
            assert receiver.wait(0) is State.SUCCESS
            assert dst.holds(room, TOKENS, pages)
        drive([d], ours.poll)
        assert ours.recv() == "ready"
        drive([d], ours.poll)
        assert ours.recv() == [State.SUCCESS] * rooms
        ours.send("end")
        process.join(60)
    finally:
        process.kill()
        process.join()

"""Ranks in processes of their own, over the real transports."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdstage import DecodeNode, State
from tests import processes
from tests.manager.engine import TOKENS, Rank, drive, receive_all
from tests.manager.workers import serve_prefill, serve_prefill_forbidden_to_write
from tests.rows import both_paths, rows, usable

any_transport = pytest.mark.parametrize("transport", rows(usable("local", "nixl", "mooncake"), full={"mooncake"}))


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
        serve: Callable[..., None] = serve_prefill,
    ) -> None:
        given = transport, path, rooms, stop
        started = [processes.child(serve, address, tp, rank, *given) for rank in range(tp)]
        self.processes, self.pipes = zip(*started, strict=True)
        for pipe in self.pipes:
            assert pipe.poll(240)
            assert pipe.recv() == "ready"

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def all_arrive(self, d: DecodeNode, dst: Rank, address: str, rooms: int) -> None:
        """Every byte of `rooms` rooms, and both sides' words on them."""
        receivers, into = receive_all(d, dst, address, rooms)
        drive([d], lambda: all(receiver.released for receiver in receivers))
        for room, (receiver, pages) in enumerate(zip(receivers, into, strict=True)):
            assert receiver.wait(0) is State.SUCCESS
            assert receiver.aux == b"%d" % room
            assert dst.holds(room, TOKENS, pages)
        for pipe in self.pipes:
            drive([d], pipe.poll)
            assert pipe.recv() == [State.SUCCESS] * rooms
            pipe.send("end")


@pytest.mark.parametrize("transport", usable("local", "nixl"))
@both_paths
def test_two_prefill_processes_to_one_decode(site, transport, path):
    dst = Rank(page=8, hnd=True, n_pages=128)
    d = site.decode(dst, transport=transport, path=path)
    with Remote(site.address, 2, transport, path, 6) as remote:
        remote.all_arrive(d, dst, site.address, 6)


@pytest.mark.parametrize("path", ["direct", "auto", "staged"])
def test_a_prefill_process_that_may_not_write_pages_maps_memory_unless_told_direct(site, path):
    """Staging memory of the decode node's own; or all its pages, which are then written in one pass."""
    dst = Rank(page=8, hnd=True, n_pages=128, mappable=path == "direct")
    d = site.decode(dst, transport="local", path="direct")
    with Remote(site.address, 1, "local", path, 4, serve=serve_prefill_forbidden_to_write) as remote:
        remote.all_arrive(d, dst, site.address, 4)

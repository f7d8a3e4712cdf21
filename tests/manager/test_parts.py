"""Context parallelism over the real transports: eight ranks in eight processes, every destination byte looked at."""

from __future__ import annotations

import multiprocessing
from itertools import product

import pytest

from pdstage.control.bootstrap import BootstrapServer
from tests.manager.part_workers import Job, Side, serve
from tests.manager.test_processes import TRANSPORTS

spawn = multiprocessing.get_context("spawn")

CASES = {
    "CP 2 x TP 2, blocks of 1 -> TP 4": (Side(2, 1, 2, 4, False), Side(1, 0, 4, 16, True)),
    "CP 2 x TP 2, blocks of 16 -> TP 4": (Side(2, 16, 2, 16, True), Side(1, 0, 4, 16, True)),
    "CP 2 x TP 2, contiguous -> TP 4": (Side(2, 0, 2, 8, False), Side(1, 0, 4, 4, False)),
    "TP 4 -> DCP 2 x TP 2, blocks of 1": (Side(1, 0, 4, 16, False), Side(2, 1, 2, 4, True)),
    "TP 4 -> DCP 2 x TP 2, blocks of 16": (Side(1, 0, 4, 8, True), Side(2, 16, 2, 16, False)),
    "CP 4, contiguous -> DCP 2 x TP 2, blocks of 16": (Side(4, 0, 1, 4, False), Side(2, 16, 2, 16, False)),
}


class Fleet:
    """Eight processes, for one job after the other; killed at the end."""

    def __init__(self, address: str) -> None:
        self.pipes, self.processes = [], []
        for _ in range(8):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=serve, args=(theirs, address), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, name: str, transport: str, path: str) -> list[str]:
        """What each process found wrong."""
        prefill, decode = self.pipes[:4], self.pipes[4:]
        for side, pipes in zip(CASES[name], (prefill, decode), strict=True):
            for number, pipe in enumerate(pipes):
                pipe.send(Job(f"{name}/{transport}/{path}", pipes is prefill, side, number, transport, path))
        for pipe in self.pipes:
            assert pipe.poll(240) and (wrong := pipe.recv()) == "", wrong
        for pipe in decode:
            pipe.send("go")
        found = [self._answer(pipe) for pipe in decode]
        for pipe in prefill:
            pipe.send("end")
        return found + [self._answer(pipe) for pipe in prefill]

    @staticmethod
    def _answer(pipe) -> str:
        return pipe.recv() if pipe.poll(240) else "no answer"


@pytest.fixture(scope="module")
def fleet():
    with BootstrapServer() as server:
        fleet = Fleet(server.address)
        yield fleet
        for process in fleet.processes:
            process.kill()
            process.join()


QUICK = {"CP 2 x TP 2, blocks of 16 -> TP 4", "TP 4 -> DCP 2 x TP 2, blocks of 16"}


def _rows():
    for case, path, transport in product(CASES, ["staged", "direct"], TRANSPORTS):
        quick = transport == "local" or case in QUICK
        yield pytest.param(case, path, transport, marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize(("case", "path", "transport"), list(_rows()))
def test_eight_ranks_that_hold_parts_of_the_tokens(fleet, case, path, transport):
    """I5: each room ends well at every rank, and no byte is missing, wrong or where none belongs."""
    assert fleet.run(case, transport, path) == [""] * 8

"""Random walks of both cores under loss, duplication, reordering, stuck writers, aborts, crashes and rooms used again.

The checks are `pair.World`'s (no byte lands in released memory, I2; no lease is written twice, I15; no write reads
released source memory, I8) and, once the faults end and time passes, I5, I10, I13 and I14.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from pdstage.protocol.decode import InRoom
from pdstage.protocol.outbox import OutRoom
from pdstage.protocol.room import State
from tests.pair import Decode, Prefill, World, assert_flat, is_kind

TOKENS, N_PAGES = 8, 64
DEADLINES = {
    "hello_s": 4.0,
    "open_s": 6.0,
    "bind_s": 10.0,
    "ask_s": 1.0,
    "wait_s": 10.0,
    "transfer_s": 8.0,
    "recall_after_s": 0.6,
    "stuck_after_s": 0.4,
    "drain_s": 4.0,
    "open_wait_s": 10.0,
    "write_s": 5.0,
    "max_silence_s": 3.0,
}


@dataclass
class Job:
    """One room of one life: a handle on each rank."""

    number: int
    handles: list[tuple[Prefill | Decode, InRoom | OutRoom]] = field(default_factory=list)


class Walk:
    """One seeded run: an engine on each side, and a network that does its worst."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        n_prefill, n_decode = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2)])
        self.path = rng.choice(["staged", "staged", "direct", "auto"])
        self.world = World(
            prefill=n_prefill,
            decode=n_decode,
            heads=2,
            layers=2,
            n_pages=N_PAGES,
            lane_nbytes=rng.choice([512, 768, 1024, 4096]),
            n_lanes=rng.choice([1, 1, 2]),
            buffer_nbytes=rng.choice([512, 1024]),
            path=self.path,
            deadline_s=30.0,
            choose=(lambda _: rng.random() < 0.5) if self.path == "auto" else None,
            **DEADLINES,
        )
        self.world.pick = rng.randrange
        self.free_pages: dict[Prefill | Decode, set[int]] = {}
        self.held_pages: list[tuple[int, Prefill | Decode, InRoom | OutRoom, list[int]]] = []
        self.jobs: list[Job] = []
        self.todo: list[tuple[Job, str, int]] = []
        self.unready: list[tuple[Prefill, OutRoom, object]] = []

    def noise(self) -> None:
        world, rng = self.world, self.rng
        loss, dup, slow = rng.choice([0.0, 0.02, 0.1, 0.3]), rng.choice([0.0, 0.1]), rng.choice([0.0, 0.05, 0.2])
        told = is_kind("frame", "tag")
        tag_loss = rng.choice([0.0, 0.0, 0.05])
        world.drop(
            lambda item: rng.random() < (loss if item.kind == "frame" else tag_loss if item.kind == "tag" else 0.0)
        )
        world.duplicate(lambda item: told(item) and rng.random() < dup)
        world.hold(lambda item: item.kind != "fence" and rng.random() < slow)

    def start(self) -> None:
        number = self.rng.choice([len(self.jobs), self.rng.randrange(4)])
        if any(job.number == number and not self.over(job) for job in self.jobs):
            return
        job = Job(number)
        self.jobs.append(job)
        steps = [(job, "receive", rank) for rank in range(len(self.world.decode))]
        steps += [(job, "submit", rank) for rank in range(len(self.world.prefill))]
        self.rng.shuffle(steps)
        self.todo += steps

    def over(self, job: Job) -> bool:
        """No step is left, and every handle on a living node has ended."""
        ended = all(handle.ended for node, handle in job.handles if node.alive)
        return ended and all(todo[0] is not job for todo in self.todo)

    def take_pages(self, number: int, node: Prefill | Decode, handle: InRoom | OutRoom) -> list[int]:
        free = self.free_pages.setdefault(node, set(range(N_PAGES)))
        pages = self.rng.sample(sorted(free), 2)
        free -= set(pages)
        self.held_pages.append((number, node, handle, pages))
        return pages

    def step(self) -> None:
        if not self.todo:
            return
        job, what, rank = self.todo.pop(self.rng.randrange(len(self.todo)))
        world, number = self.world, job.number
        node = (world.prefill if what == "submit" else world.decode)[rank]
        key = b"i%d" % number
        if what == "receive" and key not in node.core.rooms:
            handle = world.announce(number, rank)
            node.pages[handle] = []
            job.handles.append((node, handle))
            if self.rng.random() < 0.9:
                self.todo.append((job, "bind", rank))
        elif what == "bind":
            handle = next(h for n, h in reversed(job.handles) if n.name == b"D%d" % rank)
            if (node, handle) in job.handles and not handle.ended:
                world.bind(handle, TOKENS, self.take_pages(number, node, handle), rank, priority=self.rng.randrange(2))
        elif what == "submit" and key not in node.core.rooms:
            handle = world.submit(number, rank)
            job.handles.append((node, handle))
            pages = self.take_pages(number, node, handle)
            world.fill(number, TOKENS, pages, rank)
            self.compute(node, handle, pages, rank)

    def compute(self, node: Prefill, handle: OutRoom, pages: list[int], rank: int) -> None:
        rng, world = self.rng, self.world
        size = rng.choice([2, 4, 8])
        for start in range(0, TOKENS, size):
            bands = [(0, 1), (1, 2)] if rng.random() < 0.3 else [(0, 2)]
            for layers in bands:
                ready = rng.random() < 0.6
                source = world.chunk(handle, (start, start + size), pages, rank, ready=ready, layers=layers)
                if not ready:
                    self.unready.append((node, handle, source))
        if rng.random() < 0.95:
            world.finish(handle, rank)

    def engine(self) -> None:
        """What engines do now and then: data becomes ready, rooms are aborted, pages come back."""
        rng, world = self.rng, self.world
        if self.unready and rng.random() < 0.7:
            node, handle, source = self.unready.pop(rng.randrange(len(self.unready)))
            if node.alive:
                node.core.data_ready(handle, source, world.now)
                world.carry(node)
        if rng.random() < 0.03:
            node = rng.choice(world.nodes())
            for room in list(node.core.rooms.values())[:1]:
                node.core.abort(room, "the test says so", world.now)
            world.carry(node)
        for entry in list(self.held_pages):
            number, node, handle, pages = entry
            if handle.released:
                self.held_pages.remove(entry)
                self.free_pages[node] |= set(pages)
                if isinstance(handle, InRoom) and handle.state is State.SUCCESS and node.alive:
                    world.check(handle, number, TOKENS, int(node.name[1:]))
                    assert handle.aux == b"aux"

    def crash(self) -> None:
        self.world.restart(self.rng.choice(self.world.nodes()))

    def go(self, n_steps: int) -> None:
        rng, world = self.rng, self.world
        crashes = rng.random() < 0.3
        self.noise()
        for _ in range(n_steps):
            if rng.random() < 0.3:
                self.start()
            self.step()
            self.engine()
            for _ in range(rng.randrange(12)):
                if world.queue:
                    world._deliver(world.queue.pop(rng.randrange(len(world.queue))))
            if world.held and rng.random() < 0.2:
                world.queue.append(world.held.pop(rng.randrange(len(world.held))))
            if rng.random() < 0.2:
                self.wait(rng.choice([0.01, 0.3, 0.3, 1.0]))
            if crashes and rng.random() < 0.02:
                self.crash()

    def wait(self, for_s: float) -> None:
        """Time passes while what is on its way stays there."""
        until = self.world.now + for_s
        while (due := min((n.core.next_at() or until for n in self.world.nodes()), default=until)) < until:
            self.world.now = max(self.world.now, due)
            for node in self.world.nodes():
                node.core.tick(self.world.now)
                self.world.carry(node)
        self.world.now = until

    def end(self) -> None:
        """The faults are over: everything ends, and nothing is left."""
        world = self.world
        world.free()
        while self.todo:
            self.step()
        for node, handle, source in self.unready:
            if node.alive:
                node.core.data_ready(handle, source, world.now)
                world.carry(node)
        world.run(until=world.now + 100.0)
        for job in self.jobs:
            for node, handle in job.handles:
                if node.alive:
                    assert handle.ended and handle.released, (node.name, handle.key, handle.state, handle.error)
                    assert (handle.state is State.FAILED) == (handle.error is not None)
        self.engine()
        assert_flat(world)


@pytest.mark.parametrize("seed", range(300))
def test_random_walk(seed: int) -> None:
    walk = Walk(seed)
    walk.go(60)
    walk.end()


def show(seed: int) -> list[str]:  # pragma: no cover
    """For a failing seed: everything that was delivered."""
    walk = Walk(seed)
    try:
        walk.go(60)
        walk.end()
    finally:
        print(*walk.world.log, sep="\n")
    return walk.world.log

"""Random walks of both cores under loss, duplication, reordering, stuck writers, aborts, crashes and rooms used again.

Three kinds. *harsh*: everything fails, and the room deadlines are short. *gentle*: control frames are lost, doubled and
late, all else is only slow; that costs time, never a session or a room (I4, I11). *stopped*: one prefill rank stops for
ever with whatever it holds, and no transport fences it; the rooms of the others do not care (I12).

At every step `tests/invariants.py` looks; a room that says Success has every byte at that moment (I5); and once the
faults end and time passes, I10, I13 and I14.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from pdstage.protocol import messages as m
from pdstage.protocol.decode import InRoom
from pdstage.protocol.outbox import OutRoom
from pdstage.protocol.room import State
from tests.pair import Decode, Item, Prefill, World, assert_flat, is_kind

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
SHORT = {"recall_after_s": 0.6, "stuck_after_s": 0.4, "write_s": 5000.0}
PATIENT = {name: 50 * value for name, value in DEADLINES.items()} | SHORT
KINDS = {
    "harsh": DEADLINES,
    "gentle": PATIENT | {"hello_s": 40.0, "drain_s": 40.0, "max_silence_s": 30.0, "ask_s": 1.0},
    "stopped": PATIENT | {"hello_s": 40.0, "drain_s": 40.0, "max_silence_s": 10.0, "ask_s": 1.0},
}


@dataclass
class Job:
    """One room of one life: a handle on each rank."""

    number: int
    writer: int | None
    """The one prefill rank that sends it; None: all do."""
    sound: bool = True
    """Its engines did and will do all they should."""
    stubborn: bool = False
    """Some of its data comes only when all else is over."""
    handles: list[tuple[Prefill | Decode, InRoom | OutRoom]] = field(default_factory=list)


class Walk:
    """One seeded run: an engine on each side, and a network that does its worst."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.kind = rng.choice(["harsh", "harsh", "gentle", "stopped"])
        stopped = self.kind == "stopped"
        n_prefill, n_decode = rng.choice([(1, 1), (2, 1), (1, 2), (2, 2)][1 if stopped else 0 :: 2 if stopped else 1])
        self.path = rng.choice(["staged", "staged", "direct", "auto"])
        self.world = World(
            prefill=n_prefill,
            decode=n_decode,
            heads=2,
            layers=2,
            n_pages=N_PAGES,
            lane_nbytes=rng.choice([1024, 2048] if stopped else [512, 768, 1024, 4096]),
            n_lanes=rng.choice([1, 1, 2]),
            n_buffers=rng.choice([2, 3]),
            buffer_nbytes=rng.choice([512, 1024]),
            path=self.path,
            deadline_s=30.0 if self.kind == "harsh" else 3000.0,
            instances=stopped,
            fences=not stopped,
            choose=(lambda _: rng.random() < 0.5) if self.path == "auto" else None,
            checksums=rng.random() < 0.3,
            **KINDS[self.kind],
        )
        self.world.pick = rng.randrange
        self.world.ended = self.ended
        self.free_pages: dict[Prefill | Decode, set[int]] = {}
        self.held_pages: list[tuple[int, Prefill | Decode, InRoom | OutRoom, list[int]]] = []
        self.jobs: list[Job] = []
        self.todo: list[tuple[Job, str, int]] = []
        self.unready: list[tuple[Prefill, OutRoom, object]] = []
        self.stubborn: list[tuple[Prefill, OutRoom, object]] = []
        self.stuck: Item | None = None

    def noise(self) -> None:
        world, rng = self.world, self.rng
        loss, dup, slow = rng.choice([0.0, 0.02, 0.1, 0.3]), rng.choice([0.0, 0.1]), rng.choice([0.0, 0.05, 0.2])
        told = is_kind("frame", "tag")
        tag_loss = broken = 0.0
        if self.kind == "harsh":
            tag_loss, broken = rng.choice([0.0, 0.0, 0.05]), rng.choice([0.0, 0.0, 0.02])
            world.alters = lambda: rng.random() < 0.05
        elif self.kind == "stopped":
            loss = 0.0
        elif world.n_buffers > 2 and rng.random() < 0.5:  # of two, one destination session has but one
            world.drop(self.sticks)
        world.drop(
            lambda item: rng.random() < (loss if item.kind == "frame" else tag_loss if item.kind == "tag" else 0.0)
        )
        world.fail(lambda item: item.fail is not None and rng.random() < broken)
        world.duplicate(lambda item: told(item) and rng.random() < dup)
        world.hold(lambda item: item.kind != "fence" and rng.random() < slow)

    def start(self) -> None:
        number = self.rng.choice([len(self.jobs), self.rng.randrange(4)])
        if any(job.number == number and not self.over(job) for job in self.jobs):
            return
        ranks = range(len(self.world.prefill))
        job = Job(number, self.rng.choice(ranks) if self.world.instances else None)
        # Prefill may take the first Open of a name that was aborted before for a latecomer of that life, and refuse it.
        job.sound = all(older.sound for older in self.jobs if older.number == number)
        self.jobs.append(job)
        steps = [(job, "receive", rank) for rank in range(len(self.world.decode))]
        steps += [(job, "submit", rank) for rank in ranks if job.writer in {None, rank}]
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
        if not node.alive:
            job.sound = False
        elif what == "receive" and key not in node.core.rooms:
            handle = world.announce(number, rank, prefill=job.writer)
            node.pages[handle] = []
            job.handles.append((node, handle))
            if self.rng.random() < 0.9:
                self.todo.append((job, "bind", rank))
            else:
                job.sound = False
        elif what == "bind":
            handle = next(h for n, h in reversed(job.handles) if n.name == b"D%d" % rank)
            if (node, handle) in job.handles and not handle.ended:
                world.bind(handle, TOKENS, self.take_pages(number, node, handle), rank, priority=self.rng.randrange(2))
        elif what == "submit" and key not in node.core.rooms:
            handle = world.submit(number, rank)
            job.handles.append((node, handle))
            pages = self.take_pages(number, node, handle)
            world.fill(number, TOKENS, pages, rank)
            self.compute(job, node, handle, pages, rank)

    def compute(self, job: Job, node: Prefill, handle: OutRoom, pages: list[int], rank: int) -> None:
        rng, world = self.rng, self.world
        size = rng.choice([2, 4, 8])
        for start in range(0, TOKENS, size):
            bands = [(0, 1), (1, 2)] if rng.random() < 0.3 else [(0, 2)]
            for layers in bands:
                ready = rng.random() < 0.6
                source = world.chunk(handle, (start, start + size), pages, rank, ready=ready, layers=layers)
                if not ready and self.kind != "harsh" and rng.random() < 0.15:
                    job.stubborn = True
                    self.stubborn.append((node, handle, source))
                elif not ready:
                    self.unready.append((node, handle, source))
        if rng.random() < 0.95:
            world.finish(handle, rank)
        else:
            job.sound = False

    def sticks(self, item: Item) -> bool:
        """The first staged write: it lands only when all else is over. Its room cannot end before."""
        if item.kind != "write" or self.stuck is not None:
            return False
        tag = m.decode_tag(item.tag, ("kv",))
        if tag.lane == m.DIRECT:
            return False
        self.stuck = item
        room = item.dst.core.epochs[tag.epoch]
        for job in self.jobs:
            job.stubborn = job.stubborn or any(handle is room for _, handle in job.handles)
        return True

    def ended(self, node: Prefill | Decode, handle: InRoom | OutRoom) -> None:
        """Success is said when every byte is in its place, not when the memory is given back."""
        if isinstance(node, Decode) and handle.state is State.SUCCESS:
            self.world.check(handle, int(handle.key[1:]), TOKENS, self.world.decode.index(node))
            assert handle.aux == b"aux"

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
                self.abort(node, room)
        for core in (node.core for node in world.prefill):
            world.must.recalled_once(core)
        for entry in list(self.held_pages):
            number, node, handle, pages = entry
            if handle.released:
                self.held_pages.remove(entry)
                self.free_pages[node] |= set(pages)
                if isinstance(handle, InRoom) and handle.state is State.SUCCESS and node.alive:
                    world.check(handle, number, TOKENS, int(node.name[1:]))

    def abort(self, node: Prefill | Decode, room: InRoom | OutRoom) -> None:
        for job in self.jobs:
            job.sound = job.sound and all(handle is not room for _, handle in job.handles)
        node.core.abort(room, "the test says so", self.world.now)
        self.world.carry(node)

    def crash(self) -> None:
        self.world.restart(self.rng.choice(self.world.nodes()))

    def stop(self) -> None:
        """A rank that hears nothing and says nothing any more; what it has begun goes on."""
        self.world.prefill[-1].alive = False
        for job in self.jobs:
            job.sound = job.sound and job.writer != len(self.world.prefill) - 1

    def go(self, n_steps: int) -> None:
        rng, world = self.rng, self.world
        crashes = self.kind == "harsh" and rng.random() < 0.3
        stops_at = rng.randrange(n_steps) if self.kind == "stopped" else -1
        self.noise()
        for n in range(n_steps):
            if n == stops_at:
                self.stop()
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
            self.world.tick()
        self.world.now = until

    def end(self) -> None:
        """The faults are over: everything ends, and nothing is left."""
        world = self.world
        world.free()
        while self.todo:
            self.step()
        self.data_ready(self.unready)
        if self.kind != "harsh":
            self.succeed()
        world.run(until=world.now + 100.0)
        for job in self.jobs:
            for node, handle in job.handles:
                if node.alive:
                    assert handle.ended and handle.released, (node.name, handle.key, handle.state, handle.error)
                    assert (handle.state is State.FAILED) == (handle.error is not None)
        self.engine()
        assert_flat(world)
        for node in world.nodes():
            said = (node.core.counters.frames_malformed, node.core.counters.tags_malformed)
            assert said == (0, 0), f"peers that keep the rules were taken for breaking them: {node.complaints}"

    def succeed(self) -> None:
        """Nobody failed but who stopped: all that engines did right succeeds, without waiting for those who did not."""
        world = self.world
        waits = False
        if self.stuck is not None:
            # Given up, its bytes are carved out; else it stands at a lane's head, and only another lane helps.
            room = self.stuck.dst.core.epochs[m.decode_tag(self.stuck.tag, ("kv",)).epoch]
            given_up = self.rng.random() < 0.5
            waits = world.n_lanes == 1 and not given_up
            if given_up:
                self.abort(self.stuck.dst, room)
        world.run(until=world.now + 30.0)
        # Alone at a decode rank, who stopped may have had all of its staging memory: that stays quarantined.
        full = not all(node.core.holdings.largest() for node in world.decode)
        if not (waits or full):
            self.demand([job for job in self.jobs if not job.stubborn], "waits for others (I12)")
        if self.stuck is not None:
            world.queue.append(self.stuck)
        self.data_ready(self.stubborn)
        world.run(until=world.now + 40.0)
        if not full or self.stuck is not None:
            self.demand(self.jobs, "did not succeed (I11)")
        n_lost = sum(node.core.counters.sessions_lost for node in world.nodes())
        n_stopped = sum(not node.alive for node in world.prefill)
        assert n_lost <= n_stopped * len(world.decode), "a session was lost although both of its ends are well (I4)"
        for node in world.nodes():
            for room in list(node.core.rooms.values()):
                self.abort(node, room)
        for node, link in world.unfenced:
            world.fence(node, link)

    def demand(self, jobs: list[Job], what: str) -> None:
        for job in jobs:
            assert not job.sound or self.succeeded(job), f"room {job.number} {what}"

    def succeeded(self, job: Job) -> bool:
        n_handles = len(self.world.decode) + (1 if self.world.instances else len(self.world.prefill))
        states = [handle.state for _, handle in job.handles]
        return states == [State.SUCCESS] * n_handles and all(handle.released for _, handle in job.handles)

    def data_ready(self, chunks: list[tuple[Prefill, OutRoom, object]]) -> None:
        for node, handle, source in chunks:
            if node.alive:
                node.core.data_ready(handle, source, self.world.now)
                self.world.carry(node)


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

"""A seeded walk: an engine on each side of a `pair.World`, and a network that does its worst; see `test_walks`.

Must not judge how it ends: `walk_ends` does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from pdstage.protocol import messages as m
from pdstage.protocol.decode import InRoom
from pdstage.protocol.outbox import OutRoom
from pdstage.protocol.room import State
from tests.pair import Decode, Item, Prefill, World, is_kind, is_message

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
    "gentle": PATIENT | {"hello_s": 40.0, "drain_s": 30.0, "max_silence_s": 30.0, "ask_s": 1.0},
    "stopped": PATIENT | {"hello_s": 12.0, "drain_s": 30.0, "max_silence_s": 10.0, "ask_s": 1.0},
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
    """Some of its data, or its finish, comes only when all else is over."""
    given_up: bool = False
    """At prefill."""
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
        self.unfinished: list[tuple[Prefill, OutRoom]] = []
        self.stuck: list[Item] = []

    def noise(self) -> None:
        world, rng = self.world, self.rng
        loss, dup, slow = rng.choice([0.0, 0.02, 0.1, 0.3]), rng.choice([0.0, 0.1]), rng.choice([0.0, 0.05, 0.2])
        told = is_kind("frame", "tag")
        tag_loss = broken = 0.0
        if self.kind == "harsh":
            tag_loss, broken = rng.choice([0.0, 0.0, 0.05]), rng.choice([0.0, 0.05])
            world.hold(lambda item: item.kind == "write" and not item.src.alive and rng.random() < 0.8)
            world.alters = lambda: rng.random() < 0.05
        elif self.kind == "stopped":
            loss = 0.0
            world.drop(self.outlives)
        elif rng.random() < 0.4:  # they are hints
            world.drop(is_message(m.Watermark))
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
        if self.kind != "harsh" and rng.random() < 0.1:
            job.stubborn = True
            self.unfinished.append((node, handle))
        elif rng.random() < 0.95:
            world.finish(handle, rank)
        else:
            job.sound = False

    def sticks(self, item: Item) -> bool:
        """The first staged write: it lands only when all else is over. Its room cannot end before."""
        if item.kind != "write" or self.stuck or m.decode_tag(item.tag, ("kv",)).lane == m.DIRECT:
            return False
        self.stuck.append(item)
        room = self.room_of(item)
        for job in self.jobs:
            job.stubborn = job.stubborn or any(handle is room for _, handle in job.handles)
        return True

    def outlives(self, item: Item) -> bool:
        """What a rank that stopped had begun lands long after its session was lost: nothing fences it."""
        if item.kind != "write" or item.src.alive:
            return False
        self.stuck.append(item)
        return True

    def room_of(self, item: Item) -> InRoom:
        return item.dst.core.epochs[m.decode_tag(item.tag, ("kv",)).epoch]

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
            mine = any(handle is room for _, handle in job.handles)
            job.sound = job.sound and not mine
            job.given_up = job.given_up or (mine and isinstance(node, Prefill))
        node.core.abort(room, "the test says so", self.world.now)
        self.world.carry(node)

    def crash(self) -> None:
        self.world.restart(self.rng.choice(self.world.nodes()))

    def greet_again(self) -> None:
        """A Hello of a process that was there before, late: alone it proves nothing (I6)."""
        world, src, dst = self.world, self.rng.choice(self.world.decode), self.rng.choice(self.world.prefill)
        hello = m.encode(m.Session(self.rng.getrandbits(63), 0), 0, src.core._hello)

        def arrive() -> None:
            if dst.alive:
                dst.core.receive(src.name, hello, world.now)
                world.carry(dst)

        world.queue.append(Item("frame", src, dst, arrive, src.core._hello))

    def stop(self) -> None:
        """A rank that hears nothing and says nothing any more; what it has begun goes on."""
        self.world.prefill[-1].alive = False
        for job in self.jobs:
            job.sound = job.sound and job.writer != len(self.world.prefill) - 1

    def go(self, n_steps: int) -> None:
        rng, world = self.rng, self.world
        crashes = self.kind == "harsh" and rng.random() < 0.5
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
            if crashes and rng.random() < 0.03:
                self.crash()
            if rng.random() < 0.03:
                self.greet_again()

    def wait(self, for_s: float) -> None:
        """Time passes while what is on its way stays there."""
        until = self.world.now + for_s
        while (due := min((n.core.next_at() or until for n in self.world.nodes()), default=until)) < until:
            self.world.now = max(self.world.now, due)
            self.world.tick()
        self.world.now = until

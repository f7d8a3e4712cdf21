"""How a walk must end, once the faults are over: by its kind, every room, every lease, every record.

Gentle and stopped walks must succeed and not only end (I4, I11, I12).
"""

from __future__ import annotations

from pdstage.protocol.decode import InRoom
from pdstage.protocol.outbox import OutRoom
from pdstage.protocol.room import State
from tests.pair import Prefill, assert_flat
from tests.walks import Job, Walk


def end(walk: Walk) -> None:
    """The faults are over: everything ends, and nothing is left."""
    world = walk.world
    world.free()
    while walk.todo:
        walk.step()
    data_ready(walk, walk.unready)
    if walk.kind != "harsh":
        succeed(walk)
    world.run(until=world.now + 100.0)
    for job in walk.jobs:
        for node, handle in job.handles:
            if node.alive:
                assert handle.ended and handle.released, (node.name, handle.key, handle.state, handle.error)
                assert (handle.state is State.FAILED) == (handle.error is not None)
    walk.engine()
    assert_flat(world)
    for node in world.nodes():
        said = (node.core.counters.frames_malformed, node.core.counters.tags_malformed)
        assert said == (0, 0), f"peers that keep the rules were taken for breaking them: {node.complaints}"


def succeed(walk: Walk) -> None:
    """Nobody failed but who stopped: all that engines did right succeeds, without waiting for those who did not."""
    world = walk.world
    waits = False
    if walk.stuck and walk.kind == "gentle":
        # Given up, its bytes are carved out; else it stands at a lane's head, and only another lane helps.
        given_up = walk.rng.random() < 0.5
        waits = world.n_lanes == 1 and not given_up
        if given_up:
            walk.abort(walk.stuck[0].dst, walk.room_of(walk.stuck[0]))
    # Shorter than drain_s, where a write given up is stuck; longer, where little of a lane is left for many recalls.
    world.run(until=world.now + (15.0 if walk.kind == "gentle" else 60.0))
    # Alone at a decode rank, who stopped may have had all of its staging memory: that stays quarantined.
    full = not all(node.core.holdings.largest() for node in world.decode)
    if not (waits or full):
        demand(walk, [job for job in walk.jobs if not job.stubborn], "waits for others (I12)")
    for job in walk.jobs:
        if job.writer is not None and not world.prefill[job.writer].alive:
            demand_end(walk, job, "was not told that its writer is gone (I10)")
    world.queue += walk.stuck
    world.run(until=world.now + 40.0)
    for node, handle in [pair for job in walk.jobs for pair in job.handles if walk.kind == "gentle"]:
        closed = isinstance(node, Prefill) or handle.state is not State.SUCCESS or handle.released
        assert closed, f"room {handle.key!r} keeps its memory for a writer that does not finish (drain_s)"
    data_ready(walk, walk.stubborn)
    for node, handle in walk.unfinished:
        if node.alive:
            world.finish(handle, world.prefill.index(node))
    world.run(until=world.now + 40.0)
    if not full or walk.kind == "gentle":
        demand(walk, walk.jobs, "did not succeed (I11)")
    for job in walk.jobs:
        if job.given_up and all(handle.bound for _, handle in job.handles if isinstance(handle, InRoom)):
            demand_end(walk, job, "was not told that prefill gave it up (I4)")
    n_lost = sum(node.core.counters.sessions_lost for node in world.nodes())
    n_stopped = sum(not node.alive for node in world.prefill)
    assert n_lost <= n_stopped * len(world.decode), "a session was lost although both of its ends are well (I4)"
    for node in world.nodes():
        for room in list(node.core.rooms.values()):
            walk.abort(node, room)
    for node, link in world.unfenced:
        world.fence(node, link)


def demand_end(walk: Walk, job: Job, what: str) -> None:
    for node, handle in job.handles:
        assert handle.ended or isinstance(node, Prefill), f"room {job.number} {what}"


def demand(walk: Walk, jobs: list[Job], what: str) -> None:
    for job in jobs:
        assert not job.sound or succeeded(walk, job), f"room {job.number} {what}"


def succeeded(walk: Walk, job: Job) -> bool:
    n_handles = len(walk.world.decode) + (1 if walk.world.instances else len(walk.world.prefill))
    states = [handle.state for _, handle in job.handles]
    return states == [State.SUCCESS] * n_handles and all(handle.released for _, handle in job.handles)


def data_ready(walk: Walk, chunks: list[tuple[Prefill, OutRoom, object]]) -> None:
    for node, handle, source in chunks:
        if node.alive:
            node.core.data_ready(handle, source, walk.world.now)
            walk.world.carry(node)

"""Eight prefill processes to four decode nodes: TP 4 x PP 2 -> DP 4 x TP 1, with a draft model and state in slots."""

from __future__ import annotations

import multiprocessing

import pytest

from pdstage import State, Topology
from tests.manager.engine import drive
from tests.manager.places import SLOTS, TOKENS, Stage, serve_stage
from tests.rows import rows, usable

TRANSPORTS = usable("local", "nixl")
TP, PP, DP = 4, 2, 4
PLACES = [Topology(tp_size=TP, tp_rank=rank % TP, pp_size=PP, pp_rank=rank // TP) for rank in range(TP * PP)]
server = multiprocessing.get_context("forkserver")
# Eight processes import the library, and the transport's, once.
server.set_forkserver_preload(["tests.manager.places", *(f"pdstage.transport.{name}" for name in TRANSPORTS)])


@pytest.mark.parametrize("transport", rows(TRANSPORTS, full={"nixl"}))
def test_tp_4_pp_2_to_dp_4(site, transport):
    """Two replicas are staged to, two written in place; every byte, I9's trimmed slots included."""
    n_rooms = 2 * DP
    pipes, processes = [], []
    try:
        for place in PLACES:
            ours, theirs = server.Pipe()
            args = (theirs, site.address, place, transport, n_rooms)
            process = server.Process(target=serve_stage, args=args, daemon=True)
            process.start()
            pipes.append(ours)
            processes.append(process)
        replicas = [Stage(Topology(dp_size=DP, dp_rank=n), page=(8, 4)[n % 2], hnd=n >= 2) for n in range(DP)]
        paths = [("staged", "direct")[n % 2] for n in range(DP)]
        nodes = [
            site.decode(replica, transport=transport, path=path) for replica, path in zip(replicas, paths, strict=True)
        ]
        for pipe in pipes:
            assert pipe.poll(240)
            assert pipe.recv() == "ready"
        receivers, into = [], []
        for room in range(n_rooms):
            into.append(replicas[room % DP].allocate(SLOTS["decode"]))
            receivers.append(nodes[room % DP].receive(room, site.address))
            receivers[-1].bind(into[-1], dict.fromkeys(("kv", "draft"), (0, TOKENS)))
        drive(nodes, lambda: all(receiver.released for receiver in receivers))
        for room, (receiver, items) in enumerate(zip(receivers, into, strict=True)):
            assert receiver.wait(0) is State.SUCCESS
            assert receiver.aux == b"%d" % room
            assert not replicas[room % DP].wrong(room, items, SLOTS["decode"])
        drive(nodes, lambda: all(pipe.poll() for pipe in pipes))
        for pipe in pipes:
            states, stats = pipe.recv()
            assert states == [State.SUCCESS] * n_rooms
            assert stats["chunks_staged"] > 0
            assert stats["chunks_direct"] > 0
            assert stats["slots_trimmed"] == n_rooms
            pipe.send("end")
        assert all(node.core.idle and not node.core.rooms.by_epoch for node in nodes)
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("path", ["staged", "direct"])
@pytest.mark.parametrize(("prefix", "n_slots"), [(24, 2), (TOKENS, 2), (TOKENS, 0)])
def test_what_decode_holds_already_is_not_computed_for_it(site, path, prefix, n_slots):
    """Slots have no positions, so they say nothing of the first token wanted; and a room may want aux alone."""
    src, dst = Stage(Topology()), Stage(Topology(), page=8)
    p, d = site.prefill(src, path=path), site.decode(dst, path=path)
    into, items = dst.allocate(n_slots), src.allocate(SLOTS["prefill"])
    receiver = d.receive(1, site.address)
    receiver.bind(into, dict.fromkeys(("kv", "draft"), (0, TOKENS)), prefix_tokens=prefix)
    sender = p.send(1)
    drive(site.nodes, lambda: sender.prefix_tokens is not None)
    assert sender.prefix_tokens == prefix
    src.write(1, items)
    state = items.pop("state")
    if prefix < TOKENS:
        sender.chunk(items, dict.fromkeys(items, (prefix, TOKENS)))
    sender.finish(aux=b"first token", states={"state": state})
    drive(site.nodes, lambda: receiver.released and sender.released)
    assert receiver.wait(0) is sender.wait(0) is State.SUCCESS
    assert receiver.aux == b"first token"
    assert not dst.wrong(1, into, n_slots, prefix)
    moved = p.stats()["chunks_staged"] + p.stats()["chunks_direct"]
    assert (moved > 0) is (prefix < TOKENS or n_slots > 0)


def test_each_component_has_its_own_first_token_wanted(site):
    """States may reach back to the start of a sequence of which the cache is wanted from later on."""
    src, dst = Stage(Topology()), Stage(Topology(), page=8)
    p, d = site.prefill(src), site.decode(dst)
    sender = p.send(1)
    assert sender.prefix_tokens_of("kv") is None
    d.receive(1, site.address).bind(dst.allocate(2), {"kv": (24, TOKENS), "draft": (0, TOKENS)})
    drive(site.nodes, lambda: sender.prefix_tokens is not None)
    assert sender.prefix_tokens == 0
    assert (sender.prefix_tokens_of("kv"), sender.prefix_tokens_of("draft")) == (24, 0)
    assert sender.prefix_tokens_of("state") == 0

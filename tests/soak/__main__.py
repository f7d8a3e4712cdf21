"""Thousands of peers on one node: come and gone in every way there is, or all open at once. Exits 1 if anything grew.

python -m tests.soak                     # 10,000 short-lived peers of a decode rank, then of a prefill rank
python -m tests.soak at-once --peers 4000
python -m tests.soak nodes --transport nixl --peers 100
python -m tests.soak long                # 720,000 rooms: twelve hours at 1,000 a minute
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import time
from contextlib import ExitStack

from tests.soak.gauge import Gauge
from tests.soak.long import Long
from tests.soak.real import RealPeers
from tests.soak.star import Crowd, Star

_MAX_GROWTH_NBYTES = 1024
"""Of resident memory, a peer come and gone: an allocator's fragments, and what is remembered up to a cap."""


def short_lived(role: str, n_peers: int) -> bool:
    """A tenth to warm up; from then on nothing may grow."""
    with ExitStack() as stack:
        star = Star(role, stack)
        star.serve(n_peers // 10)
        before = now = star.gauge()
        print(f"one {role} rank after {n_peers // 10:,} peers: {before}", flush=True)
        for n in range(9):
            began = time.perf_counter()
            star.serve(n_peers // 10)
            now = star.gauge(before)
            print(f"  {n_peers // 10 * (n + 2):6,}: {now} ({time.perf_counter() - began:.0f} s)", flush=True)
        for (way, state), n in sorted(star.ended.items()):
            print(f"  {way}: {n} rooms {state.name}")
        return _flat(before, now, n_peers * 9 // 10)


def at_once(role: str, n_peers: int) -> bool:
    with ExitStack() as stack:
        crowd = Crowd(role, stack, n_peers)
        crowd.serve(16, ("bye",))
        before = crowd.gauge()
        began = time.perf_counter()
        crowd.gather()
        print(f"one {role} rank with {n_peers:,} peers: {Gauge(crowd.node)} ({time.perf_counter() - began:.0f} s)")
        began = time.perf_counter()
        crowd.again()
        print(f"  another room of each: {time.perf_counter() - began:.0f} s", flush=True)
        crowd.part()
        return _flat(before, crowd.gauge(before), 0)


def nodes(transport: str, n_peers: int) -> bool:
    ok = True
    for role in ("decode", "prefill"):
        with ExitStack() as stack:
            peers = RealPeers(role, stack, transport)
            peers.serve(n_peers // 10)
            before = peers.gauge()
            began = time.perf_counter()
            peers.serve(n_peers)
            now = peers.gauge(before)
            took_s = time.perf_counter() - began
            print(
                f"one {role} rank, {n_peers} nodes over {transport}: {before}\n  then {now} ({took_s:.0f} s)",
                flush=True,
            )
            ok = _flat(before, now, 0) and ok
    return ok


def long(role: str, transport: str, n_rooms: int, a_peer: int = 600) -> bool:
    """A tenth to warm up; from then on nothing may grow."""
    with ExitStack() as stack:
        node = Long(role, stack, transport)
        began = time.perf_counter()
        node.serve_rooms(n_rooms // 10, a_peer)
        before = now = node.gauge()
        print(f"one {role} rank over {transport} after {node.ended.total():,} rooms: {before}", flush=True)
        for _ in range(9):
            node.serve_rooms(n_rooms // 10, a_peer)
            now = node.gauge(before)
            print(f"  {node.ended.total():9,}: {now} ({time.perf_counter() - began:.0f} s)", flush=True)
        for what, n in sorted((node.ended | node.lives).items()):
            print(f"  {n:9,} {what}")
        return _flat(before, now, node.lives.total())


def _flat(before: Gauge, now: Gauge, n_peers: int) -> bool:
    grown = now.grown(before)
    for name, (was, is_now) in grown.items():
        print(f"  GREW: {name}, from {was} to {is_now}")
    more_nbytes = now.resident_nbytes - before.resident_nbytes
    if n_peers and more_nbytes > max(4 << 20, _MAX_GROWTH_NBYTES * n_peers):
        print(f"  GREW: {more_nbytes / n_peers:.0f} bytes of resident memory a peer")
        return False
    return not grown


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="short-lived", choices=["short-lived", "at-once", "nodes", "long"])
    parser.add_argument("--role", choices=["decode", "prefill"], help="of the node in the middle; both if not given")
    parser.add_argument("--peers", type=int)
    parser.add_argument("--rooms", type=int, default=720_000, help="of long, over all roles")
    parser.add_argument("--transport", default="local")
    given = parser.parse_args(args)
    logging.getLogger("pdstage").setLevel(logging.ERROR)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    roles = [given.role] if given.role else ["decode", "prefill"]
    if given.what == "nodes":
        return 0 if nodes(given.transport, given.peers or 300) else 1
    if given.what == "long":
        flat = [long(role, given.transport, given.rooms // len(roles)) for role in roles]
        return 0 if all(flat) else 1
    run, n_peers = (at_once, 4000) if given.what == "at-once" else (short_lived, 10_000)
    flat = [run(role, given.peers or n_peers) for role in roles]
    return 0 if all(flat) else 1


if __name__ == "__main__":
    sys.exit(main())

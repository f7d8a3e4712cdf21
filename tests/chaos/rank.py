"""One rank's process: a node and its engine, ordered about through a pipe, until told to close or killed."""

from __future__ import annotations

import faulthandler
import importlib
import math
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np  # noqa: F401  (loaded before the processes are forked)

from pdstage import DecodeNode, PrefillNode, Topology
from pdstage.errors import TransportError
from pdstage.manager.observer import Observer
from pdstage.protocol import state
from pdstage.tools.trace import tracing
from pdstage.transport import open_from_config
from tests import descriptors, processes
from tests.chaos import account, plan
from tests.chaos.engine import DecodeEngine, Engine, PrefillEngine
from tests.chaos.memory import Pages
from tests.transport.faults import faulty

state.strict = True
importlib.import_module("pdstage.manager")
importlib.import_module("pdstage.transport.local")

_PAUSE_S = 0.003
_START_S = 15.0
_N_TOKENS, _STAGING_NBYTES = 12_288, 768 << 10
_WATCH_S = 0.5
_ENDS_S = 6.0
"""A watch of etcd ends within 5 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One life of one rank. `where`: its network namespace, or empty. `traces`: where a life that closes leaves one."""

    site: plan.Site
    engine: plan.Engine
    rank: int
    directory: str
    log: Path
    seed: str
    host: str
    where: str
    life: int = 0
    port: int = 0
    traces: Path | None = None


def run(pipe: Connection, job: Job) -> None:
    """Says ("ready", ...), then obeys; a surprise ends the process with its traceback in `job.log`."""
    processes.die_with_parent()
    with job.log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.enter(job.where)
    if job.site.fabric:
        os.environ["UCX_TLS"] = job.site.fabric
    os.environ["UCX_LOG_LEVEL"] = "fatal"  # what it says of killed peers fills the log
    open_from_config(job.site.transport, "cpu", job.host).close()  # what a library keeps for ever is there already
    before = (descriptors.kinds(), Counter(account.threads()))
    trace = job.traces and job.traces / f"{job.engine.name} {job.rank} {job.life}.json"
    with tracing(trace) as observers:
        engine = _engine(job, lambda *what: pipe.send(what), observers)
        pipe.send(("ready", engine.node.socket.endpoint))
        inline = job.engine.progress == "inline"
        while _obey(engine, pipe, 0 if inline else _PAUSE_S):
            engine.step()
            if inline:
                engine.node.turn(_PAUSE_S)
        closed = _close(engine, before)
    pipe.send(("closed", closed))
    pipe.close()


def _engine(job: Job, say, observers: tuple[Observer, ...]) -> Engine:
    shape = job.engine
    rng = random.Random(f"{job.seed} {shape.name} {job.rank} {job.life}")
    pages = Pages(shape.tp, job.rank, page=shape.page, n_pages=_N_TOKENS // shape.page, hnd=shape.hnd)
    until = time.monotonic() + _START_S
    while True:
        try:
            node = _node(job, pages, observers)
        except TransportError as error:  # patient with a directory out of reach
            if time.monotonic() > until:
                raise
            if "listen" in str(error):  # a stranger has the port of its life before
                job = replace(job, port=0)
            time.sleep(0.1)
        else:
            break
    if isinstance(node, PrefillNode):
        return PrefillEngine(node, pages, rng, say)
    return DecodeEngine(node, pages, rng, say, directory=job.directory)


def _node(job: Job, pages: Pages, observers: tuple[Observer, ...]) -> PrefillNode | DecodeNode:
    site, place = job.site, Topology(tp_size=job.engine.tp, tp_rank=job.rank)
    transport = site.transport
    if site.faults and not job.life:
        transport = faulty(open_from_config(transport, "cpu", job.host), **site.faults)
    common = {
        "transport": transport,
        "path": site.path, "config": replace(plan.CONFIG, checksums=site.checksums),
        "bind": f"tcp://{job.host}:{job.port}", "insecure": bool(job.where), "staging_nbytes": _STAGING_NBYTES,
        "observers": observers, "progress": job.engine.progress,
    }  # fmt: skip
    if job.engine.role == "decode":
        return DecodeNode(pages.pool, place, n_lanes=site.n_lanes, **common)
    return PrefillNode(pages.pool, place, directory=job.directory, instance=job.engine.name, n_buffers=3, **common)


def _obey(engine: Engine, pipe: Connection, pause_s: float) -> bool:
    """False once it is to close."""
    if pipe.poll(pause_s):
        try:
            kind, value = pipe.recv()
        except EOFError:  # the supervisor is gone
            os._exit(1)
        match kind:
            case "order":
                engine.waiting.append(value)
            case "report":
                pipe.send(("report", _report(engine)))
            case "fence":
                for endpoint in engine.node.unfenced():
                    engine.node.fence(endpoint)
            case "drain":
                engine.node.drain(0.0)
                engine.ends_at = engine.now + 3 * plan.ROOM_S  # then also with rooms that lost sessions keep
            case "close":
                return False
    return engine.now < engine.ends_at and bool(engine.ends_at == math.inf or engine.rooms or engine.waiting)


def _report(engine: Engine) -> dict[str, object]:
    held = account.of(engine.node)
    out = engine.pages.n_pages - len(engine.pages.free)
    held |= {
        "orders": len(engine.waiting),
        "rooms open": sum(not room.ended for room in engine.rooms),
        "rooms kept": max(0, len(engine.rooms) - held.get("stranded rooms", 0)),
        "pages astray": out - sum(len(room.pages) for room in engine.rooms),
    }
    return {"held": held, "fences": engine.node.transport.traits.fences}


def _left(before: tuple[Counter[str], Counter[str]], *, free: bool) -> list[Counter[str]]:
    """Descriptors and threads that were not there before; but for memory that a peer may still write."""
    kinds = Counter(descriptors.left(before[0]))
    if not free:
        del kinds["/memfd:pdstage (deleted)"]
    return [kinds, Counter(account.threads()) - before[1]]


def _close(engine: Engine, before: tuple[Counter[str], Counter[str]]) -> tuple[bool, list[dict[str, int]]]:
    """Closes the node in order, and tells what it left behind. Memory it gave back is used at once, and watched."""
    free = engine.node.close(2 * plan.CONFIG.drain_s)
    until = time.monotonic() + _ENDS_S
    while any(left := _left(before, free=free)) and time.monotonic() < until:
        time.sleep(_WATCH_S / 10)  # a library may end its own a moment later
    if free:
        for room in engine.rooms:
            engine.pages.give_back(room.pages)
        until = time.monotonic() + _WATCH_S
        while time.monotonic() < until:
            engine.wrong(engine.pages.sweep())
            time.sleep(_WATCH_S / 10)
    return free, [dict(kinds) for kinds in left]

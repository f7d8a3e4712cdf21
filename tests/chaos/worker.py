"""One rank's process: a node and its engine, ordered about through a pipe, until told to close or killed."""

from __future__ import annotations

import faulthandler
import importlib
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
from pdstage.protocol import state
from pdstage.transport import open_from_config
from tests import descriptors, processes
from tests.chaos import account
from tests.chaos.engine import DecodeEngine, Engine, PrefillEngine
from tests.chaos.pages import Pages
from tests.chaos.plan import CONFIG, Site
from tests.chaos.rows import make_rows

state.strict = True
importlib.import_module("pdstage.manager")
importlib.import_module("pdstage.transport.local")

STAGING_NBYTES = 768 << 10
N_TOKENS = 12_288
_PAUSE_S = 0.003
_START_S = 15.0
CLOSE_S = 4.0
_WATCH_S = 0.5
_ENDS_S = 2.0


@dataclass(frozen=True, slots=True)
class Job:
    """One life of one rank. `where`: its network namespace, or empty. `journals`: a folder for its journal, if it is to
    write one. `sabotage`: pages are reused at Failed.
    """

    site: Site
    role: str
    rank: int
    life: int
    seed: str
    directory: str
    host: str
    port: int
    where: str
    log: Path
    sabotage: bool = False
    journals: Path | None = None
    n_tokens: int = N_TOKENS
    staging_nbytes: int = STAGING_NBYTES

    @property
    def name(self) -> str:
        return f"{self.role} {self.rank}"


def run(job: Job, pipe: Connection) -> None:
    """Says ("ready", ...), then obeys; a surprise ends the process with its traceback in `job.log`."""
    processes.die_with_parent()
    redirect(job.log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.enter(job.where)
    if job.site.fabric:
        os.environ["UCX_TLS"] = job.site.fabric
    os.environ["UCX_LOG_LEVEL"] = "fatal"  # what it says of killed peers fills the log
    open_from_config(job.site.transport, "cpu", job.host).close()  # what a library keeps for ever is there already
    before = (descriptors.kinds(), account.threads())
    engine = _engine(job, pipe)
    pipe.send(("ready", (os.getpid(), _port(engine.node.socket.endpoint), descriptors.count())))
    progress = job.site.src_progress if job.role == "prefill" else job.site.dst_progress
    _serve(engine, pipe, inline=progress == "inline")
    _close(engine, pipe, before)


def redirect(log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # for `Member.show_stacks`


def _engine(job: Job, pipe: Connection) -> Engine:
    site, rng = job.site, random.Random(f"{job.seed} {job.name} {job.life}")
    prefill = job.role == "prefill"
    tp, page = (site.src_tp, site.src_page) if prefill else (site.dst_tp, site.dst_page)
    hnd = site.src_hnd if prefill else site.dst_hnd
    pages = Pages(tp, job.rank, page=page, n_pages=job.n_tokens // page, hnd=hnd)
    node = _node(job, pages)
    tools = {"rng": rng, "say": lambda *what: pipe.send(what), "sabotage": job.sabotage}
    if isinstance(node, PrefillNode):
        return PrefillEngine(node, pages, **tools)
    return DecodeEngine(node, pages, directory=job.directory, **tools)


def _node(job: Job, pages: Pages) -> PrefillNode | DecodeNode:
    """On the port of its life before, or on any if a stranger has that now; patient with a directory out of reach."""
    site, until, port = job.site, time.monotonic() + _START_S, job.port
    transport: str | dict[str, object] = site.transport
    if site.faults and not job.life:
        transport = {"name": site.transport, "faults": dict(site.faults)}
    while True:
        common = {
            "transport": transport, "path": site.path, "config": replace(CONFIG, checksums=site.checksums),
            "bind": f"tcp://{job.host}:{port}", "insecure": bool(job.where), "staging_nbytes": job.staging_nbytes,
            "aux": "rdma", "metadata": make_rows(), "journal": job.journals,
        }  # fmt: skip
        try:
            if job.role == "prefill":
                place = Topology(tp_size=site.src_tp, tp_rank=job.rank)
                return PrefillNode(
                    pages.pool, place, bootstrap=job.directory, progress=site.src_progress, n_buffers=3, **common
                )
            place = Topology(tp_size=site.dst_tp, tp_rank=job.rank)
            return DecodeNode(pages.pool, place, progress=site.dst_progress, n_lanes=site.n_lanes, **common)
        except TransportError as error:
            if time.monotonic() > until:
                raise
            if "listen" in str(error):
                port = 0
            time.sleep(0.1)


def _port(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def _serve(engine: Engine, pipe: Connection, *, inline: bool) -> None:
    while True:
        if pipe.poll(0 if inline else _PAUSE_S):
            try:
                kind, value = pipe.recv()
            except EOFError:  # the supervisor is gone
                os._exit(1)
            if kind == "order":
                engine.order(value)
            elif kind == "report":
                pipe.send(("report", _report(engine)))
            elif kind == "fence":
                for endpoint in engine.node.unfenced():
                    engine.node.fence(endpoint)
            else:
                return
        engine.step()
        if inline:
            engine.node.turn(_PAUSE_S)


def _report(engine: Engine) -> dict[str, object]:
    held = account.of(engine.node)
    out = engine.pages.n_pages - engine.pages.n_free
    held |= {
        "orders": len(engine.waiting),
        "rooms open": sum(not room.ended for room in engine.rooms),
        "rooms kept": max(0, len(engine.rooms) - held.get("stranded rooms", 0)),
        "pages astray": out - sum(len(room.pages) for room in engine.rooms),
    }
    return {
        "held": held,
        "carved": max(account.carved(engine.node), engine.kept_back(CONFIG.drain_s)),
        "fds": descriptors.count(),
        "sessions": len(engine.node.core.sessions),
        "fences": engine.node.transport.traits.fences,
        "stats": engine.node.stats(),
        "shm": account.shared_memory(),
    }


def _left(before: tuple[Counter[str], list[str]], *, free: bool) -> list[Counter[str]]:
    """Descriptors and threads that were not there before; but for memory that a peer may still write."""
    kinds = Counter(descriptors.left(before[0]))
    if not free:
        del kinds["/memfd:pdstage (deleted)"]
    return [kinds, Counter(account.threads()) - Counter(before[1])]


def _close(engine: Engine, pipe: Connection, before: tuple[Counter[str], list[str]]) -> None:
    """Closes the node in order, and tells what it left behind. Memory it gave back is used at once, and watched."""
    free = engine.node.close(CLOSE_S)
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
    pipe.send(("closed", (free, [dict(kinds) for kinds in left])))
    pipe.close()

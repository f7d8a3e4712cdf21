"""One run's processes: what the manager imports is replaced by what this run scripts, and the nodes are made.

The manager's modules keep their text: only the names `threading`, `time`, `queue` and the like in them, and the two
classes through which a node reaches others, are other objects while a run lasts.
"""

from __future__ import annotations

import gc
import logging
import queue
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import numpy as np

import pdstage.stager
from pdstage import Column, Config, DecodeNode, MetadataBuffers, PrefillNode
from pdstage.control.directory import Directory
from pdstage.manager import decode, driver, handle, lookup, node, observer, prefill, sessions, status
from pdstage.protocol import state
from tests.manager.engine import Rank
from tests.sim.manager import primitives
from tests.sim.manager.bootstrap import Client
from tests.sim.manager.fabric import Fabric, SimTransport
from tests.sim.manager.network import Network, Socket
from tests.sim.manager.scenario import Scenario
from tests.sim.manager.scheduler import Process, Scheduler

CONFIG = Config(
    retry_s=0.05, hello_s=1.0, open_s=2.0, wait_s=3.0, transfer_s=2.0,
    recall_after_s=0.3, stuck_after_s=0.1, drain_s=1.0, open_wait_s=3.0, send_wait_s=3.0, write_s=2.0,
    fall_back_after_s=0.2, max_silence_s=0.6, idle_s=1.0, max_deadline_s=8.0,
)  # fmt: skip
DEADLINE_S = 4.0
"""A room's, at decode."""
STAGING_NBYTES = 8 << 10
_TIMED = (driver, handle, lookup, sessions, node, prefill, decode, observer, status)
_MAX_STEPS = 400_000


@dataclass(eq=False)
class Host:
    """A process, and the engine's memory in it. `node` is None until it is made."""

    process: Process
    rank: Rank
    metadata: MetadataBuffers | None
    staging: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    """Of its node, kept after that gave it back."""
    node: PrefillNode | DecodeNode | None = None
    closed: bool = False
    """Its engine has begun to close it."""
    gave_back: bool | None = None
    ended: bool = False

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def writes(self) -> bool:
        return self.name[0] == "p"


class World:
    """Everything of one run."""

    def __init__(self, scenario: Scenario, liar: str = "") -> None:
        self.scenario = scenario
        self.liar = liar
        """A process whose frames `network.said_by` alters: what it has and believes is not looked at."""
        self.calm = scenario.calm and not liar
        self.rng = random.Random(f"world {scenario.seed}")
        self.scheduler = Scheduler(
            scenario.seed, switches=scenario.switches, lines=scenario.lines, deep=scenario.deep, max_steps=_MAX_STEPS
        )
        self.network = Network(self.scheduler, self.rng, scenario.delays)
        self.fabric = Fabric(self.scheduler, self.network, self.rng, scenario.faults)
        self.directory = Directory(lambda: self.scheduler.now)
        self.hosts = [self._host(name) for name in scenario.names]
        self.lost_s = 0.0
        """What stops and jumps have taken: deadlines are later by as much."""
        self.errors: list[logging.LogRecord] = []
        self.n_bad_copies = self.n_broken_lookups = 0

    def _host(self, name: str) -> Host:
        scenario, number = self.scenario, int(name[1:])
        n = scenario.n_prefill if name[0] == "p" else scenario.n_decode
        rank = Rank(n, number, page=4, n_pages=16, layers=1)
        rows = MetadataBuffers([Column("said", "uint8", (16,), required=True)], 8) if scenario.rows else None
        return Host(Process(name, scenario.ahead_s[name]), rank, rows)

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def make(self, host: Host) -> PrefillNode | DecodeNode:
        """In a thread of its process."""
        scenario = self.scenario
        transport = SimTransport(self.fabric, host.process, scenario.traits, announces=scenario.announces)
        options = {
            "transport": transport, "path": scenario.path, "staging_nbytes": STAGING_NBYTES, "config": CONFIG,
            "progress": "thread" if scenario.threads[0 if host.writes else 1] else "inline",
            "metadata": host.metadata, "aux": scenario.rows or "tcp",
        }  # fmt: skip
        if host.writes:
            node = PrefillNode(host.rank.pool, host.rank.topology, directory="one:1", **options)
        else:
            node = DecodeNode(host.rank.pool, host.rank.topology, **options)
        host.staging = node.memory._held
        return node

    # What is disturbed.

    def stop(self, host: Host, for_s: float) -> None:
        """As by SIGSTOP: its threads do not run, its clock goes on."""
        host.process.stopped += 1
        self.lost_s += for_s

        def go_on() -> None:
            host.process.stopped -= 1

        self.scheduler.at(for_s, go_on)

    def jump(self, host: Host, by_s: float) -> None:
        """Its clock goes ahead, as where a virtual machine was suspended."""
        host.process.ahead_s += by_s
        self.lost_s += by_s

    def cut(self, host: Host, for_s: float) -> None:
        self.lost_s += for_s
        for connection in list(self.network.connections):
            if host.node is not None and host.node.socket in (
                connection.source, self.network.sockets.get(connection.endpoint)
            ):  # fmt: skip
                self.network.cut(connection, self.rng.uniform(0, for_s))

    def end(self, host: Host) -> None:
        """As by SIGKILL."""
        host.process.dead = host.ended = True
        if host.node is not None:
            self.network.end_of(host.node.socket)  # type: ignore[arg-type]

    # What takes the place of what.

    @contextmanager
    def installed(self) -> Iterator[None]:
        scheduler, scenario = self.scheduler, self.scenario
        threads = primitives.threading_of(scheduler, self._refuses_thread)
        queues = SimpleNamespace(SimpleQueue=lambda: primitives.SimpleQueue(scheduler), Empty=queue.Empty)
        clock, rng = primitives.time_of(scheduler), self.rng
        tokens = SimpleNamespace(randbits=rng.getrandbits, token_hex=lambda n: rng.randbytes(n).hex())
        log, listener = logging.getLogger("pdstage"), _Listener(self.errors)
        with ExitStack() as stack:

            def put(module: object, **given: object) -> None:
                for name, value in given.items():
                    stack.enter_context(mock.patch.object(module, name, value))

            for module in _TIMED:
                put(module, time=clock)
            for module in (driver, lookup, node):
                put(module, threading=threads)
            put(handle, queue=queues)
            put(
                lookup,
                random=SimpleNamespace(uniform=rng.uniform),
                client_of=lambda address, keys: Client(self, address),
            )
            put(node, secrets=tokens, ControlSocket=self._socket, _LOOK_S=1e9)
            put(driver, _LARGE_NBYTES=scenario.large_nbytes, _NAP_S=5e-3, _PATIENCE_S=1e-2)  # fewer steps
            put(driver, _started=weakref.WeakSet())  # this process's end is none of theirs
            for name in ("_copy_all", "_copy_passes"):
                put(pdstage.stager, **{name: self._copying(getattr(pdstage.stager, name))})
            put(state, strict=True)
            put(log, handlers=[listener], propagate=False)
            stack.callback(log.setLevel, log.level)  # not put: loggers remember what levels let through
            log.setLevel(logging.ERROR)
            prefill._by_traits.cache_clear()  # whose lines would be passed in the first run alone
            gc.disable()
            try:
                yield
            finally:
                gc.enable()

    def _socket(self, bind: str, *, identity: bytes, insecure: bool, keys: object) -> Socket:
        return Socket(self.network, self.scheduler.current.process, identity)

    def _refuses_thread(self, name: str) -> bool:
        return name == "pdstage-directory" and self.rng.random() < self.scenario.no_threads

    def _copying(self, copy_all: Callable) -> Callable:
        def copy(*given: object, **how: object) -> None:
            self.scheduler.pause("a copy begins")
            if self.rng.random() < self.scenario.bad_copies:
                self.n_bad_copies += 1
                raise RuntimeError("scripted")
            copy_all(*given, **how)
            self.scheduler.pause("a copy ends")

        return copy


class _Listener(logging.Handler):
    def __init__(self, errors: list[logging.LogRecord]) -> None:
        super().__init__(logging.ERROR)
        self._errors = errors

    def emit(self, record: logging.LogRecord) -> None:
        self._errors.append(record)

"""Two releases beside each other: each engine in turn is replaced by the other release while rooms flow, and back.

So prefill and decode of both releases meet in all four ways, at unequal TP, page size and memory order, with recurrent
states and aux rows; the directory's process changes its release too. In an upgrade in order no room fails. One by force
(engines are killed) may fail rooms, each with a reason, and they succeed when they are sent again.
"""

from __future__ import annotations

import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pdstage.control.keys import Keys
from tests.fleet.member import CONFIG, Job
from tests.fleet.releases import Python
from tests.fleet.router import Engine, Fleet

_WINDOW = 6
_IMPATIENT = {"max_silence_s": 3.0, "open_wait_s": 8.0, "send_wait_s": 8.0}
_START_S = 60


class Site(NamedTuple):
    """How ranks of both releases are set up. `by_force`: engines are killed, not closed."""

    transport: str
    path: str = "auto"
    keys: bool = False
    by_force: bool = False

    def __str__(self) -> str:
        words = [self.transport, self.path, "keys" * self.keys]
        return ", ".join(word for word in (*words, "killed" if self.by_force else "in order") if word)


@dataclass
class Directory:
    """`pdstage bootstrap` of a release."""

    python: Python
    options: tuple[str, ...]
    bind: str = "127.0.0.1:0"

    def __enter__(self) -> Directory:
        self.address = self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def replace(self, python: Python) -> None:
        """By another release, at the same address."""
        self._end()
        self.python, self.bind = python, self.address.rpartition("@")[2]
        self._start()

    def _start(self) -> str:
        command = [str(self.python.path), "-P", "-m", "pdstage", "bootstrap", "--bind", self.bind, *self.options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("directory at "), line
        return line.split()[-1]

    def _end(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=_START_S)


ENGINES = {
    "prefill-a": {"role": "prefill", "tp": 2, "page": 16},
    "prefill-b": {"role": "prefill", "tp": 1, "page": 8, "hnd": True},
    "decode-a": {"role": "decode", "tp": 1, "page": 16, "hnd": True},
    "decode-b": {"role": "decode", "tp": 2, "page": 32},
}


def roll(folder: Path, old: Python, new: Python, site: Site, *, rooms: int, seed: int = 0) -> Fleet:
    """All engines from `old` to `new` and back, one by one; `rooms` of each pair of engines at every step.

    Returns the ended fleet: `moved` has rooms by releases, `wrong` what must be empty.
    """
    key = folder / "cluster.key"
    options = ("--keys", str(key)) if site.keys else ()
    if site.keys:
        Keys.make(key)
    job = Job(
        role="", transport=site.transport, path=site.path, keys=str(key) if site.keys else None,
        config=CONFIG | (_IMPATIENT if site.by_force else {}),
    )  # fmt: skip
    rng = random.Random(seed)
    with Directory(old, options) as directory, Fleet(folder, directory.address, job, seed) as fleet:
        for name, named in ENGINES.items():
            fleet.start(name, python=old, **named)
        fleet.until_up()
        _check_releases(fleet, old, new)
        fleet.window = _WINDOW
        fleet.load(rooms)
        for to in (new, old):
            order = sorted(ENGINES)
            rng.shuffle(order)
            for step, name in enumerate(order):
                if step == len(order) // 2:
                    directory.replace(to)
                _replace(fleet, fleet.engines[name], to, by_force=site.by_force)
                _check_releases(fleet, old, new)
                fleet.load(rooms)
        fleet.rest()
        fleet.close(*fleet.engines.values())
    return fleet


def _replace(fleet: Fleet, engine: Engine, python: Python, *, by_force: bool) -> None:
    ports = [rank.port for rank in engine.ranks]
    if by_force:
        fleet.kill(engine)
        fleet.until(lambda: all(rank.state == "gone" for rank in engine.ranks), f"{engine.name} ends")
    else:
        fleet.close(engine)
    fleet.counts["engines replaced"] += 1
    fleet.start(engine.name, python=python, ports=ports, **ENGINES[engine.name])
    fleet.until_up()


def _check_releases(fleet: Fleet, old: Python, new: Python) -> None:
    """Each process says which pdstage it runs: the old ones the wheel's, the new ones the checkout's."""
    for engine in fleet.engines.values():
        for rank in engine.ranks:
            from_wheel = Path(rank.file).is_relative_to(old.path.parents[1])
            assert from_wheel == (engine.python is old), (engine.name, rank.file)
            assert engine.python is not old or rank.version == old.version, (engine.name, rank.version)


# What does not go together, in words.

_QUICK = CONFIG | {"hello_s": 20.0, "open_wait_s": 3.0, "send_wait_s": 3.0}


class Refusal(NamedTuple):
    """What both sides are (the newer release is `new`), and the words that decode's room must end with."""

    name: str
    prefill: dict[str, object]
    decode: dict[str, object]
    words: tuple[str, ...]
    pretends: bool = False
    """The newer side says that its wire version is 9 and that it talks with no other."""


REFUSALS = (
    Refusal("another model", {"model": {"name": "a"}}, {"model": {"name": "b"}}, ("model's name", "'a'", "'b'")),
    Refusal("fewer layers", {"layers": 2}, {"layers": 3}, ("2 layers at prefill", "3 at decode")),
    Refusal("another format of heads", {"hybrid": False}, {"hybrid": True}, ("no prefill rank has component 'mamba'",)),
    Refusal("a later wire", {}, {}, ("wire version", "9", "1"), pretends=True),
)


def refuse(folder: Path, prefill: Python, decode: Python, newer: Python, refusal: Refusal) -> list[str]:
    """The reasons of one room between two releases that do not go together."""
    job = Job(role="", config=_QUICK, room_s=30.0)
    with Directory(decode, ()) as directory, Fleet(folder, directory.address, job) as fleet:
        wires = [9 if refusal.pretends and python is newer else 0 for python in (prefill, decode)]
        fleet.start("prefill", "prefill", prefill, wire=wires[0], **refusal.prefill)
        fleet.start("decode", "decode", decode, wire=wires[1], **refusal.decode)
        fleet.until_up()
        room = fleet.send(fleet.engines["prefill"], fleet.engines["decode"], 1, 40)
        fleet.until(lambda: not fleet.rooms, "the room ends")
        assert not fleet.moved, "a room that must be refused succeeded"
        assert not fleet.wrong, fleet.wrong
    return room.reasons

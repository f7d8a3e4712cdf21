"""A prefill and a decode engine of SGLang, a process a rank, and a scheduler's step over all ranks of one of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pytest

from tests import processes
from tests.engines.calls import PATIENCE_S, result
from tests.engines.sglang import setups

FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)
DIRECT = '{"path": "direct", "transport": "local"}'  # peers write to the pool itself
TOKENS = 100


class Child:
    """One process, called by name."""

    def __init__(self, kind, what):
        multiprocessing.set_forkserver_preload(["tests.engines.sglang.preloaded"])
        self.process, self._pipe = processes.child(setups.serve, kind, what)

    def ask(self, name, *args):
        self._pipe.send((name, args, {}))

    def answer(self):
        return result(self._pipe)

    def call(self, name, *args):
        self.ask(name, *args)
        return self.answer()

    def signal(self, number):
        os.kill(self.process.pid, number)

    def stop(self):
        """Until it is continued."""
        processes.stop(self.process.pid)

    def close(self):
        self._pipe.close()
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
        self.process.join(10)
        self.process.kill()
        self.process.join()


class Engine:
    """All ranks of one engine: each call goes to all of them. A poll's answer is the least, as SGLang's ranks take it.

    The first `n_first` ranks are those of the first pipeline stage.
    """

    def __init__(self, ranks: list[Child], n_first, mode):
        self.ranks, self.n_first, self.mode = ranks, n_first, mode

    def each(self, name, *args) -> list[Any]:
        for rank in self.ranks:
            rank.ask(name, *args)
        return [rank.answer() for rank in self.ranks]

    def poll(self, room):
        return min(self.each("poll", room))

    def until(self, room, *states):
        return eventually(lambda: self.poll(room), lambda state: state in states)

    def bootstrapped(self, room, *states):
        """Before a request begins SGLang asks the ranks of the first stage alone, for all stages."""
        first = self.ranks[: self.n_first]
        return eventually(lambda: min(rank.call("poll_stages", room) for rank in first), lambda state: state in states)


def eventually(ask, wanted=bool):
    """What `ask` answers once it is `wanted`."""
    until = time.monotonic() + PATIENCE_S
    while not wanted(said := ask()):
        assert time.monotonic() < until, f"still {said}"
        time.sleep(0.005)
    return said


class Fleet:
    """A bootstrap server, a prefill engine and a decode engine of one kind of pool."""

    def __init__(
        self, prefill_tp, decode_tp, pool="mha", node=DIRECT, page_size=16, decode_page_size=0, prefill_pp=1,
        options: tuple[str, ...] = (), decode_options: tuple[str, ...] = (), **environ,
    ):  # fmt: skip
        self.page_size = page_size
        pages = {"prefill": page_size, "decode": decode_page_size or page_size}
        said = tuple(environ.items())
        self.port, self.other_port = processes.free_port(), processes.free_port()
        with ExitStack() as opened:
            self.server = self._child(opened, "server", self.port)
            self.server.answer()
            if switches := "--enable-pd-role-switch" in options:  # then SGLang starts one in each engine
                self._child(opened, "server", self.other_port).answer()
            sides = {}
            meeting = str(Path(opened.enter_context(TemporaryDirectory()), "meeting"))
            for mode, size, stages in (("prefill", prefill_tp, prefill_pp), ("decode", decode_tp, 1)):
                port = self.other_port if switches and mode == "decode" else self.port
                usual = setups.Setup(
                    mode, size, 0, port, pool, pages[mode], node=node, environ=said, pp_size=stages,
                    options=options + decode_options * (mode == "decode"), meeting=meeting,
                )  # fmt: skip
                given = [usual._replace(tp_rank=n % size, pp_rank=n // size) for n in range(size * stages)]
                sides[mode] = [self._child(opened, "rank", one) for one in given]
            for ranks in sides.values():
                for rank in ranks:
                    rank.answer()
            self.prefill, self.decode = (
                Engine(sides[mode], size, mode) for mode, size in (("prefill", prefill_tp), ("decode", decode_tp))
            )
            self.decode.each("find", self.port)
            eventually(lambda: all(self.decode.each("ensure")))
            self._opened = opened.pop_all()

    @staticmethod
    def _child(opened: ExitStack, kind, what) -> Child:
        child = Child(kind, what)
        opened.callback(child.close)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_):
        self._opened.close()

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.prefill, self.decode

    def switch(self):
        """The two engines change roles, as a POST to /pd_role_switch at each has them do."""
        for engine in self.engines:
            assert set(engine.each("switch")) == {None}
        self.prefill, self.decode, self.port, self.other_port = self.decode, self.prefill, self.other_port, self.port
        for engine in self.engines:
            engine.each("find", self.port)
        eventually(lambda: all(self.decode.each("ensure")))

    # A request, step by step.

    def announce(self, room, adapters: tuple[str | None, str | None] = (None, None)):
        """To prefill and to decode; `adapters` is the one (LoRA) that each of them was asked to use."""
        self.prefill.each("send_to", room, adapters[0])
        self.decode.each("receive", room, adapters[1])

    def bind(self, room, n_tokens=TOKENS, prefix=0):
        self.decode.until(room, WAITING)
        self.decode.each("allocate", room, n_tokens, prefix)
        self.decode.each("bind", room, prefix)

    def begin(self, room, n_tokens=TOKENS):
        """Prefill's bootstrap, once all of decode's ranks are there; the prefix that decode has."""
        self.prefill.bootstrapped(room, WAITING)
        (prefix,) = set(self.prefill.each("begin", room, n_tokens))
        self.prefill.each("allocate", room, n_tokens, prefix)
        return prefix

    def compute(self, room, start=0, stop=TOKENS, last=True):
        self.prefill.each("compute", room, start, stop)
        self.prefill.each("send", room, start, stop, last)

    def first_chunk(self, room):
        """Of 64 tokens."""
        self.compute(room, 0, 64, False)

    def open(self, room, n_tokens=TOKENS, prefix=0, **announced):
        """Up to where prefill sends."""
        self.announce(room, **announced)
        self.bind(room, n_tokens, prefix)
        assert self.begin(room, n_tokens) == prefix

    def run(self, room, n_tokens=TOKENS, *, chunks=1, prefix=0):
        """A whole request; every byte is right at the end, and both engines have cleared it."""
        self.open(room, n_tokens, prefix)
        start = prefix
        for number in range(1, chunks + 1):
            page = self.page_size
            stop = n_tokens if number == chunks else max(start, n_tokens * number // chunks // page * page)
            self.compute(room, start, stop, number == chunks)
            start = stop
        self.finish(room, n_tokens)

    def rest(self, room, start=0):
        """What is left of an open request of `TOKENS`, and its end."""
        self.compute(room, start)
        self.finish(room)

    def finish(self, room, n_tokens=TOKENS):
        """Both engines see Success, decode's memory is right, and nothing is kept of the room."""
        assert self.decode.until(room, SUCCESS, FAILED) == SUCCESS, self.decode.each("failure", room)
        assert not any(wrong := self.decode.each("wrong", room, n_tokens)), wrong
        assert self.prefill.until(room, SUCCESS, FAILED) == SUCCESS
        for engine in self.engines:
            engine.each("clear", room)

    def fails_at_prefill(self, room) -> list[str]:
        """Its scheduler hears of a failure; the ranks' reasons."""
        assert self.prefill.until(room, FAILED, SUCCESS) == FAILED
        return self.prefill.each("failure", room)

    def ends_at_decode(self, room):
        """A room that prefill gave up: it failed, and its memory goes back; or it was complete before, and is right."""
        if self.decode.until(room, SUCCESS, FAILED) == SUCCESS:
            assert not any(wrong := self.decode.each("wrong", room, TOKENS)), wrong
            self.decode.each("clear", room)
        else:
            self.fails_at_decode(room)

    def fails_at_decode(self, room, *, bound=True) -> list[str]:
        """Its scheduler after a failure, which gets back what was `bound`; the ranks' reasons."""
        assert self.decode.until(room, FAILED, SUCCESS) == FAILED
        said = self.decode.each("failure", room)
        self.gives_back(room) if bound else self.decode.each("clear", room)
        return said

    def gives_back(self, room):
        """Memory comes back once no peer may write to it, and is used again."""
        self.decode.each("defer", room)
        eventually(lambda: all(self.decode.each("safe", room)))
        assert all(self.decode.each("released", room))
        self.decode.each("fill", room, TOKENS, 7)
        self.decode.each("release", room)

    def forgets_all(self):
        """Once all rooms are over, nothing is kept of them."""
        for engine in self.engines:
            ask = partial(engine.each, "leftovers")
            eventually(ask, lambda kept: not any(any(of_rank.values()) for of_rank in kept))


def shared_fleet(*args, **options):
    """A fixture: one fleet for all tests of a file, which keeps nothing of their rooms. A failed test's is not kept."""

    fleets = []

    def end():
        while fleets:
            fleets.pop().__exit__()

    @pytest.fixture
    def fleet(request):
        if not fleets:
            fleets.append(Fleet(*args, **options))
            request.node.getparent(pytest.Module).addfinalizer(end)
        n_failed = request.session.testsfailed
        yield fleets[0]
        if request.session.testsfailed > n_failed:
            end()
        else:
            fleets[0].forgets_all()

    return fleet

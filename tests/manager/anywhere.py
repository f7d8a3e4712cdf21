"""A Ctrl-C at many places of lives of one role, one after the other; a process of the other role serves them all.

`test_ctrl_c_decode.py` and `test_ctrl_c_prefill.py` are its rows: two files, since a worker of pytest takes whole ones.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

from tests.manager.interrupts import Outcome, Peer, Place, decode_life, forked, places, prefill_life, run, serve_lives

LIVES = {"decode": decode_life, "prefill": prefill_life}
OTHER = {"decode": "prefill", "prefill": "decode"}
MANY = {"local": 700, "nixl": 120, "mooncake": 60}
"""Places of a row that is run in full, of the 700 to 1,350 that a life has; fewer where a life takes longer."""
FEW = 20

_UCX_ABORTS = re.compile(rb"stubs\.c:\d+ +Assertion `0' failed")
_MAX_UCX_ABORTS = 3
"""Of a row: UCX 1.23 may abort a process whose peer died while the two were being connected (docs/transports.md)."""


class OtherSide:
    """Serves lives of `role`, over `transport`. A context manager; what did not end well there is an error."""

    def __init__(self, role: str, transport: str) -> None:
        self._role, self._transport = role, transport
        self._n_lives = self._n_aborts = 0
        self._held = ExitStack()

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            if failed is None:
                self._end()
        except (EOFError, ConnectionError):
            if not self._fell_to_ucx():
                raise
        finally:
            self._held.close()

    def live(self, place: Place | None, **options: object) -> Outcome:
        """A life that is interrupted at `place`, and its outcome. It begins again where UCX ended this side."""
        life: Callable[..., None] = LIVES[self._role]
        while True:
            try:
                outcome, code = run(life, place, self._expect(), transport=self._transport, **options)
            except (EOFError, ConnectionError):
                if not self._fell_to_ucx():
                    raise
                self._start()
                continue
            assert (outcome.broken, code) == ("", 0), place
            return outcome

    def _start(self) -> None:
        self._held.close()
        self._said = self._held.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  (it is a context manager's)
        self._held.callback(self._show)
        self._pipe, theirs = forked.Pipe()
        args = theirs, OTHER[self._role], self._said.fileno()
        self._process = forked.Process(target=serve_lives, args=args, kwargs={"transport": self._transport})
        self._process.start()
        self._held.callback(self._process.join)
        self._held.callback(self._process.kill)
        theirs.close()
        assert self._pipe.poll(240)
        self._address = self._pipe.recv()

    def _expect(self) -> Peer:
        """Tells it of the next life."""
        self._n_lives += 1
        peer = Peer(self._address, f"life {self._n_lives}", (2 * self._n_lives, 2 * self._n_lives + 1))
        self._pipe.send(peer)
        assert self._pipe.poll(240)
        assert self._pipe.recv() == "expected"
        return peer

    def _fell_to_ucx(self) -> bool:
        """Whether this side has died, of that assertion, and not too often."""
        if self._transport != "nixl" or not self._pipe.poll(0):
            return False  # it lives: it says nothing unasked
        self._process.join(60)
        self._said.seek(0)
        self._n_aborts += 1
        aborted = self._process.exitcode == -signal.SIGABRT and _UCX_ABORTS.search(self._said.read())
        return bool(aborted) and self._n_aborts <= _MAX_UCX_ABORTS

    def _end(self) -> None:
        self._pipe.send(None)
        assert self._pipe.poll(300)
        wrong = self._pipe.recv()
        assert not wrong, wrong
        self._process.join(60)
        assert self._process.exitcode == 0

    def _show(self) -> None:
        self._said.seek(0)
        sys.stderr.write(self._said.read().decode(errors="replace"))


def interrupt_anywhere(role: str, transport: str, progress: str, n: int) -> None:
    """The node closes in time, with no lock held, its rooms end, its process does, and its peer serves others (I10)."""
    with OtherSide(role, transport) as other:
        whole = other.live(None, progress=progress)
        n_interrupted = 0
        for place in places(whole.seen, n, seed=1):
            n_interrupted += other.live(place, progress=progress).interrupted
        assert n_interrupted > n // 2 or n_interrupted > len(whole.seen) // 2
        other.live(None, progress=progress)

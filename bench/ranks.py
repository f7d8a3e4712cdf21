"""Ranks for the benches: one process each, driven over a pipe.

A bench gives the class that a process runs, and calls its methods. Processes are forked from one that has imported the
first class's module and done nothing else: it has no device.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from typing import TYPE_CHECKING, Any, Self

from pdstage.tools.trace import tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from multiprocessing.connection import Connection
    from pathlib import Path

    from pdstage.manager.observer import Observer

_START_S = 120.0
_ANSWER_S = 300.0
_PR_SET_PDEATHSIG = 1

_folder: Path | None = None
_observers: tuple[Observer, ...] = ()


class Actor:
    """What a rank's process runs. Its public methods are called from the parent, one at a time."""

    def idle(self) -> None:
        """Called again and again while no call is there; returns within about a millisecond."""
        time.sleep(1e-3)

    def close(self) -> None:
        """The end of the process."""


class Rank:
    """One process and the pipe to it. `begin` and `result` are the halves of `call`, for ranks side by side."""

    context = multiprocessing.get_context("forkserver")

    def __init__(self, make: Callable[..., Actor], *args: object, env: Mapping[str, str] | None = None) -> None:
        self.context.set_forkserver_preload([make.__module__])
        self._pipe, theirs = self.context.Pipe()
        trace = _folder and _folder / f"{time.monotonic_ns()}-{id(self)}.json"
        given = (theirs, {**os.environ, **(env or {})}, trace, make, args)
        self._process = self.context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> Self:
        """Waits until the actor is made."""
        self._take(_START_S)
        return self

    def begin(self, method: str, *args: object) -> None:
        self._pipe.send((method, args))

    def result(self) -> Any:  # noqa: ANN401
        return self._take(_ANSWER_S)

    def call(self, method: str, *args: object) -> Any:  # noqa: ANN401
        self.begin(method, *args)
        return self.result()

    def pause(self) -> None:
        """Stops the process with all its threads, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid, number)  # type: ignore[arg-type]

    def close(self) -> None:
        """Ends the process, in order if it still listens."""
        self.resume()
        with contextlib.suppress(OSError):  # it may have ended by itself
            self._pipe.send(("", ()))
        self._process.join(20.0)
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _take(self, timeout_s: float) -> object:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"a rank's process gave no answer in {timeout_s} s")
        good, value = self._pipe.recv()
        if not good:
            raise RuntimeError(f"a rank's process failed:\n{value}")
        return value


@contextlib.contextmanager
def traced(folder: Path) -> Iterator[None]:
    """Every rank started meanwhile leaves a trace file of its nodes in `folder` at its end."""
    global _folder  # noqa: PLW0603  (one bench runs at a time)
    _folder = folder
    try:
        yield
    finally:
        _folder = None


def observers() -> tuple[Observer, ...]:
    """For a rank's nodes: whoever traces this bench."""
    return _observers


def _serve(
    pipe: Connection, env: dict[str, str], trace: Path | None, make: Callable[..., Actor], args: tuple[object, ...]
) -> None:
    global _observers
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a paused rank too ends with its parent
    os.environ.update(env)
    with tracing(trace) as _observers:
        _act(pipe, make, args)


def _act(pipe: Connection, make: Callable[..., Actor], args: tuple[object, ...]) -> None:
    try:
        actor = make(*args)
        pipe.send((True, None))
        while True:
            while not pipe.poll(0):
                actor.idle()
            method, given = pipe.recv()
            if not method:
                break
            pipe.send((True, getattr(actor, method)(*given)))
        actor.close()
    except EOFError:
        return  # the parent is gone
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        raise

"""The demo's processes: started together, read through one pipe each, and always ended."""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pdstage.errors import DeadlineExceeded, PdstageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import ForkServerProcess
    from types import TracebackType

Work: TypeAlias = "Callable[[Any, Connection], None]"

JOIN_S = 10.0


class Ended(NamedTuple):
    """A process's last message; `error` is None if its work returned."""

    error: PdstageError | None


@dataclass(slots=True)
class _Member:
    name: str
    process: ForkServerProcess
    pipe: Connection
    ended: bool = False


class Crew:
    """A context manager that on exit ends every process that is left, whatever happened.

    The modules `preload` are imported once, in this order, before the processes are forked: a dozen imports of torch
    would cost more than the demo itself.
    """

    def __init__(self, *preload: str, deadline_s: float) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))
        self._members: dict[str, _Member] = {}
        self._deadline_at = time.monotonic() + deadline_s

    def start(self, name: str, work: Work, job: object) -> None:
        """Runs `work(job, pipe)` in another process; both are pickled."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_run, args=(work, job, theirs), name=name, daemon=True)
        process.start()
        theirs.close()
        self._members[name] = _Member(name, process, ours)

    def tell(self, message: object, *, to: str = "", but: str = "") -> None:
        """Sends `message` to every running process whose name begins with `to`, except the one named `but`."""
        for member in self._members.values():
            if not member.ended and member.name.startswith(to) and member.name != but:
                member.pipe.send(message)

    def hear(self) -> Iterator[tuple[str, Any]]:
        """Messages of the processes, as `(name, message)`, until all have ended.

        Raises the error of the first process that failed, or `DeadlineExceeded` naming those still running.
        """
        while live := [m for m in self._members.values() if not m.ended]:
            ready = wait([m.pipe for m in live], timeout=max(0.0, self._deadline_at - time.monotonic()))
            if not ready:
                names = ", ".join(m.name for m in live)
                raise DeadlineExceeded(f"{names} did not finish in time", remedy="try fewer ranks or requests")
            for member in live:
                if member.pipe in ready:
                    yield from self._read(member)

    def _read(self, member: _Member) -> Iterator[tuple[str, Any]]:
        try:
            message = member.pipe.recv()
        except EOFError:
            member.process.join(JOIN_S)
            code = member.process.exitcode
            raise PdstageError(f"{member.name} died with exit code {code}", remedy="see its last lines above") from None
        if not isinstance(message, Ended):
            yield member.name, message
            return
        member.ended = True
        if message.error is not None:
            raise PdstageError(f"{member.name}: {message.error}") from message.error

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for member in self._members.values():
            if not member.ended:
                member.process.terminate()
        for member in self._members.values():
            member.process.join(JOIN_S)
            if member.process.is_alive():
                member.process.kill()
                member.process.join()
            member.pipe.close()


def _run(work: Work, job: object, pipe: Connection) -> None:
    logging.basicConfig(format="%(processName)s: %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    with pipe:
        try:
            work(job, pipe)
        except PdstageError as error:  # any other error is a bug and ends the process with its traceback
            pipe.send(Ended(error))
        else:
            pipe.send(Ended(None))

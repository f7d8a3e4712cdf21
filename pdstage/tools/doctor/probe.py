"""A probe runs in another process, so that a crash or a hang costs one line, with the step at which it happened.

The process is `python -m pdstage.tools.doctor.probe FILE NAME JSON`. It appends lines of JSON to the file, with which
the output of libraries does not mix: its step, its findings, and at the end that it is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from pdstage.errors import PdstageError
from pdstage.tools.doctor import AREAS

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from pdstage.tools.doctor.report import Result

PROBES = {"copies": "gpu", "driver": "gpu", "talk": "talk"}
"""The module of each probe: a function of that name, which is called with a `Say` and the JSON's arguments."""
_TAIL = 2000


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a run. `transports` must work; if empty, all that are installed are tried.

    `device` is where pools will be; `peer` and `bind` are control addresses; `deadline_s` is for one probe.
    """

    areas: tuple[str, ...] = AREAS
    transports: tuple[str, ...] = ()
    device: str = "cpu"
    peer: str = ""
    bind: str = ""
    keys: str = ""
    allow: str = ""
    insecure: bool = False
    deadline_s: float = 60.0


@dataclass(slots=True)
class Outcome:
    """How a probe ended ("done", "failed", "crashed", "hung", "crashed at exit"), at which step, and its findings.

    "failed": it gave a reason, in `why` and `remedy`. "crashed at exit": it was done, and then died or did not end.
    """

    end: str = "crashed"
    step: str = "start"
    facts: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    remedy: str = ""
    printed: str = ""
    """The last lines of its stderr."""
    ucx: str = ""
    """What UCX logged, if it was loaded."""

    @property
    def good(self) -> bool:
        return self.end in ("done", "crashed at exit")


class Site:
    """This host: each probe runs once for all checks that ask."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self._known: dict[str, Outcome] = {}

    def ask(
        self, probe: str, *, environment: dict[str, str] | None = None, deadlines: int = 1, **given: object
    ) -> Outcome:
        question = json.dumps([probe, environment, given], sort_keys=True)
        if question not in self._known:
            deadline_s = deadlines * self.asked.deadline_s
            self._known[question] = run(probe, given, environment or {}, deadline_s)
        return self._known[question]


Check: TypeAlias = "tuple[str, str, Callable[[Site], Result | None]]"
"""Its area, its name, and what it does; None where it does not apply to this host."""


def run(probe: str, given: dict[str, object], environment: dict[str, str], deadline_s: float) -> Outcome:
    """Runs a probe to its end, or ends it and everything it started after `deadline_s`."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="pdstage-doctor-") as name:
        folder = Path(name)
        said, errors = folder / "said", folder / "errors"
        said.touch()
        env = os.environ | {"UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": f"{folder}/ucx.%p"} | environment
        command = [sys.executable, "-m", "pdstage.tools.doctor.probe", str(said), probe, json.dumps(given)]
        code = None
        with errors.open("wb") as stderr:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=env,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = child.wait(deadline_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        for line in map(json.loads, said.read_text().splitlines()):
            outcome.facts |= line.pop("facts", {})
            for key, value in line.items():
                setattr(outcome, key, value)
        outcome.printed = errors.read_text(errors="replace")[-_TAIL:].strip()
        outcome.ucx = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("ucx.*"))[:1])
    _judge(outcome, code, deadline_s)
    return outcome


def _judge(outcome: Outcome, code: int | None, deadline_s: float) -> None:
    """`code`: None if the time ran out."""
    how = "did not end" if code is None else f"ended with exit code {code}" if code >= 0 else f"died of {_name(-code)}"
    if outcome.end == "done" and (code is None or code < 0):
        outcome.end, outcome.why = "crashed at exit", f"its process {how} at exit"
    elif outcome.end == "crashed" and code is None:
        outcome.end, outcome.why = "hung", f"did not answer within {deadline_s:g} s, at {outcome.step}"
    elif outcome.end == "crashed":
        outcome.why = f"its process {how} at {outcome.step}{f' ({outcome.why})' if outcome.why else ''}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Say:
    """Reports from a probe to its parent."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1)  # noqa: SIM115  (open until the process ends)

    def __call__(self, **line: object) -> None:
        self._file.write(json.dumps(line) + "\n")

    def step(self, name: str) -> None:
        """The next step: it is named if the process gets no further."""
        self(step=name)

    def found(self, **facts: object) -> None:
        self(facts=facts)


def main(path: str, name: str, given: str) -> None:
    say = Say(path)

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        say(why=f"{kind.__name__}: {error}")
        sys.__excepthook__(kind, error, trace)

    sys.excepthook = tell  # errors that are not this project's end the process, as a broken library would
    try:
        getattr(import_module(f"pdstage.tools.doctor.{PROBES[name]}"), name)(say, **json.loads(given))
    except PdstageError as error:
        say(end="failed", why=error.what, remedy=error.remedy)
    else:
        say(end="done")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The options of a run of the doctor, and this host's probes, each run once for all checks that ask."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from pdstage.tools.doctor import AREAS
from pdstage.tools.doctor.child import Children, Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """`transports` must work; if empty, all that are installed are tried. `device` is where pools will be.

    `peer` and `bind` are control addresses. `deadline_s` is for one probe.
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


class Site:
    """This host, shared by concurrent checks. A context manager: everything it started ends with it."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self._children = Children()
        self._lock = threading.Lock()
        self._answers: dict[str, Future[Outcome]] = {}

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the probes that still run; callers that wait for one get what it had found."""
        self._children.close()

    def ask(
        self,
        probe: str,
        *,
        environment: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        **given: object,
    ) -> Outcome:
        """The probe's result. A second caller with the same question waits for the same result."""
        question = json.dumps([probe, environment, given], sort_keys=True)
        with self._lock:
            answer = self._answers.get(question)
            is_first = answer is None
            answer = self._answers.setdefault(question, Future())
        if is_first:
            try:
                outcome = self._children.ask(
                    probe, given, deadline_s=deadline_s or self.asked.deadline_s, environment=environment or {}
                )
                answer.set_result(outcome)
            except BaseException as error:
                answer.set_exception(error)
                raise
        return answer.result()

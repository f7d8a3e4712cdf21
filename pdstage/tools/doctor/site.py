"""What a run of the doctor was asked for, and the probes of this host, each made once whoever asks."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec

from pdstage.tools.doctor import AREAS
from pdstage.tools.doctor.child import Children, Told

if TYPE_CHECKING:
    from collections.abc import Mapping


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """`transports`: those that must work; none: whatever is installed. `device`: where pools will lie.

    `peer` and `bind` are control addresses. `deadline_s`: of one probe.
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
    """This host, asked by several checks at once. A context manager: what it has started ends with it."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self._children = Children()
        self._lock = threading.Lock()
        self._answers: dict[str, Future[Told]] = {}

    def __enter__(self) -> Site:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the probes that still run; whoever waits for one gets what it had found."""
        self._children.close()

    def ask(
        self,
        probe: str,
        *,
        environment: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        **given: object,
    ) -> Told:
        """The probe's answer; whoever asks the same while it runs waits for the same answer."""
        question = json.dumps([probe, environment, given], sort_keys=True)
        with self._lock:
            answer = self._answers.get(question)
            is_first = answer is None
            answer = self._answers.setdefault(question, Future())
        if is_first:
            try:
                told = self._children.ask(
                    probe, given, deadline_s=deadline_s or self.asked.deadline_s, environment=environment or {}
                )
                answer.set_result(told)
            except BaseException as error:
                answer.set_exception(error)
                raise
        return answer.result()

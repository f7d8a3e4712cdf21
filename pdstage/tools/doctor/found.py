"""The result of a check, and the report of all checks: the schema of `--json`.

docs/doctor.md describes these fields. `VERSION` rises when a field is removed or changes its meaning, not when one is
added.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from pdstage.tools.calibrate.about import Side  # noqa: TC001  (msgspec resolves it at run time)

VERSION = 1

Level: TypeAlias = Literal["ok", "warn", "fail"]
_ORDER: tuple[Level, ...] = ("ok", "warn", "fail")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One check's result: a sentence, a remedy unless all is well, and the same facts for programs."""

    level: Level
    says: str
    remedy: str = ""
    facts: dict[str, Any] = {}


class Found(Result, frozen=True, kw_only=True):
    """A line of the report."""

    area: str
    name: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """On one transport. `usable`: it moved bytes here; `ways`: by tcp, shm, rdma, ..."""

    usable: bool
    ways: list[str]
    says: str


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a check with a peer. `seconds`: its duration, or how long it was waited for."""

    name: str
    level: Level
    seconds: float
    says: str


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """One path's transfers, compared byte by byte: bytes a second of a large room, median seconds of a small one."""

    nbytes: int
    bytes_per_s: float
    latency_s: float


class PeerReport(msgspec.Struct, frozen=True, kw_only=True):
    """A check with a peer. `failed_at` names the failed stage, `over` the transport that moved the bytes."""

    endpoint: str
    failed_at: str
    remedy: str
    over: str
    round_trip_s: float
    stages: list[Stage]
    paths: dict[str, Moved]
    here: Side | None = None
    there: Side | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report. `verdict` is the worst level of `checks`; `made_at` is ISO 8601 in UTC."""

    version: int
    made_at: str
    host: str
    pdstage: str
    verdict: Level
    checks: list[Found]
    transports: dict[str, Verdict]
    peer: PeerReport | None = None

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def ok(says: str, **facts: object) -> Result:
    return Result(level="ok", says=says, facts=facts)


def warn(says: str, remedy: str, **facts: object) -> Result:
    return Result(level="warn", says=says, remedy=remedy, facts=facts)


def fail(says: str, remedy: str, **facts: object) -> Result:
    return Result(level="fail", says=says, remedy=remedy, facts=facts)


def worst(levels: list[Level]) -> Level:
    return max(levels, key=_ORDER.index, default="ok")

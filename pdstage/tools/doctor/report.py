"""The result of a check, the report of all checks, which is the schema of `--json`, and its lines for people.

docs/doctor.md describes the fields. `VERSION` rises when one is removed or changes its meaning, not when one is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import msgspec

from pdstage.tools.calibrate.about import Side  # noqa: TC001  (msgspec resolves it at run time)

VERSION = 1
Level: TypeAlias = Literal["ok", "warn", "fail"]
_WORDS: dict[Level, str] = {
    "ok": "all is well", "warn": "works, with something to look at", "fail": "something asked for cannot work",
}  # fmt: skip


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


def ok(says: str, **facts: object) -> Result:
    return Result(level="ok", says=says, facts=facts)


def warn(says: str, remedy: str, **facts: object) -> Result:
    return Result(level="warn", says=says, remedy=remedy, facts=facts)


def fail(says: str, remedy: str, **facts: object) -> Result:
    return Result(level="fail", says=says, remedy=remedy, facts=facts)


def line(found: Found) -> str:
    """One check's result and, below it, the remedy."""
    said = f"{found.level:5} {found.area}/{found.name}: {found.says}"
    return said if found.level == "ok" else f"{said}\n      -> {found.remedy}"


def summary(report: Report) -> Iterator[str]:
    """The last lines: each transport, the peer's stages, the verdict."""
    levels = {found.name: found.level for found in report.checks if found.area == "transports"}
    for name, verdict in report.transports.items():
        yield f"{levels[name]:5} transport {name}: {verdict.says}"
    if report.peer is not None:
        yield from _peer(report.peer)
    bad, odd = (sum(found.level == level for found in report.checks) for level in ("fail", "warn"))
    counted = f"{bad} failed, {odd} to look at, of {len(report.checks)}"
    yield f"{report.verdict:5} verdict: {_WORDS[report.verdict]} ({counted})"


def _peer(peer: PeerReport) -> Iterator[str]:
    for side, where in ((peer.here, "here"), (peer.there, "there")):
        if side is not None:
            transports = ", ".join(f"{name} {version}".strip() for name, version in side.transports.items())
            says = f"{side.host}, pdstage {side.pdstage}, wire {side.wire}, Python {side.python}, {side.host_code}"
            yield f"{where}: {says}; {transports}; offers {', '.join(side.features)}"
    for stage in peer.stages:
        yield f"{stage.level:5} peer {stage.name}: {stage.seconds * 1e3:.0f} ms, {stage.says}"
    if peer.failed_at:
        yield f"-> {peer.remedy}"

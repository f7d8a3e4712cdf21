"""The table of checks, and the report of their results.

A check is a function of the `Site`. A check that does not apply to this host returns None and has no line.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

import pdstage
from pdstage.errors import UsageError
from pdstage.tools.doctor import AREAS, gpu, host, transports
from pdstage.tools.doctor.probe import Asked, Check, Site
from pdstage.tools.doctor.report import VERSION, Found, Level, Report

_MAX_S = 600
_USE_DEVICE = {"gpu", "kernels", "transports", "peer"}
_LEVELS: tuple[Level, ...] = ("ok", "warn", "fail")


def checks(asked: Asked) -> list[Check]:
    """Area, name and function of the checks of the areas asked for, area by area."""
    if asked.device != "cpu" and not set(asked.areas) & _USE_DEVICE:
        raise UsageError(
            f"--device {asked.device} is not looked at by {', '.join(asked.areas)}",
            remedy=f"add one of {', '.join(sorted(_USE_DEVICE))} to --only",
        )
    if not 1 <= asked.deadline_s <= _MAX_S:
        raise UsageError(f"a deadline of {asked.deadline_s:g} s", remedy=f"give 1 to {_MAX_S}")
    if "peer" in asked.areas and asked.areas != AREAS and not asked.peer:
        raise UsageError("area 'peer' without a peer", remedy="name it with --peer HOST:PORT")
    every = [
        *host.CHECKS,
        *gpu.CHECKS,
        *(("transports", name, transports.check(name)) for name in transports.chosen(asked.transports)),
        *([("peer", "peer", transports.peer)] if asked.peer else []),
    ]
    return [check for area in AREAS if area in asked.areas for check in every if check[0] == area]


def examine(asked: Asked, tell: Callable[[Found], None]) -> Report:
    """Runs the checks, and tells each line as it is there. Raises `UsageError`."""
    lines = []
    verdicts = {}
    reports = []
    site = Site(asked)
    for area, name, look in checks(asked):
        result = look(site)
        if result is None:
            continue
        facts = dict(result.facts)
        if area == "transports":
            verdicts[name] = facts.pop("verdict")
        elif area == "peer":
            reports.append(facts.pop("peer"))
        fields = msgspec.structs.asdict(result) | {"facts": facts}
        lines.append(Found(area=area, name=name, **fields))
        tell(lines[-1])
    return Report(
        version=VERSION, made_at=datetime.now(UTC).isoformat(timespec="seconds"), host=socket.gethostname(),
        pdstage=pdstage.__version__, verdict=max((line.level for line in lines), key=_LEVELS.index, default="ok"),
        checks=lines, transports=verdicts, peer=reports[0] if reports else None,
    )  # fmt: skip

"""Area "peer": whether this node and another can work together, tried end to end.

`caller` holds the conversation, in another process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdstage.tools.calibrate.about import Side
from pdstage.tools.doctor.found import Moved, PeerReport, Result, Stage, fail, ok

if TYPE_CHECKING:
    from pdstage.tools.doctor.child import Outcome
    from pdstage.tools.doctor.site import Asked, Site

_STEPS = 3  # the conversation may last this many deadlines of a probe


def check(site: Site) -> Result:
    """Uses the first transport asked for, else "auto"."""
    asked = site.asked
    transport = asked.transports[0] if asked.transports else "auto"
    outcome = site.ask(
        "caller", deadline_s=_STEPS * asked.deadline_s, peer=asked.peer, bind=asked.bind, transport=transport,
        device=asked.device, keys=asked.keys, allow=asked.allow, insecure=asked.insecure, wait_s=asked.deadline_s / 2,
    )  # fmt: skip
    return judge(asked, outcome)


def judge(asked: Asked, outcome: Outcome) -> Result:
    """The result of the conversation in one line, whose facts hold a `PeerReport`."""
    stages = [msgspec.convert(held, Stage) for key, held in outcome.facts.items() if key.startswith("stage ")]
    failed_at = "" if outcome.end == "done" else outcome.step
    remedy = outcome.remedy
    if outcome.end in ("crashed", "hung"):  # the probe could not report it
        remedy = f"run `pdstage doctor` on both sides: it says which transport is broken; at {failed_at} try another"
        stages = [stage for stage in stages if stage.name != failed_at]
        stages.append(Stage(name=failed_at, level="fail", seconds=0.0, says=outcome.why))
    report = PeerReport(
        endpoint=asked.peer, failed_at=failed_at, remedy=remedy if failed_at else "",
        over=outcome.facts.get("over", ""), round_trip_s=outcome.facts.get("round_trip_s", 0.0), stages=stages,
        paths={key[5:]: msgspec.convert(held, Moved) for key, held in outcome.facts.items() if key.startswith("path ")},
        here=_side(outcome, "here"), there=_side(outcome, "there"),
    )  # fmt: skip
    if failed_at:
        return fail(f"{asked.peer}: failed at {failed_at}: {outcome.why}", remedy, peer=report)
    speeds = ", ".join(f"{name} {moved.bytes_per_s / 1e9:.2f} GB/s" for name, moved in report.paths.items())
    return ok(f"{asked.peer}: works over {report.over}: {speeds}", peer=report)


def _side(outcome: Outcome, which: str) -> Side | None:
    held = outcome.facts.get(which)
    return msgspec.convert(held, Side) if held else None

"""The result: how much was judged, and what was wrong, with file and line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdstage.tools.judge.across import Across
from pdstage.tools.judge.read import read
from pdstage.tools.judge.replay import Replay

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pdstage.tools.judge.read import Place


@dataclass(slots=True)
class Verdict:
    """`wrong` has one violation per line; `counts` is what was judged, `rooms` counts rooms by their last state."""

    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    rooms: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    """What could not be judged, and why."""

    @property
    def judged(self) -> bool:
        """Whether anything was judged: an empty verdict means nothing."""
        return self.counts["moves"] > 0

    def __str__(self) -> str:
        rooms = ", ".join(f"{n} {state.lower()}" for state, n in sorted(self.rooms.items()))
        counted = ", ".join(f"{self.counts[what]:,} {what}" for what in _COUNTED)
        end = f"{len(self.wrong)} WRONG" if self.wrong else "nothing is wrong" if self.judged else "nothing was judged"
        return "\n".join([*self.wrong, *self.notes, f"{counted}; rooms at their nodes: {rooms or 'none'}", end])


_COUNTED = ("nodes", "moves", "leases", "writes", "writes seen at both ends", "bytes arrived")


def judge(paths: Iterable[Path]) -> Verdict:
    """Replays the journals in `paths`, files and folders. Raises `UsageError` for a file that is not a journal."""
    verdict = Verdict()
    found: set[tuple[Place, str, str]] = set()

    def wrong(place: Place, rule: str, what: str) -> None:
        if (place, rule, what) not in found:
            found.add((place, rule, what))
            verdict.wrong.append(f"{place}: {rule}: {what}")

    replays = [Replay(node, wrong).run() for node in read(paths)]
    writers = {one.node.head.incarnation: one for one in replays if one.node.head.role == "prefill"}
    across = Across(writers, wrong)
    for one in replays:
        if one.node.head.role == "decode":
            across.run(one)
        _count(verdict, one)
    verdict.counts["writes seen at both ends"] = across.n_writes
    return verdict


def _count(verdict: Verdict, one: Replay) -> None:
    verdict.counts["nodes"] += 1
    verdict.counts["moves"] += one.moves
    verdict.counts["leases"] += one.leases
    verdict.counts["bytes arrived"] += one.nbytes
    verdict.counts["writes"] += sum(map(len, one.flights.values()))
    verdict.rooms.update(seen.state for seen in one.rooms.values())
    if not one.node.whole:
        n = sum(not seen.begun for seen in one.rooms.values())
        gone = f"{one.node.name} ({one.node.head.incarnation}): its first {one.node.first:,} lines are gone"
        verdict.notes.append(f"{gone}, so that {n} of its rooms are judged in part")

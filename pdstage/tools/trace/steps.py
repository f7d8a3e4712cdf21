"""Where the time of rooms went: the steps of each at decode, from the engine's `receive` to Success.

The steps are those of the chunk that arrived last, so they follow each other and add up to the whole. What earlier
chunks of the room, or other rooms, cost it is in its waits: for memory, and for a send buffer.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import TYPE_CHECKING

from pdstage.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdstage.tools.trace.model import RoomLife, Stage, Trace

STEPS = {
    "receive to bind": "the engine names the room, and binds it; who serves it is looked up and greeted",
    "Open": "until prefill has heard it from every destination",
    "data": "until prefill's engine has given the chunk, with its data computed",
    "memory": "until it has staging memory at decode and a send buffer; of earlier chunks, their way",
    "gather": "until its end is seen",
    "to the write": "until the post begins",
    "write": "until its end is seen, or decode has its tag and begins the scatter",
    "tag": "until decode begins the scatter",
    "scatter": "until its end is seen",
    "to Success": "CloseOk, aux, and what else the room waits for; of a direct write, its tag",
}

_NEVER = (None, None)


def waterfalls(trace: Trace) -> Iterator[tuple[RoomLife, list[float]]]:
    """Each room that succeeded at a decode rank and whose last chunk is in the trace, and its seconds by `STEPS`."""
    chunks, lives = defaultdict(list), defaultdict(list)
    for stages in trace.chunks().values():
        chunks[stages[0].room].append(stages)
    for life in trace.rooms:
        lives[life.incarnation, life.room].append(life)
    for life in trace.rooms:
        node = trace.nodes[life.incarnation]
        if node.role != "decode" or life.state != "success" or life.ended_at is None:
            continue
        mine = []
        for stages in chunks[life.room]:
            end = stages[-1]  # a scatter, or a direct write
            is_its = end.incarnation == node.incarnation if end.kind == "scatter" else end.peer == node.rank
            if is_its and end.kind != "aux" and life.opened_at <= end.began_at <= life.ended_at:
                mine.append(stages)
        if mine:
            last = max(mine, key=lambda stages: stages[-1].began_at)
            yield life, _waterfall(life, life.ended_at, last, lives[last[0].incarnation, life.room])


def _waterfall(life: RoomLife, ended_at: float, chunk: list[Stage], prefill: Iterable[RoomLife]) -> list[float]:
    by_kind = {stage.kind: (stage.began_at, stage.ended_at) for stage in chunk}
    write = by_kind.get("write") or by_kind.get("direct") or _NEVER
    wait, gather, scatter = (by_kind.get(kind, _NEVER) for kind in ("lease_wait", "gather", "scatter"))
    opened = [one.bound_at for one in prefill if one.bound_at is not None and one.bound_at <= ended_at]
    begins = gather if gather is not _NEVER else write
    written = [at for at in (write[1], scatter[0]) if at is not None]
    moments = (
        life.bound_at, max(opened, default=None), wait[0], begins[0], gather[1], write[0], min(written, default=None),
        scatter[0], scatter[1], ended_at,
    )  # fmt: skip
    reached, steps = life.opened_at, []
    for moment in moments:  # one that is not known, or out of order by the clocks of two hosts, takes no time
        at = min(max(reached, reached if moment is None else moment), ended_at)
        steps.append(at - reached)
        reached = at
    return steps


def table(trace: Trace, room: str | None = None) -> str:
    """The medians over all rooms, or those of one name, each step's part of all their time, and what it is. Raises
    `UsageError` where no room's chunks are known.
    """
    found = [steps for life, steps in waterfalls(trace) if room in (None, life.room)]
    if not found:
        raise UsageError("no room of which both sides are in this trace", remedy="give both sides' files")
    whole_s = sum(map(sum, found))
    median = statistics.median(map(sum, found)) * 1e6
    lines = [
        f"{len(found)} rooms, median {median:.0f} us from receive to Success",
        f"{'step':<16} {'us':>8} {'part':>6}",
    ]
    for n, (name, what) in enumerate(STEPS.items()):
        each = [steps[n] for steps in found]
        lines.append(f"{name:<16} {statistics.median(each) * 1e6:>8.0f} {sum(each) / whole_s:>6.1%}  {what}")
    return "\n".join(lines)

"""Holds a trace of a run of real nodes, both sides' files merged, against the invariants.

All times are of one host's clock. What a trace does not say accuses nobody: a killed rank leaves none, so that its
chunks are known at the other end alone; and what failed may have ended at any time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdstage.tools.trace.model import Node, RoomLife, Stage, Trace

_PROMPT_S = 0.5
"""Who saw a write's end later than this may have been stopped, and fenced meanwhile."""


def judge(trace: Trace) -> tuple[list[str], int]:
    """What is wrong, each sentence begun by the invariant, and how many chunks both ends have seen."""
    judged = _Judged(trace)
    judged.rooms()
    n_chunks = judged.chunks()
    return judged.wrong, n_chunks


class _Judged:
    def __init__(self, trace: Trace) -> None:
        self.wrong: list[str] = []
        self._trace = trace
        self._done = [stage for stage in trace.stages if not stage.error and stage.kind != "lease_wait"]
        self._lives: defaultdict[tuple[int, str], list[RoomLife]] = defaultdict(list)
        for life in sorted(trace.rooms, key=lambda life: life.opened_at):
            self._lives[life.incarnation, life.room].append(life)
        self._decode: defaultdict[int, list[Node]] = defaultdict(list)
        for node in trace.ordered_nodes:
            if node.role == "decode":
                self._decode[node.rank].append(node)

    def _say(self, rule: str, stage: Stage, what: str) -> None:
        node = self._trace.nodes[stage.incarnation].name
        self.wrong.append(f"{rule}: {node}: {stage.kind} of room {stage.room!r}, chunk {stage.chunk}: {what}")

    def _life(self, incarnation: int, stage: Stage) -> RoomLife | None:
        """The room at a node that a stage is of: its name may be used again."""
        begun = [life for life in self._lives[incarnation, stage.room] if life.opened_at <= stage.began_at]
        return begun[-1] if begun else None

    def rooms(self) -> None:
        """Each room ended, and its own node's copies and writes before it was released."""
        for life in self._trace.rooms:
            if life.ended_at is None:
                name = self._trace.nodes[life.incarnation].name
                self.wrong.append(f"I10: {name}: room {life.room!r} never ended though its node closed")
        for stage in self._done:
            life = self._life(stage.incarnation, stage)
            if life is None:
                continue
            if life.released_at is not None and stage.ended_at > life.released_at:
                self._say("I2" if stage.kind == "scatter" else "I8", stage, "the room was released before its end")
            if stage.kind == "scatter" and life.state == "success" and stage.ended_at > life.ended_at:
                self._say("I5", stage, "the room succeeded before its end")

    def chunks(self) -> int:
        """Each chunk was sent once and landed once, the same bytes, before decode gave back what it lies in."""
        chunks: defaultdict[tuple[int, ...], dict[str, Stage]] = defaultdict(dict)
        for stage in self._done:
            if stage.kind != "aux" and stage.kind in chunks[stage.claim]:
                self._say("I7" if stage.kind == "scatter" else "I15", stage, "a second one")
            chunks[stage.claim][stage.kind] = stage
        n_both = 0
        for claim, stages in chunks.items():
            gather, scatter = stages.get("gather"), stages.get("scatter")
            for sent in stages.values():
                if sent.kind != "scatter":
                    self._sent(sent, landed=scatter is not None or sent.kind != "write")
            if scatter is not None and gather is not None:
                n_both += 1
                if scatter.began_at < gather.ended_at:
                    self._say("I5", scatter, "it began before the gather ended")
                if scatter.nbytes != gather.nbytes:
                    self._say("I5", scatter, f"{scatter.nbytes} bytes, {gather.nbytes} were sent")
            elif scatter is not None and claim[1] in self._trace.nodes and not self._trace.n_dropped:
                self._say("I6", scatter, "nobody sent it")
        return n_both

    def _sent(self, sent: Stage, *, landed: bool) -> None:
        """A gather may be one into decode's memory."""
        at_prefill = self._life(sent.incarnation, sent)
        found = [life for node in self._decode[sent.peer] if (life := self._life(node.incarnation, sent))]
        if len(found) != 1 or at_prefill is None or sent.ended_at - sent.began_at > _PROMPT_S:
            return
        (life,) = found
        if life.state == "success" and not landed:
            self._say("I5", sent, "decode's room succeeded without it")
        # A session that was lost ends otherwise: prefill learns of it later than decode, or its writes fail.
        agreed = life.state == "success" or (at_prefill.ended_at or life.opened_at) <= (life.released_at or 0.0)
        if agreed and life.released_at is not None and sent.ended_at > life.released_at:
            self._say("I2", sent, "decode's room was released before its end")

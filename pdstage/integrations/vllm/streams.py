"""Requests that prefill sends while it computes them: what the scheduler's side and a worker remember of each.

A router that asks both engines at once names the room itself, by `transfer_id`. So decode opens it while prefill works,
and each step's tokens are sent at that step's end. Nothing is passed to the room until decode has opened it: vLLM may
preempt the request, and compute it again in other blocks.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pdstage.integrations.vllm.metadata import Chunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from pdstage import Sender
    from pdstage.integrations.vllm.groups import Group, Held
    from pdstage.layout.topology import Range
    from pdstage.manager.handle import CudaEvent

log = logging.getLogger(__name__)

_CARRIED_S = 2.0
"""How long a preemption, and with it the engine's step, waits for writes in flight; then the request fails at decode.
"""


@dataclass
class Stream:
    """One request, at the scheduler's side. `stop` is how many of its tokens the workers know to be computed, `blocks`
    where they are.
    """

    request: Request
    room: str
    stop: int = 0
    blocks: set[int] = field(default_factory=set)
    has_begun: bool = False


class Streams:
    """The streams of one scheduler."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = [group for group in groups if not group.is_state]  # a state is sent at the end
        self._states = [group.index for group in groups if group.is_state]
        self._row_tokens = math.lcm(*(group.row_tokens for group in groups))
        self.of: dict[str, Stream] = {}
        """By request, until prefill has finished it."""

    def begin(self, request: Request, room: str) -> bool:
        """From now on the scheduled tokens of `request` go to `room`; false if they do not. Of several samples of one
        prompt only the first does: all have one room, and the same KV.
        """
        if any(other.room == room for other in self.of.values()):
            return False
        self.of[request.request_id] = Stream(request, room)
        return True

    def step(self, output: SchedulerOutput) -> tuple[dict[str, bool], dict[str, Chunk]]:
        """The requests that lost their blocks before this step, or what is in them, and for each whether others write
        there before a worker can wait; and the tokens that this step computes.
        """
        if not self.of:
            return {}, {}
        preempted = self._preempted(output)
        chunks = {}
        for name, stream in self.of.items():
            n_scheduled = output.num_scheduled_tokens.get(name)
            if n_scheduled is None or (blocks := output.kv_connector_block_state.get_block_ids(name)) is None:
                continue
            if stream.request.num_computed_tokens < stream.stop:
                # Another connector's blocks did not come: what was sent of them is wrong, and computed again in place.
                preempted[name] = True
                stream.stop = 0
                stream.blocks.clear()
            n_prompt = stream.request.num_prompt_tokens
            stop = stream.request.num_computed_tokens + n_scheduled
            stop = n_prompt if stop >= n_prompt else stop - stop % self._row_tokens
            if stop > stream.stop:
                held = {}
                for group in self._groups:  # of a window only what is still read once the whole prompt is computed
                    start = max(stream.stop, group.needed_from(n_prompt))
                    one = group.held(blocks[group.index], stop, start)
                    if one.tokens is not None and one.tokens[0] < one.tokens[1]:
                        held[group.component] = one
                chunks[name] = Chunk(held, stop)
                stream.blocks.update(*(one.blocks for one in held.values()))
                stream.stop, stream.has_begun = stop, True
        return preempted, chunks

    def _preempted(self, output: SchedulerOutput) -> dict[str, bool]:
        """vLLM's second model runner zeroes new blocks, and copies others and states into them, before it calls
        `handle_preemptions`.
        """
        lost = [name for name in output.preempted_req_ids or () if name in self.of]
        if not lost:
            return {}
        written = {*(output.new_block_ids_to_zero or ()), *(copy[1] for copy in output.kv_cache_block_copies or ())}
        new = [one.block_ids for one in output.scheduled_new_reqs] + output.scheduled_cached_reqs.new_block_ids
        written.update(*(blocks[index] for blocks in new if blocks is not None for index in self._states))
        preempted = {}
        for name in lost:
            stream = self.of[name]
            preempted[name] = not stream.blocks.isdisjoint(written)
            stream.stop = 0
            stream.blocks.clear()
        return preempted


class Layers(NamedTuple):
    """The layers that a forward pass has computed of its chunks, from `start` to `stop`; `ready` is the event of their
    end. `is_last`: no others follow.
    """

    start: int
    stop: int
    ready: CudaEvent | None
    is_last: bool


class LayerGroups:
    """Which layers of a step's chunks are sent together, at a worker. `numbers` are those of its layers with tokens, by
    name.

    A group is sent one layer after its last: only then everything with its layer numbers is written, such as an
    indexer's keys beside attention's. All are one group unless layers are numbered as they run: a draft model runs
    when the model has run.
    """

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self._numbers = numbers
        self._ordered = sorted(set(numbers.values()))
        self._in_order = list(numbers.values()) == sorted(numbers.values())
        self._start = 0
        self._firsts: deque[int] = deque()
        """The first layer of each group that has not begun."""

    def begin(self, n_groups: int) -> None:
        """A step begins whose layers are sent in `n_groups` groups, the last one when the step is done."""
        n = len(self._ordered)
        n_groups = min(n_groups, n) if self._in_order else 1
        self._start = 0
        self._firsts = deque(self._ordered[n * i // n_groups] for i in range(1, n_groups))

    def passed(self, name: str) -> Range | None:
        """The layers to send, now that this one is computed."""
        number, start = self._numbers.get(name, -1), self._start
        while self._firsts and number >= self._firsts[0]:
            self._start = self._firsts.popleft()
        return (start, self._start) if self._start > start else None

    def rest(self) -> Range:
        """The layers to send when the step is done: all, if it did not report any."""
        self._firsts.clear()
        return self._start, self._ordered[-1] + 1


@dataclass
class EarlySender:
    """One room, at a worker. `given` is the token up to which the room has got its blocks, `hold_s` how long it is held
    for decode once the request is computed.
    """

    sender: Sender
    hold_s: float
    given: int = 0
    _waiting: list[tuple[Chunk, Layers]] = field(default_factory=list)

    def computed(self, chunk: Chunk, layers: Layers) -> Iterable[tuple[dict[str, Held], Layers]]:
        """A step computed `layers` of `chunk`. Yields what the room gets now."""
        self._waiting.append((chunk, layers))
        if not self.sender.opened:
            return
        waiting, self._waiting = self._waiting, []
        for one, some in waiting:
            held = self.rest_of(one.held)
            if some.is_last:
                self.given = max(self.given, one.stop)
            if held:
                yield held, some

    def rest_of(self, held: Mapping[str, Held]) -> dict[str, Held]:
        """`held` without the tokens that the room has got."""
        rest = {}
        for component, one in held.items():
            if one.tokens is not None and one.tokens[0] < self.given:
                if one.tokens[1] <= self.given:
                    continue
                one = one._replace(tokens=(self.given, one.tokens[1]))  # noqa: PLW2901
            rest[component] = one
        return rest

    def preempted(self, request_id: str, *, is_overwritten: bool) -> None:
        """Its blocks are about to be written, by another request or, after a failed load, anew. Blocks that the room
        has not got come again; blocks that it has got must be sent first. The room fails if that takes too long, or if
        they are being overwritten already.
        """
        self._waiting.clear()
        if not self.given:
            return
        why = "are being written already"
        if not is_overwritten:
            try:
                self.sender.wait_carried(_CARRIED_S)
            except TimeoutError:
                why = f"were not read in {_CARRIED_S} s"
            else:
                return
        log.warning("request %s is computed again, and not sent: its blocks %s", request_id, why)
        self.sender.abort("prefill computes the request again")

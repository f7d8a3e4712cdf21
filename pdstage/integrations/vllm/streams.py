"""Requests that prefill hands over while it computes them: what the scheduler's side and a worker remember of each.

A router that asks both engines at once names the room itself, by `transfer_id`. So decode opens it while prefill works,
and what a step computes is handed over at that step's end. Until decode has opened the room nothing is given to it:
vLLM may preempt the request, and compute it again in other blocks.
"""

from __future__ import annotations

import logging
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
    from pdstage.manager.handle import CudaEvent

log = logging.getLogger(__name__)

_CARRIED_S = 2.0
"""How long a preemption waits for what is on its way, with the engine's step; then the request fails at decode."""


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
    """Those of one scheduler, by request id, until prefill has finished them."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = [group for group in groups if not group.is_state]  # a state is handed over at the end
        self._streams: dict[str, Stream] = {}

    def begin(self, request: Request, room: str) -> bool:
        """From now on what is scheduled of `request` goes to `room`; false where it does not. Of the samples of one
        prompt only the first does: all have one room, and the same KV.
        """
        if any(other.room == room for other in self._streams.values()):
            return False
        self._streams[request.request_id] = Stream(request, room)
        return True

    def end(self, request_id: str) -> Stream | None:
        """No more of it is scheduled."""
        return self._streams.pop(request_id, None)

    def step(self, output: SchedulerOutput) -> tuple[dict[str, bool], dict[str, Chunk]]:
        """Those that lost their blocks before this step, and whether it writes them before a worker can wait; and what
        this step computes of those that it has.
        """
        if not self._streams:
            return {}, {}
        preempted = self._preempted(output)
        chunks = {}
        for name, n_scheduled in output.num_scheduled_tokens.items():
            stream = self._streams.get(name)
            blocks = output.kv_connector_block_state.get_block_ids(name) if stream is not None else None
            if stream is not None and blocks is not None:
                n_prompt = stream.request.num_prompt_tokens
                stop = min(stream.request.num_computed_tokens + n_scheduled, n_prompt)
                if stop > stream.stop:
                    held = self._held(blocks, stream.stop, stop, n_prompt)
                    chunks[name] = Chunk(stream.room, held, stop)
                    stream.blocks.update(*(one.blocks for one in held.values()))
                    stream.stop, stream.has_begun = stop, True
        return preempted, chunks

    def _preempted(self, output: SchedulerOutput) -> dict[str, bool]:
        """vLLM's second model runner zeroes new blocks, and copies others into them, before `handle_preemptions`."""
        lost = [name for name in output.preempted_req_ids or () if name in self._streams]
        if not lost:
            return {}
        written = {*(output.new_block_ids_to_zero or ()), *(copy[1] for copy in output.kv_cache_block_copies or ())}
        preempted = {}
        for name in lost:
            stream = self._streams[name]
            preempted[name] = not stream.blocks.isdisjoint(written)
            stream.stop = 0
            stream.blocks.clear()
        return preempted

    def _held(self, blocks: Sequence[Sequence[int]], start: int, stop: int, n_prompt: int) -> dict[str, Held]:
        """Tokens `start` to `stop`, of a window only those that are still read once the whole prompt is computed."""
        held = {}
        for group in self._groups:
            one = group.held(blocks[group.index], stop, max(start, group.needed_from(n_prompt)))
            if one.tokens is not None and one.tokens[0] < one.tokens[1]:
                held[group.component] = one
        return held


class Layers(NamedTuple):
    """What a forward pass has computed of its chunks: these layers, from `start` to `stop`, `ready` once it is done.
    `is_last`: there are no others.
    """

    start: int
    stop: int
    ready: CudaEvent | None
    is_last: bool


class LayerGroups:
    """Which layers of a step's chunks go together, at a worker. `numbers` are of its layers with tokens, by name.

    A group goes once a layer after it is computed: only then all is written that layers of its numbers have, such as
    an indexer's keys beside attention's.
    """

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self._numbers = numbers
        self._ordered = sorted(set(numbers.values()))
        self._start = 0
        self._firsts: deque[int] = deque()
        """The first layer of each group that is not yet begun."""

    def begin(self, n_groups: int) -> None:
        """A step whose layers are handed over in so many groups, the last one when the step is done."""
        n = len(self._ordered)
        n_groups = min(n_groups, n)
        self._start = 0
        self._firsts = deque(self._ordered[n * i // n_groups] for i in range(1, n_groups))

    def passed(self, name: str) -> tuple[int, int] | None:
        """The layers that go, now that this one is computed."""
        number, start = self._numbers.get(name, -1), self._start
        while self._firsts and number >= self._firsts[0]:
            self._start = self._firsts.popleft()
        return (start, self._start) if self._start > start else None

    def rest(self) -> tuple[int, int]:
        """The layers that go when the step is done: all, where it did not say which it had computed."""
        self._firsts.clear()
        return self._start, self._ordered[-1] + 1


@dataclass
class EarlySender:
    """One room, at a worker. `given` is up to which token the room has been given what it needs."""

    sender: Sender
    given: int = 0
    _waiting: list[tuple[Chunk, Layers]] = field(default_factory=list)

    def computed(self, chunk: Chunk, layers: Layers) -> Iterable[tuple[dict[str, Held], Layers]]:
        """A step computed `layers` of `chunk`: what is to be given to the room now."""
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
        """`held` without the tokens that the room has been given."""
        rest = {}
        for component, one in held.items():
            if one.tokens is not None and one.tokens[0] < self.given:
                if one.tokens[1] <= self.given:
                    continue
                one = one._replace(tokens=(self.given, one.tokens[1]))  # noqa: PLW2901
            rest[component] = one
        return rest

    def preempted(self, request_id: str, *, is_overwritten: bool) -> None:
        """Its blocks are about to be another request's: what was not given comes again, what was given must be there
        before. Where that takes too long, or they are being written already, the room fails.
        """
        self._waiting.clear()
        if not self.given:
            return
        if is_overwritten:
            log.warning("request %s is preempted, and not sent: its blocks are being written already", request_id)
            self.sender.abort("the request was preempted at prefill")
            return
        try:
            self.sender.wait_carried(_CARRIED_S)
        except TimeoutError:
            log.warning(
                "request %s is preempted, and not sent: its blocks were not read in %s s", request_id, _CARRIED_S
            )
            self.sender.abort("the request was preempted at prefill")

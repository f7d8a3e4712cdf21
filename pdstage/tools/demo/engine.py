"""The engine's work apart from transfers: chunked prefill, and greedy decoding of several rooms.

`LlamaEngine` computes with all ranks of its side together; `whole` has the other engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pdstage.tools.demo.llama import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pdstage.tools.demo.group import Group
    from pdstage.tools.demo.holding import Spans
    from pdstage.tools.demo.llama import ShardedLlama
    from pdstage.tools.demo.pools import PagedPool, Pool, Room

COMPONENT = "kv"


class Step(NamedTuple):
    """Tokens `[start, stop)` of a prompt are computed, and `token` is next; `spans` are now in the pools."""

    start: int
    stop: int
    token: int
    spans: Spans


class Context(NamedTuple):
    """A room to decode: `n_tokens` of it are in the pools, and `first` is next."""

    room: Room
    n_tokens: int
    first: int


class Engine(Protocol):
    """One rank's engine. All ranks of a side make the same calls."""

    @property
    def pools(self) -> Mapping[str, Pool]:
        """This rank's pools, by component."""

    @property
    def components(self) -> Sequence[str]:
        """The components of the whole model."""

    @property
    def group(self) -> Group: ...

    def admit(self, n_tokens: int, room_for: int) -> Room:
        """Allocates pages and slots for a prompt and `room_for` more tokens."""

    def release(self, room: Room) -> None: ...

    def prefill(self, prompt: Sequence[int], room: Room, chunk_tokens: int) -> Iterator[Step]:
        """Computes `prompt` chunk by chunk."""

    def decode(self, contexts: Sequence[Context], n_tokens: int, stepped: Callable[[], None] = ...) -> list[list[int]]:
        """Continues all rooms together by `n_tokens`; calls `stepped` after each token.

        Returns each room's tokens, the first one included. May be called again for the same contexts.
        """

    def spoil(self, component: str, room: Room, seed: int) -> Callable[[], None]:
        """Overwrites a page or slot of the room with noise on one rank. Returns a function that restores it."""


@dataclass(frozen=True, slots=True)
class LlamaEngine:
    """One rank of the sharded Llama: its model, its pool and its group."""

    model: ShardedLlama
    kv: PagedPool
    group: Group

    @property
    def pools(self) -> Mapping[str, Pool]:
        return {COMPONENT: self.kv}

    @property
    def components(self) -> Sequence[str]:
        return (COMPONENT,)

    def admit(self, n_tokens: int, room_for: int) -> Room:
        return {COMPONENT: self.kv.allocate(0, n_tokens, room_for=room_for)}

    def release(self, room: Room) -> None:
        self.kv.free(room[COMPONENT])

    def prefill(self, prompt: Sequence[int], room: Room, chunk_tokens: int) -> Iterator[Step]:
        for start in range(0, len(prompt), chunk_tokens):
            part = prompt[start : start + chunk_tokens]
            logits = self.model.forward(part, [Segment(room[COMPONENT], start, len(part))], self.kv)
            (token,) = self.group.agree(logits.argmax(-1).tolist())
            stop = start + len(part)
            yield Step(start, stop, token, {COMPONENT: (start, stop)})

    def decode(
        self, contexts: Sequence[Context], n_tokens: int, stepped: Callable[[], None] = lambda: None
    ) -> list[list[int]]:
        rooms = [[context.first] for context in contexts]
        for step in range(n_tokens):
            segments = [Segment(room[COMPONENT], held + step, 1) for room, held, _ in contexts]
            logits = self.model.forward([tokens[-1] for tokens in rooms], segments, self.kv)
            for tokens, token in zip(rooms, self.group.agree(logits.argmax(-1).tolist()), strict=True):
                tokens.append(token)
            stepped()
        return rooms

    def spoil(self, component: str, room: Room, seed: int) -> Callable[[], None]:
        return self.kv.spoil(room[component], seed) if self.group.rank == 0 else lambda: None

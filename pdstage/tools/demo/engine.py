"""The engine: each prefill rank computes the whole model, and stores and sends only its share.

Splitting seven models' arithmetic over ranks would take seven engines, and the demo is about the cache. So a prefill
rank runs transformers' own model on the whole prompt. It keeps in its pools what a rank at its place in TP and PP would
hold: its KV heads, its layers, its channels and heads of the states, the window's pages of sliding layers, and latents
and index keys like every rank. A decode rank's pools get only what pdstage transfers. Decode rank 0 then assembles the
ranks' parts in a fresh cache and continues with transformers' own model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pdstage.errors import PdstageError
from pdstage.tools.demo import cache as caches
from pdstage.tools.demo.holding import Holding, put_together

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pdstage.tools.demo.group import Group
    from pdstage.tools.demo.holding import Spans
    from pdstage.tools.demo.pools import Pool, Room
    from pdstage.tools.demo.reference import Model


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


class Engine:
    """One rank's: the model, its pools, and its group. All ranks of a side make the same calls."""

    def __init__(self, model: Model, holding: Holding, group: Group) -> None:
        self.group = group
        self._model = model
        self._holding = holding
        self._spoilt = False

    @property
    def pools(self) -> Mapping[str, Pool]:
        """This rank's pools, by component."""
        return self._holding.pools

    @property
    def components(self) -> Sequence[str]:
        """The components of the whole model."""
        return tuple(self._holding.family.components(self._holding.kv_heads))

    def admit(self, n_tokens: int) -> Room:
        """Pages and slots for a prompt; decode's new tokens stay in its cache."""
        return self._holding.admit(n_tokens)

    def release(self, room: Room) -> None:
        self._holding.release(room)

    def prefill(self, prompt: Sequence[int], room: Room, chunk_tokens: int) -> Iterator[Step]:
        """Computes `prompt` chunk by chunk."""
        held, cache = self._holding, self._model.new_cache()
        for start in range(0, len(prompt), chunk_tokens):
            part = prompt[start : start + chunk_tokens]
            logits = self._model.forward(part, cache)
            stop = start + len(part)
            spans = held.fresh(start, stop, len(prompt))
            held.keep(room, caches.read(cache, held.family, held.kv_heads, spans), spans)
            yield Step(start, stop, int(logits.argmax()), spans)

    def decode(
        self, contexts: Sequence[Context], n_tokens: int, stepped: Callable[[], None] = lambda: None
    ) -> list[list[int]]:
        """Continues all rooms by `n_tokens`; calls `stepped` after each token. Rank 0 computes; the others send their
        parts and receive the tokens. Returns each room's tokens, the first one included. May be called again.
        """
        held = [self._gather(context) for context in contexts]
        rooms = [[context.first] for context in contexts]
        for _ in range(n_tokens):
            chosen = [0] * len(rooms)
            if self.group.rank == 0:
                chosen = [
                    int(self._model.forward(tokens[-1:], cache).argmax())
                    for tokens, cache in zip(rooms, held, strict=True)
                ]
            for tokens, token in zip(rooms, self.group.agree(chosen), strict=True):
                tokens.append(token)
            stepped()
        return rooms

    def spoil(self, component: str, room: Room, seed: int) -> Callable[[], None]:
        """Overwrites a page or slot of the room with noise, at the first rank of the first stage that has the
        component: rank 0 reads that copy. Returns a function that restores it.
        """
        layers = self._holding.family.layers_of(component, self._holding.kv_heads)
        first = self._holding.place.tp_rank == 0 and layers[0] in self._holding.layers
        restore = self.pools[component].spoil(room[component], seed) if first else lambda: None
        self._spoilt = True

        def put_back() -> None:
            restore()
            self._spoilt = False

        return put_back

    def _gather(self, context: Context) -> object:
        """A fresh cache with the room as all ranks together hold it, at rank 0; None elsewhere.

        Raises `PdstageError` if two ranks' copies of the same part differ, unless one was spoilt on purpose.
        """
        held = self._holding
        everyone = self.group.gather((held.place, held.parts(context.room)))
        if not everyone:
            return None
        places, parts = zip(*everyone, strict=True)
        states, differing = put_together(held.family, held.kv_heads, places, parts)
        if differing and not self._spoilt:
            key = min(differing)
            raise PdstageError(f"decode ranks hold different copies of {key}", remedy="report this as a bug")
        cache = self._model.new_cache()
        caches.write(cache, states, context.n_tokens)
        return cache

"""What one rank keeps of a model's state: its layers and its parts of every tensor, in its own pools."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from pdstage import Key
from pdstage.tools.demo.families import PAGES, SLOT, Family, stage_layers
from pdstage.tools.demo.pools import PagedPool, PagedShape, SlotPool, pages_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdstage.layout.topology import Topology
    from pdstage.tools.demo.families import Field
    from pdstage.tools.demo.pools import Pool, Room

States: TypeAlias = "dict[Key, torch.Tensor]"
"""Tensors `[tokens, parts, *inner]` or `[parts, *inner]`, by component, role and layer."""
Spans: TypeAlias = "Mapping[str, tuple[int, int]]"
"""Tokens `[start, stop)` by component; `(0, 1)` for a slot."""

SPARE_PAGES = 16


class Holding:
    """One rank's share of `family` with `kv_heads` KV heads; `lengths` are those of the prompts held at once."""

    def __init__(
        self,
        family: Family,
        kv_heads: int,
        place: Topology,
        *,
        order: str,
        page_size: int,
        lengths: Sequence[int],
        seed: int,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> None:
        """`dtype` and `device` are those of pages."""
        self.family, self.kv_heads, self.place = family, kv_heads, place
        self.layers = stage_layers(len(family.layers), place)
        self._fields = family.components(kv_heads)
        n_pages = sum(pages_for(n, page_size) for n in lengths) + SPARE_PAGES
        self.pools: dict[str, Pool] = {}
        for i, (component, fields) in enumerate(self._fields.items()):
            layers = [n for n in family.layers_of(component, kv_heads) if n in self.layers]
            if layers and fields[0].kept == SLOT:
                self.pools[component] = self._slots(order, len(lengths) + 1, layers, fields, seed + i)
            elif layers:
                shape = self._paged_shape(order, n_pages, page_size, layers, fields)
                self.pools[component] = PagedPool(replace(shape, dtype=dtype, device=device), seed + i)

    def _slots(self, order: str, n_slots: int, layers: Sequence[int], fields: Sequence[Field], seed: int) -> SlotPool:
        shapes = {f.role: ((f.n_parts(tp_of(self.place)), *f.inner), getattr(torch, f.dtype)) for f in fields}
        sections = {f.role: f.sections for f in fields}
        return SlotPool(order, n_slots, layers, shapes=shapes, sections=sections, seed=seed)

    def _paged_shape(
        self, order: str, n_pages: int, page_size: int, layers: Sequence[int], fields: Sequence[Field]
    ) -> PagedShape:
        (section,) = fields[0].sections
        widths = {f.role: f.inner[0] for f in fields}
        return PagedShape(
            order=order, n_pages=n_pages, page_size=page_size, layers=layers, widths=widths,
            heads=fields[0].n_parts(tp_of(self.place)), total_heads=section.heads,
        )  # fmt: skip

    def admit(self, n_tokens: int) -> Room:
        """Pages and slots for a prompt; of a sliding window only the pages of its end."""
        return {name: pool.allocate(*self._asked(name, n_tokens)) for name, pool in self.pools.items()}

    def release(self, room: Room) -> None:
        for component, table in room.items():
            self.pools[component].free(table)

    def fresh(self, start: int, stop: int, n_tokens: int) -> Spans:
        """The tokens of each component that are ready once tokens `[start, stop)` of `n_tokens` are computed.

        Windows and slots are ready only at the end.
        """
        spans = {}
        for component, fields in self._fields.items():
            if fields[0].kept == PAGES:
                spans[component] = (start, stop)
            elif stop == n_tokens:
                spans[component] = self._asked(component, n_tokens)
        return spans

    def _asked(self, component: str, n_tokens: int) -> tuple[int, int]:
        match self._fields[component][0].kept:
            case "slot":
                return 0, 1
            case "window":  # the next token sees itself and the window - 1 tokens before
                return max(0, n_tokens - self.family.window + 1), n_tokens
            case _:
                return 0, n_tokens

    def keep(self, room: Room, states: States, spans: Spans) -> None:
        """Stores in its pools this rank's parts of `states`, which are whole tensors of the tokens `spans`."""
        for component, table in room.items():
            if component not in spans:
                continue
            pool, fields = self.pools[component], self._fields[component]
            for layer in pool.layers:
                parts = [cut(states[Key(component, f.role, layer)], f, self.place) for f in fields]
                pool.store(layer, table, spans[component][0], *parts)

    def parts(self, room: Room) -> States:
        """Everything that this rank holds of a room."""
        held: States = {}
        for component, table in room.items():
            pool = self.pools[component]
            for layer in pool.layers:
                loaded = pool.load(layer, table, table.start, table.stop)
                held |= {Key(component, role, layer): part for role, part in zip(pool.tensors, loaded, strict=True)}
        return held


def tp_of(place: Topology) -> tuple[int, int]:
    return place.tp_size, place.tp_rank


def cut(whole: torch.Tensor, field: Field, place: Topology) -> torch.Tensor:
    """A rank's parts of a whole tensor."""
    axis = 0 if field.kept == SLOT else 1
    return torch.cat([whole.narrow(axis, run.whole, run.n_parts) for run in field.runs(tp_of(place))], axis)


def put_together(
    family: Family, kv_heads: int, places: Sequence[Topology], held: Sequence[States]
) -> tuple[States, set[Key]]:
    """The whole tensors, assembled from the ranks at `places`; and the keys of which two ranks hold different copies.

    Of several copies the first rank's is used. Missing parts are NaN.
    """
    fields = {(f.component, f.role): f for named in family.components(kv_heads).values() for f in named}
    whole: States = {}
    differing: set[Key] = set()
    seen: set[tuple[Key, int]] = set()
    # Backwards, so that the first rank's copy is written last.
    for place, states in sorted(zip(places, held, strict=True), key=lambda one: -one[0].group_rank):
        for key, part in states.items():
            field = fields[key.component, key.role]
            axis = 0 if field.kept == SLOT else 1
            if key not in whole:
                size = [*part.shape]
                size[axis] = field.n_parts()
                whole[key] = torch.full(size, torch.nan, dtype=part.dtype)
            for run in field.runs(tp_of(place)):
                here, new = whole[key].narrow(axis, run.whole, run.n_parts), part.narrow(axis, run.own, run.n_parts)
                if (key, run.whole) in seen and not torch.equal(here, new):
                    differing.add(key)
                seen.add((key, run.whole))
                here.copy_(new)
    return whole, differing

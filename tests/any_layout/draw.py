"""Drawn descriptions: models' components as engines keep them, on two engines that agree on little."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from tests.any_layout.describe import DIMS, Case, Logical, Role, Side, Span, Stored

PAGES = (1, 2, 4, 8, 16, 32, 64, 3, 5, 6, 7, 12, 24, 48)
WIDTHS = (8, 16, 4, 32, 2, 1, 3, 5, 12, 24, 40)
TP = (1, 2, 1, 2, 1, 2, 1, 4, 1, 2, 3, 1, 2, 1, 2, 4, 1, 2, 1, 2, 3, 1, 2, 5, 6, 7, 8)  # all pairs have a test


class Draws(random.Random):
    def pick(self, *options):
        return self.choice(options)

    def seldom(self, one_in: int) -> bool:
        return not self.randrange(one_in)

    def shuffled(self, values: Sequence) -> list:
        return self.sample(values, len(values))

    def cuts(self, n: int, most: int) -> list[int]:
        """`[0, ..., n]` with at most `most` ascending places between."""
        return [0, *sorted({self.randint(1, n - 1) for _ in range(self.randint(0, most))} if n > 1 else ()), n]


# How engines nest a page's dimensions; "layer" comes first where each layer has an allocation of its own.
NHD = ("role", "layer", "item", "block", "row", "shard", "seg")
HND = ("role", "layer", "item", "shard", "block", "row", "seg")
FUSED = ("layer", "item", "block", "row", "shard", "role", "seg")
HALVES = ("layer", "item", "role", "block", "row", "shard", "seg")
BLOCK_FIRST = ("item", "layer", "role", "block", "row", "shard", "seg")
BLOCK_FIRST_HND = ("item", "shard", "layer", "block", "row", "role", "seg")
KERNEL_PAGES = ("layer", "item", "block", "role", "row", "shard", "seg")
HND_HALVES = ("layer", "item", "role", "shard", "block", "row", "seg")
SEGS_FIRST = ("role", "layer", "item", "block", "row", "seg", "shard")
NAMED = (NHD, HND, FUSED, HALVES, BLOCK_FIRST, BLOCK_FIRST_HND, KERNEL_PAGES, SEGS_FIRST)


def _heads(draws: Draws) -> int:
    return draws.pick(2, 4, 1, 8, 3, 5, 6, 12)


def kv(draws: Draws) -> list[Role]:
    heads, width = _heads(draws), draws.pick(*WIDTHS)
    return [Role("k", "kv_head", heads, 1, width), Role("v", "kv_head", heads, 1, draws.pick(width, width, 24))]


def mla(draws: Draws) -> list[Role]:
    return [Role("latent", None, 1, 1, draws.pick(24, 72, 144, 18))]


def dsa(draws: Draws) -> list[Role]:
    return [Role("key", None, 1, 1, draws.pick(16, 32, 132)), Role("scale", None, 1, 1, 4)]


def compressed(draws: Draws) -> list[Role]:
    """Rows of several tokens, of one reach or of two, and sharded or not."""
    per, axis = draws.pick(2, 4, 8), draws.pick(None, "kv_head")
    latent = Role("latent", axis, _heads(draws) if axis else 1, 1, draws.pick(*WIDTHS), per)
    return [latent, latent._replace(name="scale", width=draws.pick(2, 1, 4), tokens_per_row=draws.pick(per, 1))]


def mamba(draws: Draws) -> list[Role]:
    """A convolution's columns by sections, `[q|k|v]` or `[x|B|C]`, and the state by heads."""
    columns, k_heads = draws.pick(3, 4), draws.pick(2, 1, 4)
    v_heads = k_heads * draws.pick(1, 2)
    small = draws.pick(("k_head", k_heads), (None, 1))
    one_run = draws.pick(False, True)
    sections = [("q", *small), ("k", *small), ("v", "v_head", v_heads)]
    found = []
    for name, axis, total in sections:
        width = draws.pick(8, 4, 12, 2)
        found.append(Role(f"conv_{name}", axis, total, *((1, columns * width) if one_run else (columns, width))))
    return [*found, Role("ssm", "v_head", v_heads, 1, draws.pick(64, 48, 20))]


KINDS: dict[str, Callable[[Draws], list[Role]]] = {
    "kv": kv,
    "mla": mla,
    "mamba": mamba,
    "swa": kv,
    "dsa": dsa,
    "compressed": compressed,
}


def allowed(nest: Sequence[str], roles: Sequence[Role]) -> tuple[str, ...]:
    """`nest` with what differs between roles moved behind "role"."""
    differ = {
        "row": len({role.tokens_per_row for role in roles}) > 1,
        "shard": len({(role.axis, role.total) for role in roles}) > 1,
        "seg": len({role.segs for role in roles}) > 1,
    }
    at = nest.index("role")
    late = [dim for dim in nest[:at] if differ.get(dim)]
    return (*(dim for dim in nest[:at] if dim not in late), "role", *late, *nest[at + 1 :])


def _stored(draws: Draws, of: Logical, heads_first: bool, twin: Stored | None) -> Stored:
    """`twin` is the other side's, which this one often resembles: `heads_first` both must, to be staged that way."""
    if twin is not None and draws.seldom(4):
        return twin
    per = of.tokens_per_row
    page = draws.pick(*PAGES) if of.positional else 1
    page = -(-page // per) * per
    if twin is not None and draws.seldom(2 if heads_first else 5):
        page = twin.page
    pads = {draws.pick("seg", "item", *DIMS): draws.pick(8, 16, 3, 64, 1) for _ in range(draws.pick(0, 0, 1, 2))}
    nest = draws.pick(*NAMED) if not draws.seldom(5) else tuple(draws.shuffled(DIMS))
    block = draws.pick(0, 0, 0, 0, 1, 2, 3, 4, 16) * per if of.name != "dsa" else draws.pick(0, 1, 2, 4, 16)
    if heads_first:
        nest, block = draws.pick(HND, HND_HALVES), 0
        pads = {dim: nbytes for dim, nbytes in pads.items() if dim in ("item", "shard", "layer", "role")}
    skew, spare_items = draws.pick(0, 0, 0, 16, 1, 40), draws.pick(0, 1, 3)
    return Stored(page, allowed(nest, of.roles), pads, min(block, page), skew, spare_items)


def _sides(
    draws: Draws,
    logical: Sequence[Logical],
    heads_first: bool,
    n_layers: int,
    tp: tuple[int | None, int | None],
    most_stages: int,
) -> list[Side]:
    sides: list[Side] = []
    for size in tp:
        n_stages = min(n_layers, draws.pick(1, 1, 1, 1, 1, 2, 2, 3), most_stages)
        cuts = (0, *sorted(draws.shuffled(range(1, n_layers))[: n_stages - 1]), n_layers)
        other = sides[0].stored if sides else {}
        stored = {of.name: _stored(draws, of, heads_first, other.get(of.name)) for of in logical}
        tp_size = size or draws.pick(*TP)
        axes = {(role.axis, role.total) for of in logical for role in of.roles if role.axis and role.total > tp_size}
        uneven = {
            axis: (0, *sorted(draws.shuffled(range(1, axis[1]))[: tp_size - 1]), axis[1])
            for axis in sorted(axes)
            if draws.seldom(8)
        }
        cp = draws.pick(1, 1, 1, 1, 2, 1, 3) if size is None else 1
        parted = {of.name: _interleave(draws, of) for of in logical if of.positional and cp > 1 and not draws.seldom(4)}
        sides.append(Side(tp_size, cuts, stored, draws.pick(False, False, True), uneven, cp, parted))
    return sides


def _interleave(draws: Draws, of: Logical) -> int:
    """Tokens of a block: no row of several is split between ranks."""
    if of.tokens_per_row > 1:
        return of.tokens_per_row * draws.pick(1, 2, 4)
    return draws.pick(1, 16, 64, 3, 4)


def _logical(draws: Draws, kind: str, n_layers: int) -> Logical:
    every = draws.pick(1, 1, 2, 3)
    layers = [layer for layer in range(n_layers) if (layer % every == every - 1)] or [n_layers - 1]
    return Logical(kind, tuple(layers), tuple(KINDS[kind](draws)), kind != "mamba")


def _first_tokens(draws: Draws, of: Logical, sides: tuple[Stored, Stored], start: int) -> list[Stored]:
    """From where each side's items reach: a page's begin, as nodes require, or any row where pages differ anyhow."""
    found, loose = [], sides[0].page != sides[1].page and draws.seldom(8)
    for how in sides:
        step = of.tokens_per_row if loose else how.page
        found.append(replace(how, first_token=draws.pick(start // step, 0, start // step // 2) * step))
    return found


def _spans(draws: Draws, of: Logical, start: int, stop: int, n_layers: int) -> list[Span]:
    row = of.tokens_per_row  # no two chunks share one
    cuts = draws.cuts(-(-(stop - start) // row), draws.pick(0, 0, 1, 3)) if start < stop else []
    tokens = [min(start + cut * row, stop) for cut in cuts]
    layers = draws.cuts(n_layers, draws.pick(0, 0, 1, 2))
    return [Span(of.name, a, b, low, high) for low, high in pairwise(layers) for a, b in pairwise(tokens) if a < b]


def _chunks(draws: Draws, spans: list[Span]) -> tuple[tuple[Span, ...], ...]:
    """Spans of different components travel together or apart, in any order."""
    chunks: list[list[Span]] = []
    for span in draws.shuffled(spans):
        if chunks and all(one.component != span.component for one in chunks[-1]) and draws.pick(True, True, False):
            chunks[-1].append(span)
        else:
            chunks.append([span])
    return tuple(tuple(sorted(chunk)) for chunk in chunks)


def draw(
    draws: Draws,
    *,
    kinds: Sequence[str] | None = None,
    tp: tuple[int | None, int | None] = (None, None),
    most_stages: int = 3,
) -> Case:
    """One transfer between two engines; of given kinds and TP sizes where these are given."""
    n_layers = draws.pick(1, 2, 3, 4, 2, 5)
    heads_first = draws.seldom(3)
    fitting = [kind for kind in KINDS if kind != "mamba" or not heads_first]  # slots have no pages to order heads in
    chosen = kinds or draws.shuffled(fitting)[: draws.pick(1, 2, 1, 1, 3, 1, 2)]
    logical = tuple(_logical(draws, kind, n_layers) for kind in chosen)
    src, dst = _sides(draws, logical, heads_first, n_layers, tp, most_stages)
    n_tokens = draws.pick(draws.randint(1, 12), draws.randint(1, 40), draws.randint(1, 150))
    prefix = draws.pick(0, 0, draws.randint(0, n_tokens))
    asked, spans = {}, []
    for of in logical:
        start, stop = prefix, n_tokens
        if of.name == "swa":
            start = max(prefix, n_tokens - draws.randint(1, 32))
        if not of.positional:
            start, stop = 0, draws.pick(1, 2, 3)
        if draws.seldom(40):
            start = stop
        asked[of.name] = start, stop
        hows = src.stored[of.name], dst.stored[of.name]
        if of.positional:
            row = start // of.tokens_per_row * of.tokens_per_row
            if not (of.name in src.parted or of.name in dst.parted):
                src.stored[of.name], dst.stored[of.name] = _first_tokens(draws, of, hows, row)
        spans += _spans(draws, of, src.stored[of.name].first_token, stop, n_layers)
    code = "numpy" if draws.seldom(6) else "c++"
    path = draws.pick("staged", "staged", "direct", "mixed", "copy")
    limit = draws.pick(1 << 40, 1 << 40, draws.randint(128, 4096))
    checksum, order = draws.pick(False, False, True), draws.randrange(1 << 16)
    return Case(logical, src, dst, asked, _chunks(draws, spans), path, code, limit, checksum, order)

"""Change of precision in flight: which formats convert into which, and the form in which a pair stages its bytes.

docs/convert.md defines every format to the bit, kernels/convert_reference.py computes it. No torch.

One side has bf16, the other fp8. The fp8 form is staged, so half the bytes cross the wire. A bf16 source encodes while
it gathers, and a bf16 destination decodes while it scatters. The fp8 side only copies its bytes and need not know of
the conversion. A format that can be converted names its scales:

    fp8_e4m3:tensor:0x1.99999ap-4:divide     one scale a view, here 0.1, given by the engine
    fp8_e4m3:token_head                      a float32 scale behind each head's data
    fp8_e4m3:mx32:floor                      an E8M0 scale for each 32 values, behind each head's data
    fp8_e4m3:mx32:floor:data                 only the data; a view `fp8_e4m3:mx32:floor:scale:k` has the scales of "k"
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pdstage.errors import UsageError
from pdstage.layout import Key, Layout, View, with_views
from pdstage.plan.ownership import Common
from pdstage.plan.staging import TOKEN_MAJOR, Select
from pdstage.plan.token_slices import Cut

BF16 = "bf16"
E4M3 = "fp8_e4m3"
BLOCK = 32
_LOWEST, _HIGHEST = 2.0**-126, 2.0**126  # of scales; both are float32

TENSOR, TOKEN_HEAD, MX = "tensor", "token_head", "mx32"
INLINE, DATA, SCALE = "inline", "data", "scale"
RULES = {TENSOR: ("divide", "bf16"), TOKEN_HEAD: ("",), MX: ("floor", "ceil")}


@dataclass(frozen=True, slots=True)
class Encoding:
    """One view's fp8 format. `kind` says what a scale applies to, `part` whether the view has data, scales or both.

    `scale` is the one scale of kind "tensor"; `rule` picks one of two definitions of a kind; `of` is the role to which
    the scales of part "scale" belong.
    """

    kind: str
    rule: str = ""
    scale: float = 1.0
    part: str = INLINE
    of: str = ""

    def __str__(self) -> str:
        words = [
            E4M3,
            self.kind,
            *([self.scale.hex()] if self.kind == TENSOR else []),
            *([self.rule] * bool(self.rule)),
        ]
        return ":".join(words + {INLINE: [], DATA: [DATA], SCALE: [SCALE, self.of]}[self.part])

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(format: str) -> Encoding | None:
        """The encoding that a view's format names; None if it cannot be converted."""
        first, kind, *words = [*format.split(":"), ""][:6]
        if first != E4M3 or kind not in RULES:
            return None
        scale = _scale_of(words.pop(0)) if kind == TENSOR else 1.0
        rule = words.pop(0) if RULES[kind] != ("",) and words else ""
        part, of = words[0] if words else "", words[1] if len(words) > 1 else ""
        found = Encoding(kind, rule, scale, part or INLINE, of)
        known = found.part in (INLINE, DATA, SCALE) and rule in RULES[kind]
        # It must print as the same text: then nothing is missing, and each encoding has one name.
        return found if known and not math.isnan(scale) and str(found) == format else None

    @property
    def scale_bits(self) -> int:
        """`scale` as the 32 bits of a float32."""
        return int(np.float32(self.scale).view(np.uint32))

    def nbytes(self, n: int) -> int:
        """Bytes of `n` encoded values; 0 if `n` is impossible."""
        if self.kind == TENSOR:
            return n if self.part == INLINE else 0
        if self.kind == MX and n % BLOCK:
            return 0
        scales = n // BLOCK if self.kind == MX else 4
        return {INLINE: n + scales, DATA: n, SCALE: scales}[self.part]


def fp8_tensor(scale: float, rule: str = "divide") -> str:
    """The format of a view with one scale: `x` is stored as fp8 of `x / scale`; engines call it `k_scale`, `v_scale`.

    `rule`: "divide" rounds the float32 quotient, as vLLM does. "bf16" multiplies by the reciprocal and rounds to bf16
    first, as a GPU does when it divides a bf16 tensor by a number, and so does SGLang.
    """
    if not _LOWEST <= scale <= _HIGHEST:
        raise UsageError(f"an fp8 scale of {scale}", remedy="give a positive, finite float32")
    return str(_checked(Encoding(TENSOR, rule, float(np.float32(scale)))))


def fp8_token_head(part: str = INLINE, of: str = "") -> str:
    """The format of vLLM's `fp8_per_token_head` caches: each head's data, then its float32 scale.

    `part` is "data" or "scale" (`of` a role) if the two are separate views.
    """
    return str(_checked(Encoding(TOKEN_HEAD, part=part, of=of)))


def mxfp8(rule: str = "floor", part: str = INLINE, of: str = "") -> str:
    """The format of MXFP8: blocks of 32 values with a shared power of two, an E8M0 byte.

    `rule`: "floor" is the OCP specification's; "ceil" takes the smallest power that saturates nothing, as SGLang's pool
    does. `part` as in `fp8_token_head`.
    """
    return str(_checked(Encoding(MX, rule, part=part, of=of)))


def reformat(layout: Layout, formats: Mapping[Key, str]) -> Layout:
    """`layout` with other formats for the named views. It is the way to set each layer's scale.

    Raises `UsageError` for a key that the layout does not have.
    """
    unknown = next((key for key in formats if key not in layout.by_key()), None)
    if unknown is not None:
        raise UsageError(f"no view {unknown}", remedy="name views of this layout", key=unknown)
    return with_views(layout, {k: replace(layout.by_key()[k], format=formats[k]) for k in formats})


class StagedPair(NamedTuple):
    """The layouts of a source and of a destination, both in the formats in which their bytes are staged.

    Without conversion they are the two layouts themselves. Otherwise their views give sizes, shards and keys, and only
    unchanged views give addresses; `staged_only` are the components with a changed view.
    """

    offered: Layout
    taken: Layout
    staged_only: frozenset[str] = frozenset()

    @property
    def order(self) -> str | None:
        """The staged order if conversion demands one."""
        return TOKEN_MAJOR if self.staged_only else None

    def made_of(self, src: Layout, dst: Layout) -> tuple[Layout, Layout]:
        """The views of both ranks' own layouts, under the keys of the staged views."""
        return (feeding(src, self.offered), feeding(dst, self.taken)) if self.staged_only else (src, dst)

    def undecodable(self, dst: Layout) -> str:
        """Why decode's layout `dst` cannot decode the staged bytes; empty if it can.

        One plan must scatter data and its scales. Cut pages with unequal numbering need several plans.
        """
        if not self.staged_only:
            return ""
        cut, own = Cut(self.taken, Common.of(self.offered, self.taken)), dst.by_key()
        for component in self.taken.components:
            if len({cut.class_of(view.key) for view in component.views}) == 1:
                continue
            for view in component.views:
                encoding = Encoding.parse(view.format)
                if encoding is not None and encoding.part == DATA and own[view.key].format != view.format:
                    formats = f"format {view.format} at prefill, {own[view.key].format} at decode"
                    return (
                        f"{view.key}: {formats}, whose ranks hold other tokens and whose views of {component.name!r} "
                        "have pages of unequal strides: such data and its scales meet in no plan"
                    )
        return ""


def pair(src: Layout, dst: Layout) -> StagedPair:
    """Pairs two layouts whose sides have agreed to convert. Formats that cannot be converted stay unchanged."""
    held, wanted = src.by_key(), dst.by_key()
    held_scales, wanted_scales = _scale_views(src.views()), _scale_views(dst.views())
    offered: dict[Key, View] = {}
    taken: dict[Key, View] = {}
    for key, view in wanted.items():
        source = held.get(key)
        if source is None:
            continue
        theirs, ours = Encoding.parse(source.format), Encoding.parse(view.format)
        if source.format == BF16 and ours is not None and ours.part != SCALE:
            _stage(held, source, _whole(view, ours, wanted_scales.get(key)), offered)
        elif view.format == BF16 and theirs is not None and theirs.part != SCALE:
            _stage(wanted, view, _whole(source, theirs, held_scales.get(key)), taken)
    names = frozenset(key.component for key in (*offered, *taken))
    return StagedPair(with_views(src, offered), with_views(dst, taken), names) if names else StagedPair(src, dst)


def feeding(own: Layout, staged: Layout) -> Layout:
    """For each view of `staged`, under its key, the view of `own` that it is made from or becomes.

    Views that no view of `own` feeds are left out. Feeding the result again changes nothing.
    """
    views, fed = own.by_key(), {}
    for view in staged.views():
        encoding = Encoding.parse(view.format)
        source = views.get(view.key) or (encoding and views.get(view.key._replace(role=encoding.of)))
        if source:
            fed[view.key] = replace(source, key=view.key)
    return with_views(own, fed)


class Coding(NamedTuple):
    """How one staged view of a plan is made: `encoding` is None if its bytes are copied.

    `scales` is the index, in the plan's selection, of the view with this view's scales; -1 for none.
    """

    encoding: Encoding | None
    width: int
    scales: int = -1

    @property
    def decodable(self) -> bool:
        """Whether its staged form can be scattered: data needs its scales."""
        return self.encoding is None or self.encoding.part != DATA or self.scales >= 0


def codings(own: Layout, staged: Layout, select: Iterable[Select]) -> list[Coding]:
    """One coding for each selected view of `staged`; a copied view has no encoding."""
    chosen = {key: (at, start, count) for at, (key, start, count) in enumerate(select)}
    views, mine, scales = staged.by_key(), own.by_key(), _scale_views(staged.views())
    found = []
    for key, (_, *shards) in chosen.items():
        view = views[key]
        if key in mine and mine[key].format == view.format:
            found.append(Coding(None, view.width))
            continue
        at, *theirs = chosen.get(scales[key].key, (-1,)) if key in scales else (-1,)
        fits = theirs == shards and _have_scales(view, scales[key])
        found.append(Coding(_parsed(view), view.width, at if fits else -1))
    return found


def _data_key(view: View) -> Key:
    """For a view of scales, the key of its data; for any other view its own key."""
    encoding = Encoding.parse(view.format)
    return view.key._replace(role=encoding.of) if encoding is not None and encoding.part == SCALE else view.key


def _whole(data: View, encoding: Encoding, scales: View | None) -> tuple[View, ...]:
    """The views that hold encoded values: `data`, and its scales if separate; empty if those are missing."""
    if encoding.part == INLINE:
        return (data,)
    return (data, scales) if scales is not None and _have_scales(data, scales) else ()


def _stage(side: Mapping[Key, View], plain: View, coded: tuple[View, ...], into: dict[Key, View]) -> None:
    """Adds to `into` the other side's views for the bf16 side that has `plain`, all or none."""
    widths = [_parsed(view).nbytes(plain.width // 2) for view in coded]
    apart = all(view.key == plain.key or view.key not in side for view in coded)
    if apart and plain.width % 2 == 0 and all(widths) and all(view.segs == 1 for view in (plain, *coded)):
        into |= {
            view.key: replace(plain, key=view.key, width=width, format=view.format)
            for view, width in zip(coded, widths, strict=True)
        }


def _scale_views(views: Iterable[View]) -> dict[Key, View]:
    """The views of scales only, by the key of their data."""
    keyed = ((view, _data_key(view)) for view in views)
    return {key: view for view, key in keyed if key != view.key}


def _have_scales(data: View, scales: View) -> bool:
    """Whether `scales` belong to `data`: same encoding, shards and rows. Inline data has its own scales."""
    if _parsed(data).part != DATA or (scales.axis, scales.tokens_per_row) != (data.axis, data.tokens_per_row):
        return False
    return _parsed(scales) == replace(_parsed(data), part=SCALE, of=data.key.role)


_NONE = Encoding("")


def _parsed(view: View) -> Encoding:
    return Encoding.parse(view.format) or _NONE


def _checked(encoding: Encoding) -> Encoding:
    if encoding.rule not in RULES[encoding.kind]:
        raise UsageError(
            f"no rule {encoding.rule!r} of {encoding.kind}", remedy=f"use {' or '.join(RULES[encoding.kind])}"
        )
    if (
        encoding.part not in (INLINE, DATA, SCALE)
        or (encoding.part == SCALE) != bool(encoding.of)
        or ":" in encoding.of
    ):
        raise UsageError(
            f"part {encoding.part!r} of {encoding.of!r}", remedy="give inline, data, or scale and the role it is of"
        )
    return encoding


def _scale_of(word: str) -> float:
    """A scale as written by `float.hex`; NaN for any other text."""
    try:
        scale = float.fromhex(word)
    except (ValueError, OverflowError):
        return math.nan
    return scale if _LOWEST <= scale <= _HIGHEST and float(np.float32(scale)) == scale else math.nan

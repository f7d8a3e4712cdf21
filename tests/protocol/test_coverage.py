"""Coverage against the set of cells it stands for: (component, layer, token), layers in bands and stripes (I5, I7)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdstage.plan import Rect, Share
from pdstage.protocol.decode_rooms import Coverage
from pdstage.protocol.messages import Asked

MOST = 12


LAYERS = st.sampled_from([(0, 6, 1), (0, 6, 2), (1, 6, 2), (0, 3, 1), (3, 6, 1), (2, 3, 1), (0, 6, 3)])
SHARES = st.lists(
    st.builds(lambda c, r, layers: Share(c, r, layers, 0, 1), st.sampled_from("ab"), st.sampled_from("kv"), LAYERS),
    min_size=1, max_size=4,
).map(tuple)  # fmt: skip
RANGE = st.tuples(st.integers(0, MOST), st.integers(0, MOST)).map(sorted)
RECTS = st.lists(
    st.builds(
        lambda c, tokens, layers: Rect(c, *tokens, *layers),
        st.sampled_from("ab"), RANGE, st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted),
    ),
    max_size=12,
)  # fmt: skip


def owned(shares: tuple[Share, ...], component: str) -> set[int]:
    return {layer for share in shares if share.component == component for layer in range(*share.layers)}


def cells(shares: tuple[Share, ...], rect: Rect) -> set[tuple[str, int, int]]:
    layers = owned(shares, rect.component) & set(range(rect.layer_start, rect.layer_stop))
    return {(rect.component, layer, token) for layer in layers for token in range(rect.start, rect.stop)}


@given(SHARES, st.tuples(RANGE, RANGE), RECTS)
def test_coverage_is_a_set_of_cells(shares: tuple[Share, ...], ranges: tuple, rects: list[Rect]) -> None:
    asked = [Asked(name, *span) for name, span in zip("ab", ranges, strict=True)]
    coverage = Coverage(shares, asked)
    want = set().union(*(cells(shares, Rect(a.component, a.start, a.stop, 0, 6)) for a in asked))
    have: set[tuple[str, int, int]] = set()
    for rect in rects:
        span = asked[rect.component == "b"]
        inside = span.start <= rect.start < rect.stop <= span.stop
        fits = inside and bool(cells(shares, rect))
        assert (coverage.problem([rect]) == "") is fits
        if not fits:
            continue
        assert coverage.covers([rect]) is (cells(shares, rect) <= have)
        coverage.add([rect])
        coverage.add([rect])
        have |= cells(shares, rect)
        assert coverage.covers([rect])
        missing = coverage.missing()
        assert bool(missing) is (not have >= want)
        if missing:
            component, layer, token = missing.split("'")[1], int(missing.split()[2]), int(missing.split()[-1])
            assert (component, layer, token) in want - have


def test_nothing_asked_is_complete_at_once() -> None:
    assert Coverage((Share("a", "k", (0, 2, 1), 0, 1),), [Asked("a", 4, 4)]).missing() == ""
    assert Coverage((), [Asked("a", 0, 4)]).missing() == "", "a writer that owns nothing owes nothing"

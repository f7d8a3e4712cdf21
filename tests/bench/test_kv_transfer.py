"""The bench of whole requests: what it moves, that it would see a wrong byte, and every way in small."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pdstage.bench import kv_transfer
from pdstage.bench.harness import run_named
from pdstage.bench.kv_transfer import MODELS, SLOTS, Case, Kept, Memory, item_spans
from pdstage.errors import UsageError
from tests.bench.test_runs import check

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS = 256
UNEQUAL = (
    (Kept(2), Kept(1)), (Kept(1), Kept(2)), (Kept(1, 16), Kept(1, 64)), (Kept(1), Kept(1, heads_first=True)),
    (Kept(4, 16), Kept(2, 64, heads_first=True)),
)  # fmt: skip


def small() -> Iterator[Case]:
    for model in MODELS:
        yield Case(kv_transfer._scaled(model, 40), TOKENS, Kept(), Kept(), (1, 3))
    for src, dst in UNEQUAL:
        yield Case(kv_transfer._scaled(MODELS[0], 80), TOKENS, src, dst, (2,))
    yield Case(kv_transfer._scaled(MODELS[-1], 80), TOKENS, *UNEQUAL[-1], (2,))


@pytest.fixture
def in_small(monkeypatch):
    monkeypatch.setattr(kv_transfer, "cases", lambda scale, quick: small())


@pytest.mark.full
def test_every_case_over_local(in_small):
    report = run_named("kv-transfer", quick=True, transport="local")
    unequal = "TP4, pages of 16 -> TP2, pages of 64, HND"
    check(report, "staged, local: DeepSeek-V3.2", "direct, local: Qwen3-Next", unequal)
    assert {row["point"]["requests"] for row in report["rows"]} == {1, 2, 3}
    assert report["left_out"] == []


@pytest.mark.parametrize(
    ("transport", "package", "ways"),
    [
        pytest.param(
            "nixl",
            "nixl",
            ("NIXL's own lists, nixl", "NIXL's own lists by scatter-gather, nixl"),
            marks=pytest.mark.full,
        ),
        ("mooncake", "mooncake", ("Mooncake's batches",)),
    ],
)
def test_a_librarys_own_calls_beside(monkeypatch, transport, package, ways):
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed")
    monkeypatch.setattr(kv_transfer, "cases", lambda scale, quick: [next(small())])
    check(run_named("kv-transfer", quick=True, transport=transport), *ways, "staged", "direct")


def test_what_does_not_fit_is_left_out_and_said(monkeypatch):
    case = next(small())
    monkeypatch.setattr(kv_transfer, "cases", lambda scale, quick: [case, case._replace(tokens=8 * TOKENS)])
    monkeypatch.setattr(kv_transfer, "_memory", lambda: case._replace(sizes=(1,)).memory_nbytes(0))
    report = run_named("kv-transfer", quick=True, transport="local")
    left_out = [line.partition(":")[0].rpartition(", ")[2] for line in report["left_out"]]
    assert left_out == ["3 at once", "1 at once", "3 at once"]
    assert {(row["point"]["requests"], row["point"]["tokens"]) for row in report["rows"]} == {(1, TOKENS)}


def test_where_libraries_pools_do_not_fit_nodes_are_measured_alone():
    case = next(small())._replace(sizes=(1, 2, 8))
    limit = case._replace(sizes=(2,)).memory_nbytes(2)
    beside, alone = kv_transfer._fitting(case, 2, limit)
    assert beside.sizes == (1, 2) and alone.sizes == () and kv_transfer._lacking(8, beside, alone) == ["it"]
    beside, alone = kv_transfer._fitting(case, 2, case.memory_nbytes(0))
    assert beside.sizes == (1, 2) and alone.sizes == (8,)
    assert kv_transfer._lacking(8, beside, alone) == ["libraries beside"]


def test_an_option_that_a_bench_has_not():
    with pytest.raises(UsageError, match="bench wire has no --scale"):
        run_named("wire", quick=True, scale=2)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_library_moves_exactly_a_requests_bytes_and_one_wrong_byte_is_seen(model):
    case = Case(kv_transfer._scaled(model, 20), TOKENS, Kept(), Kept(), (2,))
    src, dst = Memory(case, case.src, 0), Memory(case, case.dst, 0)
    src.paint()
    here, there = (memory._words.view(np.uint8) for memory in (src, dst))
    theirs, own = (case.requests(side, 5, 2)[1] for side in ("src", "dst"))
    moved = []
    for at, to, nbytes in zip(*(item_spans(src.layout, theirs)[0], *item_spans(dst.layout, own)), strict=True):
        there[to : to + nbytes] = here[at : at + nbytes]
        moved.append((to, nbytes))
    assert sum(nbytes for _, nbytes in moved) == case.nbytes
    dst.check(TOKENS, theirs, own, case.src.page)
    for to, nbytes in moved[:: len(moved) // 7]:
        there[to + nbytes - 1] ^= 1
        with pytest.raises(AssertionError, match="other bytes"):
            dst.check(TOKENS, theirs, own, case.src.page)
        there[to + nbytes - 1] ^= 1


def test_no_two_requests_share_a_page():
    for case in small():
        for side in ("src", "dst"):
            requests = case.requests(side, 1, max(case.sizes))
            pages = np.concatenate([one.pages for one in requests])
            assert len(set(pages.tolist())) == len(pages)
            assert len({one.slot for one in requests}) == len(requests)


def test_a_hybrid_keeps_a_layer_of_each_kind():
    for scale in (1, 4, 100):
        assert kv_transfer._scaled(MODELS[-1], scale).components() == ["kv", SLOTS]

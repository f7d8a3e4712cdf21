"""The bench of whole requests: what it moves, that it would see a wrong byte, and every way in small."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import numpy as np
import pytest

from pdstage.bench import kv_transfer
from pdstage.bench.harness import run_named
from pdstage.bench.kv_transfer import MODELS, Case, Kept, Memory, item_spans
from tests.bench.test_runs import check

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS = 256


def small() -> Iterator[Case]:
    for case in kv_transfer.cases(40, quick=False):
        if case.tokens == 8192:
            yield case._replace(tokens=TOKENS, sizes=(1, 3) if case.is_equal else (2,))


@pytest.mark.full
def test_every_case_over_local(monkeypatch):
    every = list(small())
    monkeypatch.setattr(kv_transfer, "cases", lambda scale, quick: every)
    report = run_named("kv-transfer", quick=True, transport="local")
    unequal = "TP4, pages of 16 -> TP2, pages of 64, HND"
    check(report, "staged, local: DeepSeek-V3.2", "direct, local: Qwen3-Next", unequal)
    assert {row["point"]["requests"] for row in report["rows"]} == {1, 2, 3}
    assert report["left_out"] == []


@pytest.mark.parametrize(
    ("transport", "package", "ways"),
    [
        pytest.param("nixl", "nixl", ("NIXL's own lists, nixl", "by scatter-gather, nixl"), marks=pytest.mark.full),
        ("mooncake", "mooncake", ("Mooncake's batches",)),
    ],
)
def test_a_librarys_own_calls_beside(monkeypatch, transport, package, ways):
    if not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed")
    case = next(small())
    monkeypatch.setattr(kv_transfer, "cases", lambda scale, quick: [case])
    check(run_named("kv-transfer", quick=True, transport=transport), *ways, "staged", "direct")


def test_what_does_not_fit_is_left_out_and_said(monkeypatch):
    case = next(small())
    monkeypatch.setattr(kv_transfer, "cases", lambda scale, quick: [case, case._replace(tokens=8 * TOKENS)])
    limit = case._replace(sizes=(1,)).memory_nbytes(0)
    assert kv_transfer._fitting(case, 1, limit).sizes == (), "libraries have pools of their own"
    monkeypatch.setattr(kv_transfer, "_memory", lambda _: limit)
    report = run_named("kv-transfer", quick=True, transport="local")
    left_out = [line.partition(":")[0].rpartition(", ")[2] for line in report["left_out"]]
    assert left_out == ["3 at once", "1 at once", "3 at once"]
    assert {(row["point"]["requests"], row["point"]["tokens"]) for row in report["rows"]} == {(1, TOKENS)}


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

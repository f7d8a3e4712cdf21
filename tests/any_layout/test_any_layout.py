"""Any layout to any layout, every byte: drawn cases, all pairs of TP sizes for each kind, and a test of the test."""

from __future__ import annotations

import itertools
import zlib
from functools import partial

import numpy as np
import pytest

from tests.any_layout import check, many
from tests.any_layout.bugs import BUGS, cases_until_found, planted
from tests.any_layout.describe import show
from tests.any_layout.draw import KINDS, draw
from tests.any_layout.held import Held, values
from tests.any_layout.tape import Tape, shrink
from tests.rows import drawn

N_CASES = drawn(400, full=20_000)
SIZES = range(1, 9)


def test_drawn_cases() -> None:
    """Chunks cover what was asked exactly once, and each byte lies where the description says (I5, I7)."""
    report = many.run(range(N_CASES))
    print(report)
    assert not report.wrong, str(report)
    assert report.n_cases == N_CASES
    for what in (*KINDS, "staged", "direct", "mixed", "copy"):
        assert report.seen[what] > N_CASES // 50, f"few cases of {what}: {report}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_of_tp_sizes(kind: str) -> None:
    for tp in itertools.product(SIZES, SIZES):
        check.run(zlib.crc32(f"{kind} {tp}".encode()), partial(draw, kinds=[kind], tp=tp, most_stages=1))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_deliberate_bug_is_found(bug) -> None:
    assert cases_until_found(bug, 1000) is not None


def test_a_failing_case_is_shrunk_and_replayed() -> None:
    (bug,) = (bug for bug in BUGS if bug.__name__ == "kernel_pages_forgotten")
    seed = cases_until_found(bug, 1000) - 1
    with planted(bug), pytest.raises(check.Wrong, match=f"seed {seed}: .*\n") as caught:
        check.run(seed)
    told = str(caught.value)
    choices = tuple(int(n) for n in told.rpartition("choices (")[2].rstrip("),\n").split(",") if n.strip())
    least = draw(Tape(None, choices))
    assert show(least) in told
    assert len(least.logical) == len(least.chunks) == 1
    with planted(bug), pytest.raises(check.FAILURES):
        check.check(least)
    check.check(least)


def test_the_oracle_is_the_formula_of_each_cell() -> None:
    """The vectorised oracle against loops over every cell of one case: page, block and row by counting."""
    for seed in range(12):
        case = draw(Tape(seed, (0,)))
        held = check.Transfer(case).dst
        for rank in held.ranks:
            for one in rank.parts:
                _check_cells(case, held, one)


def _check_cells(case, held: Held, one) -> None:
    start, stop = case.asked[one.of.name]
    expected = check.Transfer(case).expected
    size, number, block_of = one.owner
    n_before = 0
    for token in range(stop):
        parts = number * stop // size, (number + 1) * stop // size
        mine = token // block_of % size == number if block_of else parts[0] <= token < parts[1]
        place = n_before if block_of else token
        n_before += mine
        if token < start or not mine:
            continue
        page, within = divmod(place - one.how.first_token, one.how.page)
        block, row = divmod(within, one.how.block or one.how.page)
        for role, cells, (first, count) in zip(one.of.roles, check.cells_in(expected, one), one.owned, strict=True):
            truth = values(one.of, role, stop // role.tokens_per_row + 1)
            for layer, shard in itertools.product(range(one.high - one.low), range(count)):
                found = cells[layer, one.items[page], block, row // role.tokens_per_row, shard]
                np.testing.assert_array_equal(
                    found, truth[one.low + layer, token // role.tokens_per_row, first + shard]
                )


def test_shrinking_keeps_what_fails_and_no_more() -> None:
    least = shrink([9, 3, 7, 5, 8, 2], lambda choices: sum(choices[2:4]) >= 6)
    assert sum(least) == 6
    assert set(least[:2]) <= {0}

"""The CUDA copies' instructions and modelled cycles a tile, against budgets that only fall. Needs no GPU."""

from __future__ import annotations

import importlib.util
import json
from functools import cache

import pytest

from pdstage.bench import instructions
from pdstage.bench.instructions import SHAPES, WAYS, Code, Cost, Variant, variants
from pdstage.kernels import nvrtc
from tests.rows import rows

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None or nvrtc.missing() != "", reason="needs CuPy and NVRTC"
    ),
    pytest.mark.skipif(not instructions.tool("nvdisasm"), reason="needs nvdisasm"),
]
QUICK = "token-major"  # of the shapes; flat ones have less code, head-major ones as much
TAGS = ("", "  // seldom")
KERNELS = {one.name: one for one in variants()}


@pytest.fixture(autouse=True, scope="module")
def images(request):
    """Kept from one run to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSTAGE_CACHE_DIR", str(request.config.cache.mkdir("pdstage-nvrtc")))
        yield


@cache
def code_of(name):
    return Code.of(KERNELS[name])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", rows(SHAPES, full=SHAPES.keys() - {QUICK}))
def test_no_kernel_costs_more_than_its_budget(way, shape):
    """Whoever lowers a count lowers the budget: python -m pdstage.bench.instructions --write."""
    release, allowed = instructions.budgets()
    if release != instructions.compiler():
        pytest.skip(f"the budgets are for NVRTC {release}, here is {instructions.compiler()}")
    mine = [name for name in KERNELS if name.startswith(f"{way} {shape}")]
    assert instructions.over({name: Cost.of(code_of(name)) for name in mine}, allowed) == []


def test_every_kernel_has_a_budget_and_every_budget_a_kernel():
    assert set(instructions.budgets()[1]) == set(KERNELS)


WIDE = [name for name, one in KERNELS.items() if not one.macros["PDSTAGE_NARROW"] and one.architecture == "sm_90"]


@pytest.mark.parametrize("name", [name for name in WIDE if not name.startswith("copy") and "sum" not in name])
def test_few_multiprocessors_are_enough_for_a_link_in_the_model(name):
    """50 GB/s by two, 400 by 16; and 90 % of a copy by all of an H200: 995 issue slots a tile at its whole speed."""
    cost = instructions.budgets()[1][name]
    assert 2 * instructions.modelled_gbps(KERNELS[name], cost) >= 50
    assert 16 * instructions.modelled_gbps(KERNELS[name], cost) >= 400
    assert cost.instructions <= 995 / 0.9


KINDS = ("", " sum", " 32 bytes", " 32 bytes sum")


TURNS = [f"{way} {shape}{kind}" for way in WAYS for shape in SHAPES for kind in KINDS]


@pytest.mark.parametrize("name", rows(TURNS, full={name for name in TURNS if QUICK not in name}))
def test_a_turn_is_the_whole_of_a_tile(name):
    """The way that is counted passes every store of a tile: no cheaper one was taken for it."""
    assert instructions.stored_nbytes(code_of(name).turn()) == KERNELS[name].turn_nbytes


def made(folder, body):
    """The turn of a kernel of this body, which has one loop."""
    (folder / "one.cu").write_text(
        f'extern "C" __global__ void pdstage_copy(uint4* p, unsigned n, long long by, long long* q) {{\n{body}\n}}\n'
    )
    nvrtc._texts.cache_clear()
    return Code.of(Variant("one", "one.cu", {"PDSTAGE_UNITS": 1, "PDSTAGE_THREADS": 512}), folder).turn()


def test_a_subroutine_counts_with_its_body(tmp_path):
    turn = made(
        tmp_path, "#pragma unroll 1\nfor (unsigned i = 0; i < n; i++) p[i * 512] = {unsigned(q[i] / by), 1, 2, 3};"
    )
    assert sum(one.name.startswith("CALL") for one in turn) == sum(one.name.startswith("RET") for one in turn) == 1
    assert len(turn) > 80


def test_what_runs_seldom_does_not_count(tmp_path):
    head = "#pragma unroll 1\nfor (unsigned i = 0; i < n; i++) {\n    p[i] = {1, 2, 3, i};\n"
    lines = [len(made(tmp_path, head + f"    if (q[i] > 7) {{{tag}\n        q[i] /= by;\n    }}\n}}")) for tag in TAGS]
    assert lines[0] > 80
    assert lines[1] < 40


def test_who_exceeds_a_budget_is_named():
    allowed = {"a": Cost(10, 100), "b": Cost(10, 100)}
    found = {"a": Cost(10, 100), "b": Cost(11, 90), "c": Cost(1, 1)}
    assert instructions.over(found, allowed) == [
        "b: 11 instructions and 90 cycles a tile, allowed are 10 and 100", "c has no budget"
    ]  # fmt: skip


def test_a_budget_only_falls(tmp_path, monkeypatch):
    monkeypatch.setattr(instructions, "BUDGETS", tmp_path / "budgets.json")
    instructions.write({"a": Cost(10, 100), "gone": Cost(1, 1)})
    wide = "gather flat 32 bytes"
    instructions.write({"a": Cost(12, 90), "new": Cost(3, 4), wide: Cost(5, 6)})
    assert instructions.budgets() == (instructions.compiler(), {"a": Cost(10, 90), "new": Cost(3, 4), wide: Cost(5, 6)})
    held = json.loads((tmp_path / "budgets.json").read_text())
    assert (held["sm_90"]["new"], held["sm_100"]) == ([3, 4], {wide: [5, 6]})

"""Traffic matrices of kvbench: how they are read, what a case of one moves, and one in small."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from pdstage import cli
from pdstage.bench import traffic
from pdstage.bench.harness import run_named
from pdstage.bench.matrix import Pattern, read
from pdstage.bench.sides import Fabric
from pdstage.bench.traffic import PAGE, TOKEN_NBYTES, Case, Memory, Receivers
from pdstage.bench.two_hosts import Place
from pdstage.errors import UsageError
from tests.bench.test_runs import check

LOCAL = Fabric("local", "local", {})
TEXT = "0 0 64K 5000\n0 1B 0.5m 0\n0 0 0 4k\n0 0 0 0\n"


@pytest.fixture
def matrix(tmp_path):
    path = tmp_path / "matrix_0.txt"
    path.write_text(TEXT)
    return path


def test_units_are_those_of_kvbench(tmp_path):
    path = tmp_path / "m.txt"
    path.write_text("  7 1B\t2b 3k\n\n4K 1.5M 1G 2.5\n0.1K 0B 0g 1e3\n0 0 0 0\n")
    assert read(path) == [
        Pattern("m.txt", ((7, 1, 2, 3 << 10), (4 << 10, 3 << 19, 1 << 30, 2), (102, 0, 0, 1000), (0, 0, 0, 0)))
    ]
    assert read(path)[0].pairs[:2] == [(0, 0, 7), (0, 1, 1)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0 1K\n0\n", r"m\.txt, line 2: 1 cells in a matrix of 2 rows"),
        ("0 1K 3\n\n0 0 0\n", r"m\.txt, line 1: 3 cells in a matrix of 2 rows"),
        ("0 1KB\n0 0\n", r"m\.txt, line 1: '1KB' is no size"),
        ("0 0\n0 -1\n", r"m\.txt, line 2: '-1' is no size"),
        ("0 nan\n0 0\n", "'nan' is no size"),
        ("0 inf\n0 0\n", "'inf' is no size"),
        ("K 0\n0 0\n", "'K' is no size"),
        ("0 0\n0 0\n", r"m\.txt moves no byte"),
        ("", r"m\.txt moves no byte"),
    ],
)
def test_a_matrix_that_is_none_names_its_line(tmp_path, text, said):
    path = tmp_path / "m.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read(path)


def test_yaml_of_either_command(matrix):
    pytest.importorskip("yaml")
    folder = matrix.parent
    (folder / "one.yaml").write_text(f"iters: 50\ntraffic_pattern:\n  matrix_file: {matrix}\n  shards: 1\n")
    (folder / "two.yml").write_text(
        "traffic_patterns:\n- matrix_file: matrix_0.txt\n  metadata: {isl: 5}\n  sleep_before_launch_sec: 1.5\n"
        f"- {{matrix_file: {matrix}, mem_type: cuda}}\n"
    )
    assert read(folder / "one.yaml") == read(matrix)
    assert read(folder / "two.yml") == 2 * read(matrix)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("iters: 5\n", "has no traffic_patterns"),
        ("traffic_patterns: []\n", "has no traffic_patterns"),
        ("traffic_patterns:\n- {shards: 1}\n", r"t\.yaml, pattern 0 has no matrix_file"),
        ("traffic_patterns:\n- {matrix_file: matrix_0.txt, shards: 2}\n", "has 2 shards"),
        ("traffic_patterns:\n- {matrix_file: gone.txt}\n", r"gone\.txt cannot be read"),
        ("a: [\n", r"t\.yaml is not YAML"),
    ],
)
def test_yaml_that_kvbench_would_not_take(matrix, text, said):
    pytest.importorskip("yaml")
    path = matrix.parent / "t.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        read(path)


def test_without_pyyaml_a_sentence_says_what_to_do(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "t.yaml").write_text("traffic_patterns: []\n")
    assert cli.main(["bench", "kv-transfer", "--matrix", str(tmp_path / "t.yaml")]) == 2
    assert "pip install pyyaml, or pass a matrix's text file" in capsys.readouterr().err


def test_cells_become_whole_tokens_of_senders_and_receivers(matrix):
    case = Case.of(read(matrix)[0])
    assert case.tokens == {(0, 2): 16, (0, 3): 2, (1, 1): 1, (1, 2): 128, (2, 3): 1}
    assert (case.senders, case.receivers) == ([0, 1, 2], [1, 2, 3])
    assert case.sizes[0] == 64 << 10 and sum(case.sizes) == 148 * TOKEN_NBYTES
    assert Case(case.cells(4).tokens).tokens == case.tokens
    for sends, ranks in ((True, case.senders), (False, case.receivers)):
        for rank in ranks:
            pages = np.concatenate([*case.pages(rank, 1, sends=sends).values()])
            assert len(set(pages.tolist())) == len(pages) == case.n_used(rank, sends=sends)


def test_one_wrong_byte_is_seen_and_a_wrong_sender_is(matrix):
    case = Case.of(read(matrix)[0])
    side = Receivers(case, LOCAL, Place())
    try:
        sources = {rank: Memory(2 * case.n_used(rank, sends=True)) for rank in case.senders}
        for rank, memory in sources.items():
            memory.paint(rank)
        for rank, memory in zip(case.receivers, side._memories, strict=True):
            for cell, pages in case.pages(rank, 7, sends=False).items():
                theirs = case.pages(cell[0], 7, sends=True)[cell]
                memory.words[:, pages] = sources[cell[0]].words[:, theirs]
        side.check(7, 5)
        last = case.pages(2, 7, sends=False)[1, 2][-1]
        bytes_of = side._memories[1].words.view(np.uint8)
        for view in (0, 15):
            bytes_of[view, last, -1] ^= 1
            with pytest.raises(AssertionError, match="rank 2 received other bytes than rank 1 sent"):
                side.check(7, 5)
            bytes_of[view, last, -1] ^= 1
        side._memories[1].words[:, last] ^= np.uint64(3 << 44)  # as of rank 0
        with pytest.raises(AssertionError, match="than rank 1 sent"):
            side.check(7, 5)
    finally:
        side.close()
    assert PAGE * TOKEN_NBYTES == 64 << 10


def test_a_matrix_over_local(matrix):
    report = run_named("kv-transfer", quick=True, transport="local", matrix=matrix)
    check(report, "staged, local: pattern 0, matrix_0.txt, 3 ranks to 3", "direct, local: ")
    assert [row["point"]["cells"] for row in report["rows"]] == [5, 5]
    assert {row["point"]["nbytes"] for row in report["rows"]} == {148 * TOKEN_NBYTES}


def test_a_matrix_that_does_not_fit_is_left_out_and_said(matrix):
    assert traffic.measure(read(matrix), [LOCAL], 1, 1 << 20, None) == (
        [],
        ["pattern 0, matrix_0.txt: not enough memory; give a smaller matrix"],
    )

"""Which test sees which systematic bug, for hours.

    python -m tests.matrix REACHED                  runs all tests; writes which reach the place of which bug, and times
    python -m tests.matrix REACHED FIRST LAST       tries bugs FIRST to LAST of 600, and prints a JSON line for each

A bug is one change by one rule: a comparison or a boundary turned, a statement dropped, two arguments swapped. They are
drawn alike from the code as it is. The tests that reach its place run on a copy of the package that has it, the quick
ones first, until one fails or they have had half a minute; how many are left is said. What nothing sees wants a test or
a reason.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple
from xml.etree import ElementTree as ET

from tests.sim.mutants import PYTEST, tried

PLACES = ("pdstage/protocol", "pdstage/manager", "pdstage/plan", "pdstage/layout", "pdstage/transport", "kernels")
N_OF_A_KIND = 150
_LIMIT_S, _MOST_S = 240, 30.0
TRITON = {f"kernels/triton_{name}.py" for name in ("kernels", "convert_kernels", "sum_kernels")}
"""Triton compiles what is in them: no mark can be there, and the tests of kernels try their bugs."""
_SENSOR = """
import builtins, os
seen = set()
def reached(number, value=None):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if (number, test) not in seen:
        seen.add((number, test))
        try:
            with open(FILE, "a") as file:
                file.write(f"{number}\\t{test}\\n")
        except OSError:  # of a test of full descriptor tables, say
            pass
    return value
builtins._reached = reached
"""
"""A module of the changed package; it adds a line to FILE."""
_TURNED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_BOUNDARIES = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class Bug(NamedTuple):
    path: str
    line: int
    kind: str
    old: str
    new: str
    start: int
    """In bytes."""


def bugs_in(path: Path) -> Iterator[Bug]:
    text = path.read_text()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))

    def said(node: ast.AST) -> str:
        return ast.get_source_segment(text, node) or ""

    def bug(node: ast.expr | ast.stmt, kind: str, new: str) -> Bug:
        return Bug(str(path), node.lineno, kind, said(node), new, starts[node.lineno - 1] + node.col_offset)

    functions = (one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.FunctionDef))
    for node in (inner for function in functions for statement in function.body for inner in ast.walk(statement)):
        match node:
            case ast.Compare(ops=[op], comparators=[right]):
                kind = "boundary" if isinstance(op, _BOUNDARIES) else "comparison"
                yield bug(node, kind, f"{said(node.left)} {_TURNED[type(op)]} {said(right)}")
            case ast.BinOp(op=ast.Add() | ast.Sub() as op):
                turned = "-" if isinstance(op, ast.Add) else "+"
                yield bug(node, "boundary", f"{said(node.left)} {turned} {said(node.right)}")
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                if node.lineno == node.end_lineno:
                    yield bug(node, "dropped", "pass")
            case ast.Call(args=[first, second, *_]) if said(first) != said(second):
                swapped = said(node).replace(f"{said(first)}, {said(second)}", f"{said(second)}, {said(first)}", 1)
                yield bug(node, "swapped", swapped)


def drawn() -> list[Bug]:
    """The same ones of the same code: as many of each kind."""
    kinds: dict[str, set[Bug]] = defaultdict(set)
    for path in (path for place in PLACES for path in sorted(Path(place).rglob("*.py"))):
        for bug in bugs_in(path):
            if bug.old != bug.new:
                kinds[bug.kind].add(bug)
    rng = random.Random(41)
    chosen = [bug for _, bugs in sorted(kinds.items()) for bug in rng.sample(sorted(bugs), N_OF_A_KIND)]
    rng.shuffle(chosen)
    return chosen


def planted() -> dict[str, str]:
    """The package's files, changed so that a process says which places it reaches, and in which test."""
    marks: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
    for number, bug in enumerate(drawn()):
        if bug.path in TRITON:
            continue
        end, call = bug.start + len(bug.old.encode()), f"_reached({number}".encode()
        if bug.kind == "dropped":
            marks[bug.path].insert(0, (bug.start, call + b"); "))  # before those of expressions that begin there
        else:
            marks[bug.path] += [(bug.start, call + b", "), (end, b")")]
    changed = {}
    for path, found in marks.items():
        text, at = Path(path).read_bytes(), 0
        parts = []
        for place, mark in sorted(found, key=lambda one: one[0]):
            parts += [text[at:place], mark]
            at = place
        changed[path] = b"".join([*parts, text[at:]]).decode()
    return changed


def find(path: Path) -> None:
    """Runs all tests on the package with marks, and writes to `path` a line "number TAB test" for each that is met."""
    start = Path("pdstage/__init__.py").read_text().replace("\nimport ", "\nimport pdstage._reached\nimport ", 1)
    sensor = _SENSOR.replace("FILE", repr(str(path.resolve())))
    tried(
        planted() | {"pdstage/__init__.py": start, "pdstage/_reached.py": sensor},
        [
            "-m",
            "pytest",
            "-q",
            "--timeout",
            "600",
            "-n",
            "3",
            "--dist",
            "loadfile",
            "--no-loadscope-reorder",
            "--junitxml",
            str(_times(path).resolve()),
        ],
        limit_s=7200,
    )


def _times(path: Path) -> Path:
    return path.with_suffix(".xml")


def lasted(path: Path) -> dict[str, float]:
    """By test, seconds."""
    cases = ET.parse(_times(path)).iter("testcase")
    return {f"{one.get('classname').replace('.', '/')}.py::{one.get('name')}": float(one.get("time")) for one in cases}


def reached(path: Path) -> dict[int, set[str]]:
    """By bug, the tests that reach its place."""
    tests: dict[int, set[str]] = defaultdict(set)
    for line in path.read_text().splitlines():
        number, _, test = line.partition("\t")
        if test:
            tests[int(number)].add(test)
    return tests


def seen_by(bug: Bug, tests: list[str]) -> str:
    """The first that fails; empty if none does."""
    whole, start = Path(bug.path).read_bytes(), bug.start
    text = (whole[:start] + bug.new.encode() + whole[start + len(bug.old.encode()) :]).decode()
    with NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(tests))
        listed.flush()
        return tried({bug.path: text}, [*PYTEST, "--timeout", "60", f"@{listed.name}"], _LIMIT_S)


def main(found: str, first: str = "", last: str = "600") -> None:
    if not first:
        find(Path(found))
        return
    tests, seconds = reached(Path(found)), lasted(Path(found))
    for number, bug in enumerate(drawn()[: int(last)]):
        if number < int(first):
            continue
        mine = sorted(tests[number], key=lambda name: (seconds.get(name, 1.0), name))
        if bug.path in TRITON:
            mine = sorted(map(str, Path("tests/kernels").glob("test_triton*.py")))
        until = accumulate(seconds.get(name, 1.0) for name in mine)
        quick = mine[: max(1, sum(at <= _MOST_S for at in until))]
        seen = seen_by(bug, quick) if quick else "reached by no test"
        print(json.dumps(bug._asdict() | {"seen_by": seen, "n_tests": len(quick), "left": len(mine) - len(quick)}))
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Which test sees which systematic bug: `python -m tests.matrix COVERAGE [FIRST [LAST]]`, a JSON line for each of 600.

A bug is one change by one rule: a comparison or a boundary turned, a statement dropped, two arguments swapped. They are
drawn alike from the code as it is. COVERAGE is of `pytest --cov=pdstage --cov=kernels --cov-context=test`
(pytest-cov). The tests that reach a bug's lines run on a copy of the package that has it, those that reach little
first, until one fails; what nothing sees wants a test or a reason. Hours of processor time.
"""

from __future__ import annotations

import ast
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

from tests.sim.mutants import PYTEST, tried

PLACES = ("pdstage/protocol", "pdstage/manager", "pdstage/plan", "pdstage/layout", "pdstage/transport", "kernels")
N_OF_A_KIND = 150
_LIMIT_S = 200
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


def reached(coverage: str) -> dict[tuple[str, int], set[str]]:
    """Tests by file and line."""
    from coverage import CoverageData  # noqa: PLC0415  (with pytest-cov alone)

    data = CoverageData(coverage)
    data.read()
    tests: dict[tuple[str, int], set[str]] = defaultdict(set)
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            names = {context.partition("|")[0] for context in contexts if context}
            for place in PLACES:
                if (at := file.rfind(f"/{place}/")) >= 0:
                    tests[file[at + 1 :], line] |= names
    return tests


def seen_by(bug: Bug, tests: list[str]) -> str:
    """The first that fails; empty if none does."""
    whole, start = Path(bug.path).read_bytes(), bug.start
    text = (whole[:start] + bug.new.encode() + whole[start + len(bug.old.encode()) :]).decode()
    with NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(tests))
        listed.flush()
        return tried(
            (bug.path.removeprefix("pdstage/"), text), [*PYTEST, "--timeout", "30", f"@{listed.name}"], _LIMIT_S
        )


def main(coverage: str, first: str = "0", last: str = "600") -> None:
    tests = reached(coverage)
    n_lines: dict[str, int] = defaultdict(int)
    for names in tests.values():
        for name in names:
            n_lines[name] += 1
    for bug in drawn()[int(first) : int(last)]:
        mine = sorted(tests[bug.path, bug.line], key=lambda name: (n_lines[name], name))
        seen = seen_by(bug, mine) if mine else "reached by no test"
        print(json.dumps(bug._asdict() | {"seen_by": seen, "n_tests": len(mine)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

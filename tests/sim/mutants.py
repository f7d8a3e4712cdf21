"""Deliberate bugs, one rule of DESIGN 6 to 8 broken by each, and who notices: `python -m tests.sim.mutants [NAME ...]`.

A mutant is a patch of a named function of pdstage, wherever that stands. It is tried in a process of its own, on a copy
of the package that has it.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pdstage"
SEARCH = "tests.sim.run"
NODES = "tests.sim.manager.run"
"""The search of whole nodes, threads included, for what the cores' own does not run."""
N_SEEDS = 600
"""Runs of the search before a mutant counts as unseen: its budget, whatever the machine."""
_LIMIT_S = 900
_MISNAMED = re.compile(r"NameError|ImportError|SyntaxError|AttributeError: '(?!NoneType)\w+' object has no attribute")
"""Words of a mutant that breaks by its own text, not by the rule that it breaks."""
_SEEDS = """
import importlib, signal, sys
run = importlib.import_module(sys.argv[1]).run
for seed in range(int(sys.argv[2])):
    signal.setitimer(signal.ITIMER_PROF, 20)  # seconds of processor time: a run that spins is ended
    try:
        run(seed)
    except BaseException as error:
        raise SystemExit(f"seed {seed}: {type(error).__name__}: {error}".splitlines()[0])
"""
_MAIN = "import pdstage, pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
"""The package first: pytest puts the checkout in front."""
PYTEST = ("-c", _MAIN, "-x", "-q", "--no-header", "--tb=line")


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old`, found once in the one `function` of that name that has it, becomes `new`; that breaks `rule`.

    `function` may be a class, a constant of a module, or `Class.method` where the method's name alone names several.
    The search must see it; or, where no schedule can or only one in hundreds does, the test file `shown_by`. With
    `NODES` there the search of whole nodes must.
    """

    name: str
    rule: str
    function: str
    old: str
    new: str
    shown_by: str = ""

    def place(self) -> Place:
        """Where it stands now. Raises `LookupError` if that is nowhere or not one place: then it must follow."""
        found = [place for place in definitions(self.function.split(".")[-1]) if place.is_(self.function)]
        n = sum(place.text.count(self.old) for place in found)
        if n != 1 or self.old == self.new:
            where = ", ".join(f"{place.path.relative_to(PACKAGE.parent)}:{place.name}" for place in found)
            raise LookupError(f"mutant {self.name!r}: its old text is found {n} times in {where or self.function}")
        return next(place for place in found if self.old in place.text)

    def patched(self) -> tuple[str, str]:
        """Its file, from the package's folder, and that file's changed text."""
        place = self.place()
        text = place.path.read_text()
        at = place.start + place.text.index(self.old)
        return str(place.path.relative_to(PACKAGE)), text[:at] + self.new + text[at + len(self.old) :]


class Place(NamedTuple):
    """A function, class or constant of pdstage: its name as `Class.method`, and its text, from `start` in its file."""

    path: Path
    name: str
    start: int
    text: str

    def is_(self, name: str) -> bool:
        return self.name == name or self.name.endswith(f".{name}")


@functools.cache
def _all_definitions() -> dict[str, list[Place]]:
    found: dict[str, list[Place]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        starts = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))]

        def visit(node: ast.AST, outer: str, path: Path = path, text: str = text, starts: list[int] = starts) -> None:
            for inner in ast.iter_child_nodes(node):
                match inner:
                    case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                        name = inner.name
                    case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                        pass
                    case _:
                        continue
                whole = f"{outer}.{name}" if outer else name
                start, stop = starts[inner.lineno - 1], starts[inner.end_lineno or inner.lineno]
                found.setdefault(name, []).append(Place(path, whole, start, text[start:stop]))
                if not isinstance(inner, ast.Assign | ast.AnnAssign):
                    visit(inner, whole)

        visit(ast.parse(text), "")
    return found


def definitions(name: str) -> list[Place]:
    """Every definition of pdstage with this name, whatever class it is in."""
    return _all_definitions().get(name, [])


def everyone() -> list[Mutant]:
    from tests.sim import (  # noqa: PLC0415  (they import this)
        bugs_aux,
        bugs_engine,
        bugs_leases,
        bugs_nodes,
        bugs_parting,
        bugs_rooms,
        bugs_sessions,
        bugs_unseen,
    )

    modules = (bugs_leases, bugs_rooms, bugs_sessions, bugs_parting, bugs_engine, bugs_aux, bugs_unseen, bugs_nodes)
    return [mutant for module in modules for mutant in module.MUTANTS]


def detect(mutant: Mutant | None, shown_by: str = "") -> str:
    """How a mutant, or something in the code as it is, was seen; empty if it was not."""
    shown_by = (mutant.shown_by if mutant is not None else shown_by) or SEARCH
    changed = mutant.patched() if mutant is not None else None
    if shown_by in (SEARCH, NODES):
        words = tried(changed, ["-c", _SEEDS, shown_by, str(N_SEEDS)])
    else:
        words = tried(changed, [*PYTEST, shown_by])
    if mutant is not None and _MISNAMED.search(words):
        raise RuntimeError(f"mutant {mutant.name!r} names what is not there: {words}")
    return words


def tried(changed: tuple[str, str] | None, command: Sequence[str], limit_s: float = _LIMIT_S) -> str:
    """What went wrong in `command` of Python with a copy of the package, of which a file's text is changed; empty if
    nothing did.
    """
    with TemporaryDirectory() as folder:
        shutil.copytree(PACKAGE, Path(folder, "pdstage"), ignore=shutil.ignore_patterns("__pycache__"))
        if changed is not None:
            Path(folder, "pdstage", changed[0]).write_text(changed[1])
        env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
        try:
            done = subprocess.run(
                [sys.executable, "-P", *command],
                check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"it takes over {limit_s} s"
    if done.returncode == 0:
        return ""
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "; ".join(said or done.stderr.splitlines()[-1:]) or f"the process ended with {done.returncode}"


def main(names: Sequence[str]) -> int:
    """Prints a line a mutant; with names, only those."""
    chosen = [mutant for mutant in everyone() if not names or mutant.name in names]
    started, unseen = time.perf_counter(), 0
    for mutant in chosen:
        words = detect(mutant)
        unseen += not words
        said = words[:90] or "NOT SEEN"
        print(f"{mutant.name:<58} {mutant.rule:<22} {mutant.shown_by or SEARCH:<34} {said}", flush=True)
    print(f"{len(chosen)} mutants, {unseen} not seen, {time.perf_counter() - started:.0f} s")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

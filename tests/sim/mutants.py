"""Deliberate bugs, one rule of DESIGN 6 to 8 broken by each, and who notices: `python -m tests.sim.mutants [NAME ...]`.

A mutant is a patch of a named function of pdstage, wherever that stands. It is tried in a process of its own, where a
finder gives the changed module in place of the file; so nothing is copied, and no two mutants meet. Nothing of pdstage
may be imported here.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.abc
import importlib.machinery
import io
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent.parent / "pdstage"
SEARCH = "simulation"
NODES = "tests.sim.manager"
"""The search of whole nodes, threads included, for what the cores' own does not run."""
N_STEPS = 400
N_SEEDS = 600
"""Runs of the search before a mutant counts as unseen: its budget, whatever the machine."""
_STUCK_S = 20.0
_MISNAMED = re.compile(r"NameError|AttributeError: '(?!NoneType)\w+' object has no attribute")
"""Words of a mutant that breaks by its own text, not by the rule that it breaks."""
_MAX_MEMORY = 6 << 30


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
        """Its module and that module's changed text."""
        place = self.place()
        text = place.path.read_text()
        at = place.start + place.text.index(self.old)
        inner = place.path.relative_to(PACKAGE.parent).with_suffix("")
        return ".".join(inner.parts).removesuffix(".__init__"), text[:at] + self.new + text[at + len(self.old) :]


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


class Verdict(NamedTuple):
    """What became of one mutant: `words` say how it was seen, empty if it was not."""

    detector: str
    seed: int
    n_runs: int
    cpu_s: float
    words: str


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


def search(seed: int, name: str = SEARCH) -> None:
    """One run of the whole protocol under faults drawn from `seed`, or of whole nodes; raises if anything is wrong.

    The one place that knows which searches these are.
    """
    if name == NODES:
        from tests.sim.manager.run import run as run_nodes  # noqa: PLC0415  (after the finder is in place)

        run_nodes(seed)
        return
    from tests.sim.run import run  # noqa: PLC0415

    run(seed, steps=N_STEPS)


def tests(path: str) -> None:
    """The tests of one file (or file::name)."""
    import pytest  # noqa: PLC0415

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", path])
    if code != 0:
        lines = [line for line in said.getvalue().splitlines() if line.startswith(("FAILED", "ERROR"))]
        raise AssertionError("; ".join(lines) or f"pytest ended with {code}")


def detect(mutant: Mutant | None, shown_by: str = "", n_seeds: int = N_SEEDS) -> Verdict:
    """Tries a mutant, or the code as it is, in a process of its own."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    shown_by = mutant.shown_by if mutant is not None else shown_by
    patched = mutant.patched() if mutant is not None else None
    child = context.Process(target=_child, args=(theirs, patched, shown_by, n_seeds))
    child.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        answer = Verdict(shown_by or SEARCH, -1, 0, 0.0, "the process died")
    child.join()
    if mutant is not None and not isinstance(answer, str) and _MISNAMED.search(answer.words):
        answer = f"it names what is not there: {answer.words}"
    if isinstance(answer, str):
        raise RuntimeError(f"mutant {mutant.name if mutant else None!r} could not be tried:\n{answer}")
    return answer


def _child(answer: Connection, patched: tuple[str, str] | None, shown_by: str, n_seeds: int) -> None:
    try:
        assert not any(name.split(".")[0] == "pdstage" for name in sys.modules), "pdstage was imported before"
        if patched is not None:
            sys.meta_path.insert(0, _Finder(*patched))
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY, _MAX_MEMORY))
        verdict = _file(shown_by) if shown_by not in ("", NODES) else _seeds(n_seeds, shown_by or SEARCH)
        if patched is not None:
            assert isinstance(sys.modules[patched[0]].__loader__, _Loader), "the changed module was never imported"
        answer.send(verdict)
    except Exception:  # noqa: BLE001  (whatever it is, the parent says it)
        answer.send(traceback.format_exc())


def _seeds(n_seeds: int, name: str) -> Verdict:
    import tests.sim.manager.run  # noqa: PLC0415  (a mutant that cannot be imported is no mutant)
    import tests.sim.run  # noqa: F401, PLC0415

    for seed in range(n_seeds):
        if words := _words(lambda seed=seed: search(seed, name)):
            return Verdict(name, seed, seed + 1, time.process_time(), words)
    return Verdict(name, -1, n_seeds, time.process_time(), "")


def _file(path: str) -> Verdict:
    words = _words(lambda: tests(path))
    return Verdict(path, -1, 1, time.process_time(), words)


def _words(run: Callable[[], None]) -> str:
    try:
        with _limited():
            run()
    except Exception as error:  # noqa: BLE001  (a core that breaks is seen as well as one that lies)
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


class _Stuck(Exception):
    pass


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """A run that spins is seen by the processor time it takes."""

    def stop(*_: object) -> None:
        raise _Stuck(f"{_STUCK_S} s of processor time")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _STUCK_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, source: str) -> None:
        self._module, self._source = module, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert spec is not None and spec.origin is not None
        spec.loader = _Loader(fullname, spec.origin, self._source)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, module: str, path: str, source: str) -> None:
        super().__init__(module, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


def main(names: Sequence[str]) -> int:
    """Prints a line a mutant; with names, only those."""
    chosen = [mutant for mutant in everyone() if not names or mutant.name in names]
    started, unseen = time.perf_counter(), 0
    print(f"{'mutant':<58} {'breaks':<22} {'seen by':<34} {'run':>4} {'cpu s':>6}  words")
    for mutant in chosen:
        verdict = detect(mutant)
        unseen += not verdict.words
        run = str(verdict.seed) if verdict.seed >= 0 else ""
        said = verdict.words[:90] or f"NOT SEEN in {verdict.n_runs} runs"
        seen_by = verdict.detector if verdict.words else "-"
        print(f"{mutant.name:<58} {mutant.rule:<22} {seen_by:<34} {run:>4} {verdict.cpu_s:>6.1f}  {said}", flush=True)
    print(f"{len(chosen)} mutants, {unseen} not seen, {time.perf_counter() - started:.0f} s")
    return 1 if unseen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Deliberate bugs, one rule of DESIGN 6 to 8 broken by each, and who notices: `python -m tests.sim.mutants [NAME ...]`.

A mutant is a patch of one place of pdstage. It is tried in a process of its own, on a copy of the package that has it.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

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
PYTEST = ("-m", "pytest", "-x", "-q", "--no-header", "--tb=line")


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old`, a text found once in pdstage, becomes `new`; that breaks `rule`.

    The search must see it; or, where no schedule can or only one in hundreds does, the test file `shown_by`. With
    `NODES` there the search of whole nodes must.
    """

    name: str
    rule: str
    old: str
    new: str
    shown_by: str = ""

    def patched(self) -> tuple[str, str]:
        """Its file, from the package's folder, and that file's changed text. Raises `LookupError` where `old` is not
        found, or not once: then the mutant must follow.
        """
        found = [path for path, text in _texts().items() for _ in range(text.count(self.old))]
        if len(found) != 1:
            raise LookupError(f"mutant {self.name!r}: its old text is found in {found}")
        return found[0], _texts()[found[0]].replace(self.old, self.new)


@functools.cache
def _texts() -> dict[str, str]:
    return {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}


def everyone() -> list[Mutant]:
    from tests.sim import (  # noqa: PLC0415  (they import this)
        bugs_aux,
        bugs_leases,
        bugs_nodes,
        bugs_parting,
        bugs_rooms,
        bugs_sessions,
    )

    modules = (bugs_leases, bugs_rooms, bugs_sessions, bugs_parting, bugs_aux, bugs_nodes)
    return [mutant for module in modules for mutant in module.MUTANTS]


def detect(mutant: Mutant | None, shown_by: str = "") -> str:
    """How a mutant, or something in the code as it is, was seen; empty if it was not."""
    shown_by = (mutant.shown_by if mutant is not None else shown_by) or SEARCH
    changed = dict([mutant.patched()]) if mutant is not None else {}
    if shown_by in (SEARCH, NODES):
        words = tried(changed, ["-c", _SEEDS, shown_by, str(N_SEEDS)])
    else:
        words = tried(changed, [*PYTEST, shown_by])
    if mutant is not None and _MISNAMED.search(words):
        raise RuntimeError(f"mutant {mutant.name!r} names what is not there: {words}")
    return words


def tried(changed: Mapping[str, str], command: Sequence[str], limit_s: float = _LIMIT_S) -> str:
    """What went wrong in `command` of Python with a copy of the package, where files have these texts; empty if nothing
    did.
    """
    with TemporaryDirectory() as folder:
        for path in ROOT.iterdir():  # its tests and what they read, which find the copy, in processes they start too
            if path != PACKAGE and not path.name.startswith("."):
                Path(folder, path.name).symlink_to(path)
        shutil.copytree(PACKAGE, Path(folder, "pdstage"))  # with what is compiled of it
        for path, text in changed.items():
            Path(folder, "pdstage", path.removeprefix("pdstage/")).write_text(text)
        try:
            done = subprocess.run(
                [sys.executable, *command],
                check=False, cwd=folder, env=os.environ | {"PYTHONPATH": folder}, capture_output=True, text=True,
                timeout=limit_s,
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

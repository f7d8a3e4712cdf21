"""Reads traffic patterns of NIXL's kvbench: a YAML file for its `ct-perftest` or `sequential-ct-perftest`, or a matrix.

The format is that of benchmark/kvbench in ai-dynamo/nixl, commit 8770b655 (docs/ct-perftest.md; `load_matrix` and
`parse_size` in main.py):

* A YAML file has a list `traffic_patterns`, or one `traffic_pattern`. Each pattern names a `matrix_file`.
* A matrix is text, one row a line, cells with white space between. Cell [i, j] is what rank i sends to rank j.
* A cell is a number of bytes, as written or with one unit letter of either case: B, K, M or G, each 1024 of the last.
  It may have a fraction ("1.5M"); a rest below one byte is cut off.

A `matrix_file` that is not absolute is looked for in the working directory, as kvbench does, and then beside the YAML
file. Empty lines are left out; kvbench fails at them. A matrix is square, as kvbench's number of processes makes it.
`shards` above 1 is an error, there and here. `xfer_op`, `mem_type`, `iters`, `warmup_iters` and the two sleeps are read
over: kvbench writes whatever `xfer_op` says, and here bytes lie in host memory and each burst is timed alone.
"""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from pdstage.errors import UsageError

_UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_YAML = (".yaml", ".yml")
_MAX_NBYTES = 1 << 50


class Pattern(NamedTuple):
    """One traffic matrix: `cells[i][j]` is the bytes that rank i sends to rank j."""

    name: str
    cells: tuple[tuple[int, ...], ...]

    @property
    def pairs(self) -> list[tuple[int, int, int]]:
        """Sender, receiver and bytes of each cell that is not zero, row by row."""
        return [(i, j, nbytes) for i, row in enumerate(self.cells) for j, nbytes in enumerate(row) if nbytes]

    @property
    def nbytes(self) -> int:
        return sum(map(sum, self.cells))


def read(path: Path) -> list[Pattern]:
    """The patterns of a YAML file (.yaml, .yml), in its order, or the one of a matrix's text file.

    Raises `UsageError` that names the file, and the line or the pattern, for what cannot be read.
    """
    if path.suffix.lower() not in _YAML:
        return [read_matrix(path)]
    held = _yaml(path)
    one, several = held.get("traffic_pattern"), held.get("traffic_patterns")
    listed = [one] if several is None and one is not None else several
    if not isinstance(listed, list) or not listed:
        raise UsageError(
            f"{path} has no traffic_patterns",
            remedy="give a list of them, or one traffic_pattern, each with its matrix_file, as kvbench takes them",
        )
    return [read_matrix(_matrix_file(path, number, given)) for number, given in enumerate(listed)]


def read_matrix(path: Path) -> Pattern:
    """A matrix's text file. Raises `UsageError` that names the file and the line."""
    rows: list[tuple[int, tuple[int, ...]]] = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if cells := line.split():
            rows.append((number, tuple(_size(cell, f"{path}, line {number}") for cell in cells)))
    for number, row in rows:
        if len(row) != len(rows):
            raise UsageError(
                f"{path}, line {number}: {len(row)} cells in a matrix of {len(rows)} rows",
                remedy="give a cell for each rank in each row",
            )
    pattern = Pattern(path.name, tuple(row for _, row in rows))
    if not pattern.nbytes:
        raise UsageError(f"{path} moves no byte", remedy="give a matrix with a cell that is not zero")
    return pattern


def _size(cell: str, where: str) -> int:
    unit = _UNITS.get(cell[-1].upper())
    try:
        nbytes = float(cell[:-1] if unit else cell) * (unit or 1)
    except ValueError:
        nbytes = math.nan
    if not 0 <= nbytes <= _MAX_NBYTES:  # nor for what is no number
        raise UsageError(f"{where}: {cell!r} is no size", remedy="write bytes, as 65536, 64K, 1.5M or 2G")
    return int(nbytes)


def _matrix_file(path: Path, number: int, given: object) -> Path:
    where = f"{path}, pattern {number}"
    if not isinstance(given, dict) or not isinstance(given.get("matrix_file"), str):
        raise UsageError(f"{where} has no matrix_file", remedy="name the text file of its matrix")
    if given.get("shards", 1) != 1:
        raise UsageError(f"{where} has {given['shards']} shards", remedy="leave shards out: kvbench takes one, too")
    named = Path(given["matrix_file"])
    return named if named.exists() else path.parent / named


def _yaml(path: Path) -> dict[str, Any]:
    try:
        yaml: Any = import_module("yaml")
    except ModuleNotFoundError as missing:
        raise UsageError(
            f"{path} is YAML, and PyYAML is not installed", remedy="pip install pyyaml, or pass a matrix's text file"
        ) from missing
    try:
        held = yaml.safe_load(_text(path))
    except yaml.YAMLError as error:
        what = " ".join(str(error).split())
        raise UsageError(f"{path} is not YAML: {what}", remedy="write it as kvbench takes it") from error
    return held if isinstance(held, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "no text"
        raise UsageError(f"{path} cannot be read ({said})", remedy="name a file of kvbench") from error

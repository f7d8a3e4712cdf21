"""Journals on disk: each node's lines in order, and which are missing.

A file may end in the middle of a line, if its process was killed. A node's first lines may be gone, if it kept only the
latest. Neither is an error; any other file that is not a journal is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdstage.errors import UsageError
from pdstage.manager.journal import OLDER, SUFFIX, VERSION, Head, Line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_head = msgspec.json.Decoder(Head)
_line = msgspec.json.Decoder(Line)


class Place(NamedTuple):
    """The file and number of a line."""

    path: Path
    number: int

    def __str__(self) -> str:
        return f"{self.path}:{self.number}"


@dataclass(slots=True)
class Node:
    """One node's journal. `lines` are in order; `first` is the first one's number: above 0, older lines are gone."""

    head: Head
    first: int = 0
    lines: list[tuple[Place, Line]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.head.role} rank {self.head.rank}"

    @property
    def whole(self) -> bool:
        """Whether it is complete from the node's start."""
        return self.first == 0


def read(paths: Iterable[Path]) -> list[Node]:
    """The journals in files and folders, one per node. Raises `UsageError` for a file that is not a journal."""
    parts: dict[str, list[Node]] = {}
    for path in _files(paths):
        part = _part(path)
        if part is not None:
            parts.setdefault(part.head.incarnation, []).append(part)
    return [_joined(found) for found in parts.values()]


def _files(paths: Iterable[Path]) -> list[Path]:
    """Decode's files first, by name: prefill's journals then contain what decode has received, even during the run."""
    found: dict[Path, None] = {}
    for path in paths:
        inside = sorted(one for end in (SUFFIX, OLDER) for one in path.rglob(f"*{end}")) if path.is_dir() else [path]
        found |= dict.fromkeys(one.resolve() for one in inside)
    return sorted(found, key=lambda path: path.name)


def _part(path: Path) -> Node | None:
    """One file; None if its process was killed before its first line was complete."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror})", remedy="name a journal", field="journal") from error
    *lines, _ = data.split(b"\n")
    if not lines:
        return None
    number = 1
    try:
        head = _head.decode(lines[0])
        if head.journal != VERSION:
            raise UsageError(
                f"{path} is a journal of version {head.journal}, this is {VERSION}",
                remedy="judge it with the release that wrote it", field="journal",
            )  # fmt: skip
        node = Node(head, head.first)
        for number, line in enumerate(lines[1:], 2):
            node.lines.append((Place(path, number), _line.decode(line)))
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"{path}:{number} is no line of a journal ({error})", remedy="name what journal= wrote", field="journal"
        ) from error
    return node


def _joined(parts: list[Node]) -> Node:
    """The files of one node as one; lines before a gap between two files are left out."""
    parts.sort(key=lambda part: part.first)
    whole = Node(parts[-1].head, parts[0].first)
    for part in parts:
        if whole.lines and part.first != whole.lines[-1][1].n + 1:
            whole.lines.clear()
        if not whole.lines:
            whole.first = part.first
        whole.lines += part.lines
    return whole

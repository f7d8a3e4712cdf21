"""The fenced blocks of README, CONTRIBUTING and docs/*.md, with what their marks say.

A mark is an HTML comment on a line of its own, in front of the fence:

    <!-- not run: REASON -->     it cannot run in a test, for one of `REASONS`
    <!-- run as: COMMANDS -->    the test's own smaller arguments, addresses or environment: same programs, same order
    <!-- same as: PAGE -->       that page, by its path, has the same block and runs it
    <!-- first: CODE -->         what the test does before it; a path under tests/docs/first for more than a line
    <!-- beside: COMMAND -->     what the test has running beside it: with `serves`, which is then this command's
    <!-- serves: REGEX -->       it goes on until the page ends; the next block runs once its output has REGEX, whose
                                 named groups are variables of the shell from then on
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIRST = Path(__file__).parent / "first"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
SHELL, PYTHON = {"sh", "bash", "console"}, {"python"}
OTHER = {"text", "toml", "json", "yaml", "mermaid", "promql", "http"}  # nothing to run
REASONS = {
    "gpu": "a GPU, or a tool that comes with one",
    "rdma": "RDMA hardware",
    "two hosts": "a second host",
    "cluster": "a Kubernetes cluster",
    "network": "a package registry or another site",
    "setup": "makes or changes the environment that the test runs in",
    "root": "root and apt",
    "itself": "is what runs these tests",
    "minutes": "takes minutes whatever its arguments; .ci/run or another test has it",
}
_FENCE = re.compile(r"^ *```(\w*)")
_MARK = re.compile(r"^ *<!-- (not run|run as|same as|first|beside|serves): (.*?) -->$")


@dataclass
class Block:
    """One fence: where, its language, its lines as they stand, and its marks by name."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        return commands(self.text, prompt=self.language == "console")

    @property
    def first(self) -> str:
        code = self.marks.get("first", "")
        return (FIRST / code).read_text() if re.fullmatch(r"[\w-]+\.(py|sh)", code) else code


def blocks(page: Path) -> list[Block]:
    """The page's fences in order. Raises `ValueError` for a fence that does not close or a mark in front of nothing."""
    found: list[Block] = []
    marks: dict[str, str] = {}
    inside: Block | None = None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence, mark = _FENCE.match(line), _MARK.match(line)
        if inside is not None:
            if fence:
                inside = None
            else:
                inside.text += line + "\n"
        elif fence:
            inside = Block(page, number, fence[1], "", marks)
            found.append(inside)
            marks = {}
        elif mark:
            marks = {**marks, mark[1]: mark[2]}
        elif marks:
            raise ValueError(f"{page}:{number}: a mark stands in front of a fence")
    if inside is not None:
        raise ValueError(f"{inside.where}: the fence does not close")
    return found


def commands(text: str, *, prompt: bool = False) -> list[str]:
    """Command by command, without comments; of a console's text those behind `$ `."""
    lines = text.replace("\\\n", " ").splitlines()
    if prompt:
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    joined = [shlex.join(shlex.split(line, comments=True)) for line in lines]
    return [raw.strip() for raw, words in zip(lines, joined, strict=True) if words]


def programs(listed: list[str]) -> list[tuple[str, ...]]:
    """What each command runs, whatever its options: the program and what it is told to do."""
    found = []
    for command in listed:
        words = [word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=", word)]
        found.append(tuple(word for word in words[:3] if not word.startswith(("-", "/", ".", "tcp:")))[:2])
    return found

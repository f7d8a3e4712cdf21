"""Tokens of code by place, and the lid on them, weight.toml, which lint checks.

    python -m tests.weight            a table
    python -m tests.weight --check    fails where a place is above its number, or a number was raised unpaid
    python -m tests.weight --write    writes the numbers that there are (make weight)

A number goes up in a commit that takes at least as much away elsewhere, or that adds a line to CHANGELOG.md, begun with
"- Weight:" and says what a user got for it. Python's tokens are counted by `tokenize`, without comments, docstrings and
layout; those of C++ and CUDA by a pattern.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from itertools import pairwise
from pathlib import Path

LID = Path("weight.toml")
CODE = ("*.py", "*.cpp", "*.hpp", "*.cu", "*.cuh", "*.c")
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip
C_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|[A-Za-z_]\w*|\d[\w.]*|[^\s\w]')
C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
PAID = re.compile(r"^\+- Weight:", re.MULTILINE)


def git(*args: str) -> str:
    return subprocess.run(["git", *args], capture_output=True, text=True, check=True).stdout


def tokens(source: str, name: str) -> int:
    if not name.endswith(".py"):
        return len(C_TOKEN.findall(C_COMMENT.sub("", source)))
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs.update(range(child.lineno, child.end_lineno + 1))
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(one.type not in LAYOUT and one.start[0] not in docs for one in found)


def place(name: str) -> str:
    first, *rest = name.split("/")
    if not rest:
        return "."
    return f"{first}/{rest[0] if len(rest) > 1 else '*.py'}" if first in {"pdstage", "tests"} else first


def weigh() -> Counter[str]:
    """Tokens by place, of what git tracks as it lies here."""
    found: Counter[str] = Counter()
    for name in git("ls-files", *CODE).splitlines():
        if Path(name).is_file() and not Path(name).is_symlink():
            found[place(name)] += tokens(Path(name).read_text(), name)
    return found


def lid(text: str) -> Counter[str]:
    return Counter(tomllib.loads(text))


def unpaid() -> list[str]:
    """Commits, and what is not committed yet, that raised the whole without a word in CHANGELOG.md."""
    commits = git("log", "--reverse", "--format=%h", "--", str(LID)).split()
    wholes = [lid(git("show", f"{one}:{LID}")).total() for one in commits] + [lid(LID.read_text()).total()]
    steps = [("show", one) for one in commits[1:]] + [("diff", "HEAD")] * bool(commits)
    return [
        "this change" if what == "HEAD" else what
        for (before, after), (show, what) in zip(pairwise(wholes), steps, strict=True)
        if after > before and not PAID.search(git(show, what, "--", "CHANGELOG.md"))
    ]


def check() -> list[str]:
    most = lid(LID.read_text())
    over = [f"{name}: {n:,} tokens, {n - most[name]:,} above {LID}" for name, n in weigh().items() if n > most[name]]
    raised = [f"{LID}: {one} raises it, and no line '- Weight: ...' is added to CHANGELOG.md" for one in unpaid()]
    remedy = ["take as much away elsewhere, then `make weight`; or see CONTRIBUTING.md, Weight"]
    return over + raised + (remedy if over or raised else [])


def main() -> None:
    match sys.argv[1:]:
        case ["--check"]:
            if wrong := check():
                sys.exit("\n".join(wrong))
        case ["--write"]:
            rows = sorted(weigh().items())
            LID.write_text("# Tokens of code by place: at most these. See CONTRIBUTING.md, Weight.\n")
            with LID.open("a") as file:
                file.writelines(f'"{name}" = {n}\n' for name, n in rows)
        case _:
            found = weigh()
            for name, n in sorted(found.items()):
                print(f"{name:24} {n:10,}")
            print(f"{'everything':24} {found.total():10,}")


if __name__ == "__main__":
    main()

"""Every Python block of README and docs runs, a page's in one process; what cannot is held to the API's signatures."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, PYTHON, ROOT, Block, blocks
from tests.processes import python

PYTHON_PAGES = [page for page in PAGES if any(block.language in PYTHON for block in blocks(page))]
INCLUDE = "--8<--\n"
WITH_NAMES = (
    "pdstage", "pdstage.tensors", "pdstage.transport", "pdstage.plan.convert", "pdstage.metadata",
)  # fmt: skip


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language in PYTHON]


@pytest.mark.usefixtures("port_to_itself")
@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    run = [b for b in python_blocks(page) if "not run" not in b.marks and not b.text.startswith(INCLUDE)]
    code = "\n".join(f"{block.first}\n# {block.where}\n{block.text}" for block in run)
    (tmp_path / "page.py").write_text(code)
    done = python("page.py", check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert not done.stdout + done.stderr, "a transfer that goes well says nothing"


def test_what_is_included_is_run() -> None:
    """A block that is a file of the checkout stands on a page that runs that file."""
    included = [block for page in PYTHON_PAGES for block in python_blocks(page) if block.text.startswith(INCLUDE)]
    assert included
    for block in included:
        name = block.text.splitlines()[1]
        assert (ROOT / name).is_file(), block.where
        assert any(f"python {name}" in other.commands for other in blocks(block.page)), block.where


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_calls_fit_the_api(page: Path) -> None:
    """Of every block, run or not: what it calls of the API has the arguments that it names."""
    api = {
        name: getattr(module, name) for module in map(importlib.import_module, WITH_NAMES) for name in public(module)
    }
    for block in python_blocks(page):
        text = "" if block.text.startswith(INCLUDE) else block.text
        for node in ast.walk(ast.parse(text, block.where)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in api:
                known = inspect.signature(api[node.func.id]).parameters
                if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
                    unknown = {word.arg for word in node.keywords} - known.keys()
                    assert not unknown, f"{block.where}: {node.func.id} has no {unknown}"


def public(module: object) -> list[str]:
    return [name for name in getattr(module, "__all__", None) or dir(module) if not name.startswith("_")]


def test_toml_is_toml() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "toml":
                tomllib.loads(block.text)

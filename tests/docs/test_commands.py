"""Every command of README, CONTRIBUTING and docs runs as it stands there, or says why it cannot: see `pages`."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from pdstage.cli import COMMANDS
from tests.docs.pages import OTHER, PAGES, PYTHON, REASONS, ROOT, SHELL, Block, blocks, commands, programs

LIMIT_S = 900
SLOW = {"CONTRIBUTING.md", "demo.md", "doctor.md", "integrate.md", "traces.md", "transports.md"}
SHELL_PAGES = [page for page in PAGES if any(block.language in SHELL for block in blocks(page))]
INLINE = re.compile(r"`((?:pdstage|make|python3? -m) [^`\n]+)`")
NOT_OURS = {"NAME", "FILE", "ADDRESS", "X", "..."}
MAKES_OWN = {"MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"}
README_LINES, PAGE_LINES = 125, 250
REFERENCE = {"api.md", "transports.md", "performance.md"}
NO_COMMANDS = {"pdstage gather room-3 #2"}  # the name of a slice of a trace


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The checkout's files by links, where what commands write disturbs nobody, with this Python as its `.venv`."""
    top = tmp_path / "pdstage"
    top.mkdir()
    for path in ROOT.iterdir():
        if path.name not in {".git", ".venv", "build", "dist"} and not path.name.endswith(("_cache", ".egg-info")):
            (top / path.name).symlink_to(path)
    (top / ".venv").symlink_to(sys.prefix)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "make").write_text(
        f'#!/bin/sh\nexec {shutil.which("make")} -o .venv/.pdstage-setup -o .venv/.pdstage-demo "$@"\n'
    )
    (tools / "make").chmod(0o755)
    return top


class Shell:
    """Runs a page's blocks one after the other, in one folder; what serves goes on until the end."""

    def __init__(self, top: Path, ends: ExitStack) -> None:
        self.top, self.ends = top, ends
        path = os.pathsep.join((str(top.parent / "bin"), str(Path(sys.prefix) / "bin"), os.environ["PATH"]))
        self.env = {**own_environment(), "PATH": path, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}

    def run(self, block: Block) -> None:
        script = block.marks.get("run as") or "\n".join(block.commands)
        if block.first:
            self._finish(block.first, block)
        if "serves" in block.marks:
            self._serve(block.marks.get("beside", script), block)
        if "serves" not in block.marks or "beside" in block.marks:
            self._finish(script, block)

    def _finish(self, script: str, block: Block) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=self.top, env=self.env, text=True, timeout=LIMIT_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{block.where}: {script}\n{done.stdout}"

    def _serve(self, script: str, block: Block) -> None:
        said = self.top.parent / f"said-{block.line}"
        with said.open("w") as out:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {script}"], cwd=self.top, env=self.env, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.ends.callback(_end, server)
        until = time.monotonic() + LIMIT_S
        while not (found := re.search(block.marks["serves"], said.read_text())):
            assert server.poll() is None, f"{block.where} ended: {said.read_text()}"
            assert time.monotonic() < until, f"{block.where} never said {block.marks['serves']}: {said.read_text()}"
            time.sleep(0.05)
        self.env.update(found.groupdict())


def own_environment() -> dict[str, str]:
    """This process's, without what `make test ARGS=...` tells each make below it."""
    ours = re.findall(r"^([A-Z_]+) [?:]?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return {name: value for name, value in os.environ.items() if name not in MAKES_OWN.union(ours)}


def _end(server: subprocess.Popen[bytes]) -> None:
    """As an operator ends it; then it must go by itself."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
    try:
        code = server.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        raise
    assert code in {0, 130, -signal.SIGINT}, code


@pytest.mark.usefixtures("port_to_itself")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=pytest.mark.full if page.name in SLOW else ()) for page in SHELL_PAGES],
)
def test_every_command_runs(page: Path, checkout: Path) -> None:
    with ExitStack() as ends:
        shell = Shell(checkout, ends)
        for block in blocks(page):
            if block.language in SHELL and not {"not run", "same as"} & block.marks.keys():
                shell.run(block)


def test_pages_can_be_finished() -> None:
    """The README fits two screens, other pages a quarter of an hour, but for those to look things up in; and none says
    what another has said.
    """
    said: dict[str, str] = {}
    for page in PAGES:
        text = page.read_text()
        most = README_LINES if page.name == "README.md" else PAGE_LINES
        n = len(text.splitlines())
        assert n <= most or page.name in REFERENCE, f"{page.name} has {n} lines of {most}: move details elsewhere"
        for paragraph in re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            words = " ".join(paragraph.split())
            if len(words) >= 100 and words[0] not in "|<:" and page.name != "index.md":  # which begins as the README
                assert said.setdefault(words, page.name) == page.name, f"{page.name} and {said[words]}: {words}"


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page)]


def test_every_fence_is_of_a_known_language_and_has_marks_that_are_true() -> None:
    for block in all_blocks():
        assert block.language in SHELL | PYTHON | OTHER, f"{block.where}: {block.language!r}"
        reason, other, shorter = (block.marks.get(name) for name in ("not run", "same as", "run as"))
        assert reason is None or reason in REASONS, f"{block.where}: give one of {sorted(REASONS)}"
        if other is not None:
            run = [one for one in blocks(ROOT / other) if one.language in SHELL and "not run" not in one.marks]
            assert block.commands in [one.commands for one in run], block.where
        if shorter is not None:
            assert programs(commands(shorter.replace(" && ", "\n"))) == programs(block.commands), block.where


def told() -> list[tuple[str, str]]:
    """Every command that a page names, in fences and in words, and where."""
    found = [(block.where, command) for block in all_blocks() if block.language in SHELL for command in block.commands]
    for page in PAGES:
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        found += [(page.name, command) for command in INLINE.findall(prose)]
    return found


def test_every_command_named_exists() -> None:
    """Also where it is not run: the verb, the module and the options are there."""
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for where, command in told():
        words = shlex.split(re.sub(r"^([A-Z_]+=\S+ )*(\.venv/bin/)?", "", command), comments=True)
        said = f"{where}: {command}"
        if words[0] == "make":
            assert {word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)} <= verbs, said
        elif words[:2] in (["python", "-m"], ["python3", "-m"]) and not words[2].startswith(
            ("pytest", "pip", "sglang")
        ):
            module = ROOT / words[2].replace(".", "/")
            assert module.with_suffix(".py").exists() or module.is_dir(), said
        elif words[0] == "pdstage" and not NOT_OURS & set(words) and command not in NO_COMMANDS:
            check_options(words[1:], said)


def check_options(words: list[str], said: str) -> None:
    assert words[0].rstrip(",") in COMMANDS or words[0].startswith("-"), said
    if words[0] in COMMANDS:
        _, _, arguments = COMMANDS[words[0]]
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= {"--help", *dict(arguments)}, said

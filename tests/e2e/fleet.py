"""The servers of a session: each is started when a test first wants it, kept for those that follow, and ended when the
machine has too many.

The right answers of a model are asked once and kept.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from tests.e2e import load, servers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from tests.e2e.load import Answer, Prompt
    from tests.e2e.servers import Server

SAVING = (sys.executable, "-m", "tests.e2e.sglang.run", "tests.e2e.models")
"""The command that saves a model, whatever libraries of a GPU are missing; its name and a folder are put behind it."""

MOST = 4
"""Servers at a time: more have no memory, and those that idle cost time."""


class Spec(Protocol):
    """What tells one server from another: hashable, equal where the servers are."""

    @property
    def model(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def near(self) -> float: ...
    def server(self, folder: Path, logs: Path) -> Server: ...


class Fleet:
    """`place` holds models and logs."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._servers: dict[Any, Server] = {}  # least recently used first
        self._folders: dict[str, Path] = {}
        self._right: dict[Any, dict[Prompt, tuple[int, ...]]] = {}
        self.notes: list[str] = []
        """What became of each part and how long it took, for the report at the end."""

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Notes how long the block takes."""
        began = time.monotonic()
        yield
        self.note(f"{what}: {time.monotonic() - began:.1f} s")

    def note(self, line: str) -> None:
        """A line of the report."""
        self.notes.append(line)

    def folder(self, model: str) -> Path:
        if model not in self._folders:
            folder = self.place / model
            subprocess.run([*SAVING, model, folder], check=True)
            self._folders[model] = folder
        return self._folders[model]

    def up(self, *specs: Spec) -> list[Server]:
        """The servers of `specs`, serving; those that do not run are started together."""
        began = time.monotonic()
        found = []
        for spec in dict.fromkeys(specs):
            server = self._servers.pop(spec, None) or spec.server(self.folder(spec.model), self.place)
            self._servers[spec] = server
            found.append(server)
        for spec, server in list(self._servers.items())[: max(0, len(self._servers) - MOST)]:
            if spec not in specs:
                server.stop()
                del self._servers[spec]
        idle = [server.name for server in found if not server.runs]
        servers.up(found)
        if idle:
            self.note(f"up: {', '.join(idle)}: {time.monotonic() - began:.1f} s")
        return [self._servers[spec] for spec in specs]

    def right(
        self, reference: Spec, prompts: Iterable[Prompt], n_tokens: int = load.N_TOKENS, *, at_a_time: int = 16,
        as_text: bool = False,
    ) -> dict[Prompt, tuple[int, ...]]:  # fmt: skip
        """What the engine `reference` answers to each prompt, asked so many at a time.

        Where the logarithms of its two best tokens' probabilities are nearer than `reference.near`, the order in which
        sums are rounded chooses: how many requests are in a batch, into which chunks a prompt is cut, how many ranks
        add up. So an answer ends here at the first such place.
        """
        known = self._right.setdefault((reference, n_tokens, as_text), {})
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
        if new:
            (server,) = self.up(reference)
            with self.timed(f"{reference.name}: {len(new)} right answers"):
                more = {"logprobs": 2} if reference.near else {}
                ask = load.to(server.url, as_text=as_text, n_tokens=n_tokens, **more)
                answers = load.ask_all(ask, new, at_a_time)
            lost = [one for one in answers if not one.is_ok]
            assert not lost, f"{server.name} did not answer: {lost[0].body}\n{server.tail()}"
            known.update({one.prompt: one.tokens[: _n_decided(one, reference.near)] for one in answers})
            self.note(f"{reference.name}: {sum(len(known[one]) for one in new)} of {len(new) * n_tokens} are decided")
        return known

    def fresh(self, *specs: Spec) -> list[Server]:
        """As `up`, with nothing in their prefix caches."""
        found = self.up(*specs)
        for server in found:
            server.post("/reset_prefix_cache")
        return found

    def stop(self) -> None:
        """Ends all servers."""
        for server in self._servers.values():
            server.stop()


def _n_decided(answer: Answer, near: float) -> int:
    """The tokens of an answer before the first whose place was nearly another's."""
    if not near:
        return len(answer.tokens)
    best = (sorted(one.values()) for one in answer.body["choices"][0]["logprobs"]["top_logprobs"])
    return len(list(takewhile(lambda two: two[-1] - two[-2] >= near, best)))

"""Progress bars show on a terminal alone, and what a command prints stays as it is."""

from __future__ import annotations

import io
import sys

import pytest

from pdstage.watch.terminal import progress


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_steps_are_shown_on_a_terminal_alone(monkeypatch, is_terminal):
    monkeypatch.setattr(sys, "stderr", Stream(is_terminal))
    monkeypatch.setattr(sys, "stdout", Stream(False))
    with progress("work", 3) as advance:
        advance()
        advance("more work", 2)
    said = sys.stderr.getvalue()
    assert ("more work 3/3" in said) if is_terminal else not said
    assert not sys.stdout.getvalue()

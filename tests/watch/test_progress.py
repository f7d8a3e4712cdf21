"""Progress bars show on a terminal alone, and what a command prints stays as it is."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

from pdstage.tools.watch.progress import progress

SIM = (sys.executable, "-m", "pdstage.cli", "sim", "--seeds", "6", "--steps", "40")


def in_terminal(command: tuple[str, ...]) -> tuple[int, str, str]:
    """The exit code, standard output, and what a terminal on standard error was shown."""
    main, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=child, env=environment)
    os.close(child)
    shown = b""
    while True:
        try:
            part = os.read(main, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    printed, _ = process.communicate(timeout=900)
    os.close(main)
    return process.returncode, printed.decode(), shown.decode(errors="replace")


def test_the_simulator_counts_seeds_on_a_terminal_and_prints_the_same():
    code, printed, shown = in_terminal(SIM)
    assert code == 0
    assert re.search(r"6/6", shown)
    plain = subprocess.run(SIM, capture_output=True, text=True, check=True)
    assert plain.stderr == ""
    assert plain.stdout.splitlines()[0] == printed.splitlines()[0]
    assert "\x1b" not in printed


def test_without_a_terminal_nothing_is_shown(capsys):
    with progress("work", 3) as advance:
        advance()
        advance("more", 2)
    assert capsys.readouterr() == ("", "")

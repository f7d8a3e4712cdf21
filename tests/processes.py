"""What tests ask of the kernel about processes: to stop one, to end with its parent, to be in a network, its
size, a port of its own.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_ENDS_S = 240.0
_CLONE_NEWNET = 0x4000_0000
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLAIMS: list[socket.socket] = []


def until(done: Callable[[], object], what: object) -> None:
    """Looks again and again until `done`; else it is said what is not so."""
    deadline_at = time.monotonic() + _ENDS_S
    while not done():
        assert time.monotonic() < deadline_at, what() if callable(what) else what
        time.sleep(0.01)


def stop(pid: int) -> None:
    """Until SIGCONT. The thread that takes the signal stops the others: on a busy machine they run on for a while."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    until(lambda: all(_state(task) in "TZX" for task in tasks.glob("*/stat")), f"process {pid} does not stop")


def _state(task: Path) -> str:
    """One letter, as proc(5) has it: T is stopped, and who has ended does not run either."""
    try:
        return task.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def die_with_parent(how: signal.Signals = signal.SIGKILL) -> None:
    """This process, stopped or not, ends with its parent, however that ends: the kernel sees to it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, how)


def child(target: Callable[..., object], *args: object, how: str = "forkserver") -> tuple[Any, Any]:
    """A process of `target(pipe, *args)` that ends with this one, and this end of the pipe; `how`: multiprocessing's
    way to start it.
    """
    context: Any = multiprocessing.get_context(how)
    pipe, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, pipe


def python(*words: str, check: bool = False, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs this Python with these arguments to its end, for 900 s unless told; with `check` that is a good one."""
    how = {"timeout": 900, "capture_output": True, "text": True} | how
    done = subprocess.run([sys.executable, *words], check=False, **how)
    assert not (check and done.returncode), done.stdout + done.stderr
    return done


def enter(namespace: str | int) -> None:
    """Moves this process, which has one thread yet, into a network namespace, by name or descriptor; "": it stays."""
    if namespace == "":
        return
    fd = namespace if isinstance(namespace, int) else os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if _LIBC.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")
    finally:
        if fd != namespace:
            os.close(fd)


def n_tasks() -> int:
    """Threads of this process, Python's and others."""
    return len(list(Path("/proc/self/task").iterdir()))


def free_port() -> int:
    """A port that stays this process's: below those that the kernel hands out, and taken by no other run of tests."""
    for port in range(20_000, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0port {port} of a test's server")
            with socket.socket() as one:
                one.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        _CLAIMS.append(claim)
        return port
    raise AssertionError("no port is free")

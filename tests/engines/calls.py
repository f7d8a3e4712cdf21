"""A process of a test's engine, called by name through a pipe."""

from __future__ import annotations

import contextlib
import traceback
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

PATIENCE_S = 240.0  # how long anything may take on a loaded machine


def serve(pipe: Connection, make: Callable[[], object]):
    """The process's life: it says when `make` is done, and then answers calls of what was made, until the pipe ends."""
    made = []
    with contextlib.suppress(EOFError, ConnectionError):  # the test is over
        _answer(pipe, lambda: made.append(make()))
        while made:
            name, args, kwargs = pipe.recv()
            _answer(pipe, partial(getattr(made[0], name), *args, **kwargs))


def _answer(pipe: Connection, call: Callable[[], object]):
    try:
        answer = True, call()
    except BaseException:  # noqa: BLE001  (carried to the test, which fails with it)
        answer = False, traceback.format_exc()
    pipe.send(answer)


def result(pipe: Connection):
    """The answer to a call, or its failure."""
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError("a process does not answer")
    good, answer = pipe.recv()
    if not good:
        raise AssertionError(answer)
    return answer

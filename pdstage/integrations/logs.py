"""pdstage's log lines in an engine's log, where its operator reads.

An engine such as vLLM gives handlers to its own logger alone, so what other packages log is shown nowhere. `show` hands
pdstage's records to that logger's handlers. Who has configured logging for pdstage, by the logger `pdstage` or by the
root logger, sees what they configured and nothing more. Must not import an engine.
"""

from __future__ import annotations

import copy
import logging


class EngineLog(logging.Handler):
    """Hands each record to the engine's logger as that is by then: engines configure theirs more than once."""

    def __init__(self, engine: str) -> None:
        super().__init__()
        self._engine = logging.getLogger(engine)

    def emit(self, record: logging.LogRecord) -> None:
        """Nothing once the root logger has handlers: the record reaches those by itself."""
        if logging.root.handlers or not self._engine.isEnabledFor(record.levelno):
            return
        shown = copy.copy(record)
        shown.msg = f"pdstage: {record.msg}"  # engines' formats name the file, but not the package
        self._engine.handle(shown)


def show(engine: str) -> None:
    """Shows what pdstage logs in the log of `engine`, the name of its logger, from that one's level on.

    So too if the engine configures its log only later, but for DEBUG. Changes nothing where logging is configured for
    pdstage already. May be repeated.
    """
    ours = logging.getLogger("pdstage")
    if logging.root.handlers or any(not isinstance(handler, logging.NullHandler) for handler in ours.handlers):
        return
    ours.addHandler(EngineLog(engine))
    if ours.level == logging.NOTSET:
        ours.setLevel(min(logging.INFO, logging.getLogger(engine).getEffectiveLevel()))

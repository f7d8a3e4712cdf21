"""pdstage's log lines in an engine's log, where its operator reads.

An engine such as vLLM attaches handlers only to its own logger, so log lines of other packages are shown nowhere.
`show` passes pdstage's records to that logger's handlers. If logging is configured for pdstage, by the logger `pdstage`
or by the root logger, nothing changes. Must not import an engine.
"""

from __future__ import annotations

import copy
import logging


class EngineLog(logging.Handler):
    """Passes each record to the engine's logger as it is configured then: engines configure theirs more than once."""

    def __init__(self, engine: str) -> None:
        super().__init__()
        self._engine = logging.getLogger(engine)

    def emit(self, record: logging.LogRecord) -> None:
        """Does nothing once the root logger has handlers, which get the record anyway."""
        if logging.root.handlers or not self._engine.isEnabledFor(record.levelno):
            return
        shown = copy.copy(record)
        shown.msg = f"pdstage: {record.msg}"  # engines' formats name the file, but not the package
        self._engine.handle(shown)


def show(engine: str) -> None:
    """Shows pdstage's log lines in the log of `engine` (its logger's name), from that logger's level on.

    This also works if the engine configures its log later, except for DEBUG. It changes nothing if logging is
    configured for pdstage already. May be repeated.
    """
    ours = logging.getLogger("pdstage")
    if logging.root.handlers or any(not isinstance(handler, logging.NullHandler) for handler in ours.handlers):
        return
    ours.addHandler(EngineLog(engine))
    if ours.level == logging.NOTSET:
        ours.setLevel(min(logging.INFO, logging.getLogger(engine).getEffectiveLevel()))

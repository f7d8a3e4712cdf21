"""pdstage's log lines in an engine's log: an engine is any logger with handlers of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE = """
import logging, sys
import pdstage
from pdstage.integrations import logs
engine = logging.getLogger("engine")
engine.propagate = False
engine.setLevel(logging.INFO)
shown = logging.StreamHandler(sys.stdout)
shown.setFormatter(logging.Formatter("engine %(levelname)s %(name)s %(message)s"))
engine.addHandler(shown)
"""
OPERATOR = """
operator = logging.StreamHandler(sys.stdout)
operator.setFormatter(logging.Formatter("operator %(levelname)s %(message)s"))
"""
SAY = """
log = logging.getLogger("pdstage.manager.driver")
log.debug("fine %s", 1)
log.info("session with %s", "decode")
log.warning("peer %s: %s", "x", "100% gone")
"""
SHOW = 'logs.show("engine")\n'


def said(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", ENGINE + code + SAY], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert not done.stderr
    return done.stdout.splitlines()


BOTH = [
    "engine INFO pdstage.manager.driver pdstage: session with decode",
    "engine WARNING pdstage.manager.driver pdstage: peer x: 100% gone",
]


def test_what_pdstage_says_is_in_the_engine_s_log_from_its_level_on() -> None:
    assert said("") == []
    assert said(SHOW) == said(SHOW * 2) == BOTH


def test_an_engine_that_shows_less_shows_less_of_pdstage() -> None:
    assert said("engine.setLevel(logging.WARNING)\n" + SHOW) == BOTH[1:]
    assert said(SHOW + "engine.setLevel(logging.WARNING)\n") == BOTH[1:], "its level is asked for each time"


def test_an_engine_that_configures_its_log_again_shows_pdstage_there() -> None:
    again = 'shown.setFormatter(logging.Formatter("again %(message)s"))\n'
    new = (
        "engine.removeHandler(shown)\nshown = logging.StreamHandler(sys.stdout)\n"
        + again
        + "engine.addHandler(shown)\n"
    )
    assert said(SHOW + new) == ["again pdstage: session with decode", "again pdstage: peer x: 100% gone"]


@pytest.mark.parametrize(("logger", "first"), [("pdstage", True), (None, True), (None, False)])
def test_what_an_operator_configured_is_left_alone(logger: str | None, first: bool) -> None:
    """By the package's logger or by the root's, before the engine or after it: nothing is shown twice."""
    configured = OPERATOR + f"logging.getLogger({logger!r}).addHandler(operator)\n"
    lines = said(configured + SHOW if first else SHOW + configured)
    assert [line for line in lines if "peer" in line] == ["operator WARNING peer x: 100% gone"]


def test_a_configuration_that_names_pdstage_later_takes_its_place() -> None:
    configured = """
from logging.config import dictConfig
handler = {"class": "logging.StreamHandler", "stream": "ext://sys.stdout", "formatter": "one"}
dictConfig({"version": 1, "disable_existing_loggers": False, "handlers": {"one": handler},
    "formatters": {"one": {"format": "operator %(levelname)s %(message)s"}},
    "loggers": {"pdstage": {"handlers": ["one"], "level": "WARNING"}}})
"""
    assert said(SHOW + configured) == ["operator WARNING peer x: 100% gone"]

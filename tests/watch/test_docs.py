"""The dashboard, the alert rules and the page speak of metrics that are exported, and leave none out silently."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdstage.watch import catalogue
from tests import promtool
from tests.watch.samples import get

DOCS = Path(__file__).resolve().parents[2] / "docs"
NAMES = {metric.name for metric in catalogue.METRICS}
NOT_ON_THE_BOARD = {
    "pdstage_send_buffer_bytes": "a constant of the node's start",
    "pdstage_transport_posted_bytes_total": "of the measured posts alone; the board shows all bytes that were written",
}
NAME, MATCHED, GROUPED = (
    re.compile(r"\bpdstage_\w+"),
    re.compile(r"(pdstage_\w+)\{([^}]*)\}"),
    re.compile(r"by \(([^)]*)\)"),
)
EXPORTED = {
    metric.name + end: {*catalogue.NODE_LABELS, *metric.labels, *extra}
    for metric in catalogue.METRICS
    for end, extra in (
        {"_bucket": ("le",), "_count": (), "_sum": ()} if metric.kind == "histogram" else {"": ()}
    ).items()
}
TARGETS = {"job", "instance"}  # what Prometheus adds itself
EXPRESSIONS = [*promtool.QUERIES, *(rule["expr"] for rule in promtool.RULES)]


def test_every_metric_is_on_the_board_or_left_out_with_a_reason():
    on_it = {name for query in promtool.QUERIES for name in NAME.findall(query)}
    on_it |= {re.sub(r"_(bucket|count|sum)$", "", name) for name in on_it}
    assert NAMES - on_it == set(NOT_ON_THE_BOARD)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_what_is_exported(expression):
    names = NAME.findall(expression)
    assert names
    assert not [name for name in names if name not in EXPORTED], "not exported"
    labels = set.intersection(*(EXPORTED[name] for name in names)) | TARGETS
    for by in GROUPED.findall(expression):
        assert {label.strip() for label in by.split(",")} <= labels, expression
    for name, matchers in MATCHED.findall(expression):
        used = set(re.findall(r"(\w+)\s*=~?", matchers))
        assert used <= EXPORTED[name] | TARGETS, (name, used)
    if "_total" in expression:
        assert "rate(" in expression or "increase(" in expression, "a counter's value alone says nothing"


def test_values_of_matched_labels_are_ones_that_occur(watched):
    """Each of `granted|landed`, of which promtool asks for one."""
    watched.move(1)
    held = {(name, *pair) for name, labels in watched.scrape().of for pair in labels}
    for expression in EXPRESSIONS:
        for name, matchers in MATCHED.findall(expression):
            for label, operator, values in re.findall(r'(\w+)(=~?)"([^"$]*)"', matchers):
                for value in values.split("|") if operator == "=~" else [values]:
                    assert (name, label, value) in held, (name, label, value)


@pytest.mark.skipif(promtool.PROMTOOL is None, reason="there is no promtool: make servers")
def test_what_the_board_and_the_alerts_ask_for_has_a_value(watched, tmp_path):
    history = promtool.History()
    for room in range(2):
        watched.move(room)
        history.add({"pair": get(watched.endpoint.address)}, minutes=5)
    history.expect(promtool.asked())
    history.check(tmp_path)


def test_alerts_say_how_bad_it_is_and_where_to_read_on():
    assert len(set(promtool.ALERTS)) == len(promtool.RULES)
    for rule in promtool.RULES:
        assert rule["expr"].strip()
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"


def test_every_alert_has_its_section_in_the_runbook_and_every_section_an_alert():
    sections = re.split(r"^### ", (DOCS / "runbook.md").read_text(), flags=re.MULTILINE)[1:]
    names = [section.partition("\n")[0] for section in sections]
    assert sorted(names) == sorted(promtool.ALERTS)
    for name, section in zip(names, sections, strict=True):
        said = re.findall(r"^\*\*(Means\.|Look at|Do|Let it be)\*\*", section, re.MULTILINE)
        assert said == ["Means.", "Look at", "Do", "Let it be"], name


def test_names_and_units_follow_the_convention():
    for metric in catalogue.METRICS:
        assert re.fullmatch(r"pdstage(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.name.endswith("_info") == (metric.kind == "info")
        assert metric.kind != "histogram" or metric.unit == "seconds"
        assert metric.text.endswith(".")
    assert len(NAMES) == len(catalogue.METRICS)
    assert not NAMES & {f"{name}{end}" for name in NAMES for end in ("_bucket", "_count", "_sum")}

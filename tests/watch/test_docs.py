"""The dashboard, the alert rules and the page speak of metrics that are exported, and leave none out silently."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pdstage.watch import catalogue

DOCS = Path(__file__).resolve().parents[2] / "docs"
BOARD = json.loads((DOCS / "grafana" / "pdstage.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
ALERTS = (DOCS / "grafana" / "alerts.yaml").read_text()
EXPORTED = {
    metric.name + end: {*catalogue.NODE_LABELS, *metric.labels, *extra}
    for metric in catalogue.METRICS
    for end, extra in (
        {"_bucket": ("le",), "_count": (), "_sum": ()} if metric.kind == "histogram" else {"": ()}
    ).items()
}
TARGETS = {"job", "instance"}  # what Prometheus adds itself
NOT_ON_THE_BOARD = {
    "pdstage_send_buffer_bytes": "a constant of the node's start",
    "pdstage_transport_posted_bytes_total": "of the measured posts alone; the board shows all bytes that were written",
}
NAME, MATCHED, GROUPED = (
    re.compile(r"\bpdstage_\w+"),
    re.compile(r"(pdstage_\w+)\{([^}]*)\}"),
    re.compile(r"by \(([^)]*)\)"),
)


def expressions() -> list[str]:
    alerts = re.findall(r"expr: (?:>\n)?((?:.+\n)(?: {10}.+\n)*)", ALERTS)
    assert len(alerts) == ALERTS.count("- alert:")
    return [target["expr"] for panel in PANELS for target in panel["targets"]] + alerts


def asked() -> set[str]:
    """The names of series that the board and the alerts ask for."""
    return {name for expression in expressions() for name in NAME.findall(expression)}


def family(name: str) -> str:
    return re.sub(r"_(bucket|count|sum)$", "", name) if name in EXPORTED and name not in NAMES else name


NAMES = {metric.name for metric in catalogue.METRICS}


@pytest.mark.parametrize("expression", expressions())
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


def test_every_metric_is_on_the_board_or_left_out_with_a_reason():
    board = {family(name) for panel in PANELS for t in panel["targets"] for name in NAME.findall(t["expr"])}
    assert NAMES - board == set(NOT_ON_THE_BOARD)


def test_values_of_matched_labels_are_ones_that_occur(watched):
    """`state="used"` and the like: a value that no series has would show nothing, for ever."""
    watched.move(1)
    told = watched.scrape()
    held = {(name, *pair) for name, labels in told.of for pair in labels}
    for expression in expressions():
        for name, matchers in MATCHED.findall(expression):
            for label, operator, values in re.findall(r'(\w+)(=~?)"([^"$]*)"', matchers):
                for value in values.split("|") if operator == "=~" else [values]:
                    assert (name, label, value) in held, (name, label, value)


def test_alert_rules_are_yaml_with_an_expression_each():
    yaml = pytest.importorskip("yaml")
    rules = [rule for group in yaml.safe_load(ALERTS)["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) == ALERTS.count("- alert:")
    for rule in rules:
        assert rule["expr"].strip()
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}


def test_every_alert_has_its_section_in_the_runbook_and_every_section_an_alert():
    sections = re.split(r"^### ", (DOCS / "runbook.md").read_text(), flags=re.MULTILINE)[1:]
    names = [section.partition("\n")[0] for section in sections]
    assert sorted(names) == sorted(re.findall(r"- alert: (\w+)", ALERTS))
    for name, section in zip(names, sections, strict=True):
        said = re.findall(r"^\*\*(Means\.|Look at|Do|Let it be)\*\*", section, re.MULTILINE)
        assert said == ["Means.", "Look at", "Do", "Let it be"], name
    pointed = re.findall(r"- alert: (\w+)(?:(?!- alert:).)*?runbook: \"docs/runbook\.md#(\w+)\"", ALERTS, re.DOTALL)
    assert pointed == [(name, name.lower()) for name in re.findall(r"- alert: (\w+)", ALERTS)]


def test_names_and_units_follow_the_convention():
    for metric in catalogue.METRICS:
        assert re.fullmatch(r"pdstage(_[a-z]+)+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.name.endswith("_info") == (metric.kind == "info")
        assert metric.kind != "histogram" or metric.unit == "seconds"
        assert metric.text.endswith(".")
    assert len(NAMES) == len(catalogue.METRICS)
    assert not NAMES & {f"{name}{end}" for name in NAMES for end in ("_bucket", "_count", "_sum")}

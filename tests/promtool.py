"""Rules and queries, evaluated by Prometheus's own promtool over scrapes of real nodes.

Each scrape stands for as many minutes as it is told, so that a rule with `for: 10m` needs no wait.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = Path(__file__).resolve().parents[1]
PROMTOOL = shutil.which("promtool", path=f"{os.environ['PATH']}:{ROOT / '.venv' / 'bin'}")
GRAFANA = ROOT / "docs" / "grafana"
RULES = [rule for group in yaml.safe_load((GRAFANA / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
ALERTS = [rule["alert"] for rule in RULES]
PANELS = [one for one in json.loads((GRAFANA / "pdstage.json").read_text())["panels"] if one["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
STEP_S = 15
VARIABLES = {"$__rate_interval": "1m", "$job": ".*", "$role": ".*", "$rank": ".*"}


def asked() -> list[str]:
    """The board's queries, and what the alerts compare: each has a value where nodes serve what it names."""
    queries = [re.sub(r"\$\w+", lambda name: VARIABLES[name[0]], query) for query in QUERIES]
    return queries + [re.sub(r"(==|[<>]) ", r"\1 bool ", rule["expr"]) for rule in RULES]


class History:
    """What targets answered, one scrape after the other, and what is to be true when."""

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []
        self._expected: list[dict[str, object]] = []

    def add(self, pages: Mapping[str, str], minutes: float) -> None:
        """`pages`: by target. They stay so for `minutes`."""
        now = {}
        for target, page in pages.items():
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    labels = {"job": "pdstage", "instance": target, **sample.labels}
                    told = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
                    now[f"{sample.name}{{{told}}}"] = sample.value
        self._steps += [now] * round(minutes * 60 / STEP_S)

    def expect(self, expressions: Iterable[str], *, value: bool = True) -> None:
        """Each has a value now, or none."""
        at = f"{(len(self._steps) - 1) * STEP_S}s"
        samples = [{"labels": "{}", "value": 1}] if value else []
        for one in expressions:
            self._expected.append({"expr": f"count({one}) > bool 0", "eval_time": at, "exp_samples": samples})

    def check(self, folder: Path) -> None:
        """Fails where it was not as expected."""
        names = dict.fromkeys(name for step in self._steps for name in step)
        series = [{"series": name, "values": " ".join(_text(step.get(name)) for step in self._steps)} for name in names]
        test = {"interval": f"{STEP_S}s", "input_series": series, "promql_expr_test": self._expected}
        told = {"rule_files": [str(GRAFANA / "alerts.yaml")], "evaluation_interval": f"{STEP_S}s", "tests": [test]}
        file = folder / "history.json"  # JSON is YAML
        file.write_text(json.dumps(told))
        done = subprocess.run([str(PROMTOOL), "test", "rules", str(file)], check=False, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def firing(alerts: str) -> str:
    """The series that are there while one fires whose name this pattern matches."""
    return f'ALERTS{{alertname=~"{alerts}",alertstate="firing"}}'


def _text(value: float | None) -> str:
    if value is None:
        return "_"
    return repr(value) if math.isfinite(value) else {math.inf: "Inf", -math.inf: "-Inf"}.get(value, "NaN")

"""Reads metrics endpoints over HTTP, and computes rates from two readings.

It imports nothing of a node, which may be of another release.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from pdstage.errors import UsageError

try:
    from prometheus_client.parser import text_string_to_metric_families
except ModuleNotFoundError as missing:
    raise UsageError("reading metrics needs prometheus_client", remedy="pip install 'pdstage[top]'") from missing


TIMEOUT_S = 3.0
PREFIX = "pdstage_"
Labels: TypeAlias = "dict[str, str]"


@dataclass(slots=True)
class Node:
    """One node's samples at one moment, each with its own labels; `at` is that moment, or the time between two.

    `name`: such as "decode 3", with the labels that its exporter added. `rooms`: those open longest, as served.
    """

    name: str
    role: str
    at: float
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)
    rooms: list[dict[str, Any]] = field(default_factory=list)

    def series(self, metric: str, **labels: str) -> Iterator[tuple[Labels, float]]:
        """The samples of `metric` that carry `labels`."""
        for (name, held), value in self.samples.items():
            if name == metric and labels.items() <= dict(held).items():
                yield dict(held), value

    def value(self, metric: str, **labels: str) -> float:
        return sum(value for _, value in self.series(metric, **labels))

    def since(self, before: Node | None) -> Node:
        """What was added to every sample since `before`; a total that fell has restarted, as in Prometheus."""
        made = Node(self.name, self.role, self.at - (before.at if before else self.at))
        old = before.samples if before else self.samples
        for key, value in self.samples.items():
            was = old.get(key, 0.0)
            made.samples[key] = value - was if value >= was else value
        return made

    def rate(self, metric: str, **labels: str) -> float:
        """A second, of what `since` made."""
        return self.value(metric, **labels) / self.at if self.at > 0 else 0.0


class Answer(NamedTuple):
    """One endpoint's answer: its nodes, or why there is none; and whether it serves rooms."""

    endpoint: str
    nodes: tuple[Node, ...] = ()
    problem: str = ""
    rooms_told: bool = True


def url_of(endpoint: str) -> str:
    """`http://host:port` of "port", "host:port" or a URL, whose path is dropped. Raises `UsageError`."""
    given = f"127.0.0.1:{endpoint}" if endpoint.isdigit() else endpoint
    split = urlsplit(given if "://" in given else f"http://{given}")
    try:
        good = split.scheme in ("http", "https") and bool(split.hostname) and split.port is not None
    except ValueError:
        good = False
    if not good:
        raise UsageError(
            f"{endpoint!r} is not a metrics endpoint",
            remedy="give HOST:PORT, where a node's metrics are served",
        )
    return f"{split.scheme}://{split.netloc}"


def read(endpoint: str) -> Answer:
    url = url_of(endpoint)
    try:
        nodes = list(parse(_get(f"{url}/metrics"), time.monotonic()))
    except urllib.error.HTTPError as error:
        return Answer(endpoint, problem=f"HTTP {error.code}")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        return Answer(endpoint, problem=str(getattr(reason, "strerror", None) or reason).lower())
    except ValueError as error:
        return Answer(endpoint, problem=f"no metrics: {error}")
    if not nodes:
        return Answer(endpoint, problem="no node here yet")
    try:
        told = {_name(one["labels"]): one["rooms"] for one in json.loads(_get(f"{url}/rooms?n=10"))}
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return Answer(endpoint, tuple(nodes), rooms_told=False)  # the exporter serves only metrics, or hides rooms
    for node in nodes:
        node.rooms = told.get(node.name, [])
    return Answer(endpoint, tuple(nodes))


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode("utf-8", "replace"))


def _name(labels: Labels) -> str:
    rest = [value for label, value in labels.items() if label not in ("role", "rank")]
    return " ".join((labels["role"], labels["rank"], *rest))


def parse(text: str, at: float) -> Iterator[Node]:
    """The nodes of one exposition, in its order."""
    families = [one for one in text_string_to_metric_families(text) if one.name.startswith(PREFIX)]
    samples = [(sample.name, dict(sample.labels), float(sample.value)) for one in families for sample in one.samples]
    nodes = {
        frozenset(labels.items()): Node(_name(labels), labels["role"], at)
        for name, labels, _ in samples
        if name == f"{PREFIX}node_failed"  # it has no labels but its node's
    }
    for name, labels, value in samples:
        for key, node in nodes.items():
            if key <= labels.items():
                node.samples[name, frozenset(labels.items() - key)] = value
                break
    yield from nodes.values()

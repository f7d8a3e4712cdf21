"""Reads metrics endpoints over HTTP, and computes rates from two readings.

It imports nothing of a node, which may be of another release.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias
from urllib.parse import urlsplit

from pdstage.errors import UsageError

try:
    from prometheus_client.parser import text_string_to_metric_families
except ModuleNotFoundError as missing:
    raise UsageError("reading metrics needs prometheus_client", remedy="pip install 'pdstage[top]'") from missing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TIMEOUT_S = 3.0
PREFIX = "pdstage_"
Labels: TypeAlias = "frozenset[tuple[str, str]]"


class Room(NamedTuple):
    room: str
    state: str
    age_s: float


@dataclass(slots=True)
class Node:
    """One node's samples at one moment, by metric and by the labels that are not the node's."""

    name: str
    """Such as "decode 3", with the labels that its exporter added."""
    role: str
    at: float
    info: dict[str, str] = field(default_factory=dict)
    samples: dict[str, dict[Labels, float]] = field(default_factory=lambda: defaultdict(dict))
    rooms: list[Room] = field(default_factory=list)

    def value(self, metric: str, **labels: str) -> float:
        """The sum of the samples of `metric` that carry `labels`."""
        return sum(
            value for held, value in self.samples.get(metric, {}).items() if labels.items() <= dict(held).items()
        )

    def by(self, metric: str, label: str) -> dict[str, float]:
        """The samples of `metric` summed by the values of `label`."""
        found: dict[str, float] = defaultdict(float)
        for held, value in self.samples.get(metric, {}).items():
            found[dict(held).get(label, "")] += value
        return dict(found)

    def since(self, before: Node | None) -> Node:
        """What was added to every sample since `before`; a total that fell has restarted, as in Prometheus."""
        made = Node(self.name, self.role, self.at - (before.at if before else self.at), self.info)
        for metric, samples in self.samples.items():
            old = before.samples.get(metric, {}) if before else samples
            for labels, value in samples.items():
                was = old.get(labels, 0.0)
                made.samples[metric][labels] = value - was if value >= was else value
        return made

    def quantile(self, q: float, metric: str, **labels: str) -> float | None:
        """The `q` quantile of a histogram, linear within its bucket, as PromQL's `histogram_quantile`; None: empty."""
        counts: dict[float, float] = defaultdict(float)
        for held, value in self.samples.get(f"{metric}_bucket", {}).items():
            own = dict(held)
            if labels.items() <= own.items():
                counts[float(own["le"])] += value
        return _quantile(q, sorted(counts.items()))


def _quantile(q: float, buckets: Sequence[tuple[float, float]]) -> float | None:
    if not buckets or not buckets[-1][1]:
        return None
    rank = q * buckets[-1][1]
    low_s = low_n = 0.0
    for bound_s, n in buckets:
        if n >= rank:
            if bound_s == float("inf"):
                return low_s
            return low_s + (bound_s - low_s) * (rank - low_n) / (n - low_n) if n > low_n else bound_s
        low_s, low_n = bound_s, n
    return low_s


class Answer(NamedTuple):
    """One endpoint's answer: its nodes, or why there is none; and whether it serves rooms."""

    endpoint: str
    nodes: tuple[Node, ...] = ()
    problem: str = ""
    rooms_told: bool = True


class Endpoints:
    """Several endpoints, read in parallel, so that a hanging one delays the others by at most `TIMEOUT_S`."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self.urls = {endpoint: url_of(endpoint) for endpoint in endpoints}
        self._pool = ThreadPoolExecutor(max_workers=min(32, max(1, len(self.urls))), thread_name_prefix="pdstage-top")

    def read(self) -> list[Answer]:
        return list(self._pool.map(lambda pair: _read(*pair), self.urls.items()))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
            remedy="give HOST:PORT, as --metrics-port printed it",
            field="endpoint",
        )
    return f"{split.scheme}://{split.netloc}"


def _read(endpoint: str, url: str) -> Answer:
    try:
        text = _get(f"{url}/metrics")
        at = time.monotonic()
        nodes = list(parse(text, at))
    except (OSError, http.client.HTTPException) as error:
        return Answer(endpoint, problem=_why(error))
    except ValueError as error:
        return Answer(endpoint, problem=f"no metrics: {error}")
    if not nodes:
        return Answer(endpoint, problem="no node here yet")
    try:
        serves_rooms = _take_rooms(nodes, json.loads(_get(f"{url}/rooms?n=10")))
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        serves_rooms = False  # the exporter serves only metrics, or hides rooms
    return Answer(endpoint, tuple(nodes), rooms_told=serves_rooms)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode("utf-8", "replace"))


def _why(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code}"
    reason = getattr(error, "reason", None) or error
    return str(getattr(reason, "strerror", None) or reason or type(error).__name__).lower()


def parse(text: str, at: float) -> Iterator[Node]:
    """The nodes of one exposition, in its order."""
    nodes: dict[Labels, Node] = {}
    samples = [
        (sample.name, dict(sample.labels), float(sample.value))
        for family in text_string_to_metric_families(text)
        if family.name.startswith(PREFIX)
        for sample in family.samples
    ]
    for name, labels, _ in samples:
        if name == f"{PREFIX}node_failed":  # it has no labels but its node's
            key = frozenset(labels.items())
            role, rank = labels.get("role", "?"), labels.get("rank", "?")
            extra = [value for label, value in labels.items() if label not in ("role", "rank")]
            nodes[key] = Node(" ".join((role, rank, *extra)), role, at)
    for name, labels, value in samples:
        key = next((held for held in nodes if held <= labels.items()), frozenset())
        if not key:
            continue
        rest = frozenset(labels.items() - key)
        nodes[key].samples[name][rest] = value
        if name == f"{PREFIX}node_info":
            nodes[key].info = dict(rest)
    yield from nodes.values()


def _take_rooms(nodes: Sequence[Node], rooms: list[dict[str, Any]]) -> bool:
    by_name = {node.name: node for node in nodes}
    for one in rooms:
        labels = one["labels"]
        extra = [value for label, value in labels.items() if label not in ("role", "rank")]
        node = by_name.get(" ".join((labels["role"], labels["rank"], *extra)))
        if node is not None:
            node.rooms = [Room(str(room["room"]), str(room["state"]), float(room["age_s"])) for room in one["rooms"]]
    return True

"""Exports nodes' metrics through a `prometheus_client` registry.

Nodes are held weakly: watching a node keeps none of its memory, and a closed node is no longer exported.
"""

from __future__ import annotations

import re
import threading
import weakref
from typing import TYPE_CHECKING, Self

from pdstage.errors import UsageError
from pdstage.tools.watch.catalogue import METRICS, NODE_LABELS
from pdstage.tools.watch.timings import Histogram, Timings

try:
    from prometheus_client import REGISTRY
    from prometheus_client.core import Metric as Family
except ModuleNotFoundError as missing:
    raise UsageError("metrics need prometheus_client", remedy="pip install 'pdstage[metrics]'") from missing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import CollectorRegistry

    from pdstage.manager.node import AnyNode
    from pdstage.tools.watch.catalogue import Metric
    from pdstage.tools.watch.timings import NodeTimings

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN = {*NODE_LABELS, "le", *(label for metric in METRICS for label in metric.labels)}
_collectors: weakref.WeakKeyDictionary[CollectorRegistry, Collector] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Registration:
    """One node in one registry, until `close()`, the end of a `with` block, or the node's own close."""

    def __init__(self, collector: Collector, node: AnyNode, labels: dict[str, str]) -> None:
        self.labels = labels
        self._collector = collector
        self._node = weakref.ref(node)

    @property
    def node(self) -> AnyNode | None:
        """The node, while it exists and is open."""
        node = self._node()
        return node if node is not None and not node.closed else None

    def close(self) -> None:
        """Stops exporting the node. May be repeated."""
        self._collector.forget(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Collector:
    """All nodes of one registry: a metric family is exported once, with the samples of each node."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._registrations: list[Registration] = []

    def add(self, node: AnyNode, labels: dict[str, str]) -> Registration:
        made = Registration(self, node, labels)
        with self._lock:
            self._registrations = [one for one in self._registrations if one.node is not None]
            if any(one.labels == labels for one in self._registrations):
                named = ", ".join(f"{name}={value!r}" for name, value in labels.items())
                raise UsageError(
                    f"another node with the labels {named} is registered",
                    remedy="distinguish them, as by labels={'engine': ...}",
                    field="labels",
                )
            self._registrations.append(made)
        return made

    def forget(self, registration: Registration) -> None:
        with self._lock:
            self._registrations = [one for one in self._registrations if one is not registration]

    def nodes(self) -> list[tuple[AnyNode, dict[str, str]]]:
        """The open nodes and their labels."""
        with self._lock:
            held = list(self._registrations)
        return [(node, one.labels) for one in held if (node := one.node) is not None]

    def describe(self) -> Iterator[Family]:
        """Every family without samples, so that a registry knows the names before there is a node."""
        return (_family(metric) for metric in METRICS)

    def collect(self) -> Iterator[Family]:
        states = [(node.status(), _timings_of(node), labels) for node, labels in self.nodes()]
        for metric in METRICS:
            family = _family(metric)
            for status, timings, labels in states:
                if metric.role not in ("", labels["role"]):
                    continue
                series = (*metric.read(status), *(metric.timed(timings) if timings is not None else ()))
                for values, value in series:
                    own = labels | dict(zip(metric.labels, values, strict=True))
                    if isinstance(value, Histogram):
                        _add_histogram(family, own, value)
                    else:
                        family.add_sample(metric.name, own, float(value))
            yield family


def _add_histogram(family: Family, labels: dict[str, str], histogram: Histogram) -> None:
    sum_s, n = histogram.sum_s, 0
    for bound_s, count in zip((*histogram.bounds, float("inf")), list(histogram.counts), strict=True):
        n += count
        family.add_sample(
            f"{family.name}_bucket", labels | {"le": "+Inf" if bound_s == float("inf") else str(bound_s)}, n
        )
    family.add_sample(f"{family.name}_count", labels, n)
    family.add_sample(f"{family.name}_sum", labels, sum_s)


def _timings_of(node: AnyNode) -> NodeTimings | None:
    found = next((one for one in node.observers if isinstance(one, Timings)), None)
    return found.of(node.role, node.incarnation) if found is not None else None


def register(
    node: AnyNode, registry: CollectorRegistry = REGISTRY, *, labels: Mapping[str, str] | None = None
) -> Registration:
    """Exports the metrics of `node` through `registry`, which an engine serves already, or `expose` does.

    Its samples carry the labels role ("prefill" or "decode"), rank (the topology's `unique_rank`) and `labels`; two
    nodes of one registry must differ in one of them. A registry may have any number of nodes, each until its close.
    Scraping a node reads a few numbers under its lock. Times are exported for nodes whose `observers` include a
    `Timings`. Raises `UsageError`.
    """
    extra = dict(labels or {})
    for name in extra:
        if not _LABEL.fullmatch(name) or name.startswith("__") or name in _TAKEN:
            raise UsageError(
                f"label {name!r} for a node's metrics",
                remedy=f"give a name of letters, digits and _, none of {', '.join(sorted(_TAKEN))}",
                field="labels",
            )
    own = {"role": node.role, "rank": str(node.topology.unique_rank)}
    return collector_of(registry).add(node, own | {name: str(value) for name, value in extra.items()})


def collector_of(registry: CollectorRegistry) -> Collector:
    """The registry's one collector of nodes, created and registered on first use."""
    with _lock:
        found = _collectors.get(registry)
        if found is None:
            found = Collector()
            registry.register(found)
            _collectors[registry] = found
        return found


def _family(metric: Metric) -> Family:
    name = metric.name.removesuffix("_total" if metric.kind == "counter" else "_info" if metric.kind == "info" else "")
    return Family(name, metric.text, metric.kind, metric.unit if metric.kind != "info" else "")

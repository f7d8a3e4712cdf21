"""Exports nodes' metrics through a `prometheus_client` registry.

Nodes are held weakly: watching a node keeps none of its memory, and a closed node is no longer exported.
"""

from __future__ import annotations

import re
import threading
import weakref
from typing import TYPE_CHECKING

from pdstage.closing import Closing
from pdstage.errors import UsageError
from pdstage.watch.catalogue import METRICS, NODE_LABELS, Metric
from pdstage.watch.timings import Histogram, Timings

try:
    from prometheus_client import REGISTRY
    from prometheus_client.core import Metric as Family
except ModuleNotFoundError as missing:
    raise UsageError("metrics need prometheus_client", remedy="pip install 'pdstage[metrics]'") from missing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client import CollectorRegistry

    from pdstage.manager.node import AnyNode

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN = {*NODE_LABELS, "le", *(label for metric in METRICS for label in metric.labels)}
_collectors: weakref.WeakKeyDictionary[CollectorRegistry, Collector] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Registration(Closing):
    """One node in one registry, until `close()`, the end of a `with` block, or the node's own close."""

    def __init__(self, collector: Collector, node: AnyNode, labels: dict[str, str]) -> None:
        self.labels = labels
        self._collector, self._node = collector, weakref.ref(node)

    @property
    def node(self) -> AnyNode | None:
        """The node, while it exists and is open."""
        node = self._node()
        return node if node is not None and not node.closed else None

    def close(self) -> None:
        """Stops exporting the node. May be repeated."""
        self._collector.forget(self)


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
        return map(_family, METRICS)

    def collect(self) -> Iterator[Family]:
        states = []
        for node, labels in self.nodes():
            timed = next(
                (one.of(node.role, node.incarnation) for one in node.observers if isinstance(one, Timings)), None
            )
            states.append((node.status(), timed, labels))
        for metric in METRICS:
            family = _family(metric)
            for status, timed, labels in states:
                for values, value in metric.read(status, timed) if metric.role in ("", labels["role"]) else ():
                    own = labels | dict(zip(metric.labels, values, strict=True))
                    if isinstance(value, Histogram):
                        _add_histogram(family, own, value)
                    else:
                        family.add_sample(metric.name, own, float(value))
            yield family


def _add_histogram(family: Family, labels: dict[str, str], histogram: Histogram) -> None:
    sum_s, n = histogram.sum_s, 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), list(histogram.counts), strict=True):
        n += count
        family.add_sample(f"{family.name}_bucket", labels | {"le": bound}, n)
    family.add_sample(f"{family.name}_count", labels, n)
    family.add_sample(f"{family.name}_sum", labels, sum_s)


def _family(metric: Metric) -> Family:
    name = metric.name.removesuffix("_total").removesuffix("_info")
    return Family(name, metric.text, metric.kind, metric.unit if metric.kind != "info" else "")


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
        if not _LABEL.fullmatch(name) or name in _TAKEN:
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
            found = _collectors[registry] = Collector()
            registry.register(found)
        return found

"""Metrics of a rank's node among SGLang's own: `sglang:kv_transfer_*`, beside SGLang's histograms.

SGLang updates its metrics when it computes batches, and a stuck request is in no batch. So a thread updates these.
SGLang decides which ranks report, and under which labels. `pdstage.watch` exports the nodes' own counters.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage import DecodeNode, PrefillNode

EVERY_S = 1.0
NOW = {
    "rooms": "Requests whose KV is on its way",
    "rooms_held": "Requests that are over and whose memory a peer may still use",
    "oldest_room_seconds": "Seconds since the oldest of both began",
    "unfenced_peers": "Peers that were lost and keep memory out of use until they are back or fenced",
}
"""Gauges."""
TOTALS = {
    "bytes": (("bytes_written",), "Bytes of KV that prefill wrote to decode"),
    "descriptors": (("descriptors",), "Descriptors of the writes that moved them"),
    "failed_rooms": (("rooms_failed", "rooms_aborted"), "Requests whose KV did not arrive"),
}
"""Counters, and the node's counters that they are sums of."""


@cache
def _series(gauge: Any, counter: Any, labels: tuple[str, ...]) -> dict[str, Any]:  # noqa: ANN401
    """Created once per process: an engine that changes its role has more than one manager."""
    gauges = {
        name: gauge(
            name=f"sglang:kv_transfer_{name}", documentation=text, labelnames=labels, multiprocess_mode="mostrecent"
        )
        for name, text in NOW.items()
    }
    return gauges | {
        name: counter(name=f"sglang:kv_transfer_{name}", documentation=text, labelnames=labels)
        for name, (_, text) in TOTALS.items()
    }


class Gauges:
    """Reports the node's state once a second. `node_of` returns the node, or None while there is none. `collector` is
    SGLang's SchedulerMetricsCollector.
    """

    def __init__(self, node_of: Callable[[], PrefillNode | DecodeNode | None], collector: Any) -> None:  # noqa: ANN401
        import prometheus_client  # noqa: PLC0415  (SGLang sets its folder before this import)

        kinds = collector._gauge_cls or prometheus_client.Gauge, collector._counter_cls or prometheus_client.Counter
        self._labels = collector.labels
        self._series = _series(*kinds, tuple(self._labels))
        self._node_of = node_of
        self._node: PrefillNode | DecodeNode | None = None
        self._counted: dict[str, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pdstage-gauges", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sets all gauges to zero and ends. May be repeated."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self._tell(self._node_of())
        self._tell(self._node_of())
        self._tell(None)

    def _tell(self, node: PrefillNode | DecodeNode | None) -> None:
        if node is not self._node:
            self._node, self._counted = node, {}
        values = dict.fromkeys(NOW, 0.0)
        if node is not None:
            status, oldest = node.status(), node.oldest_rooms(1)
            over = status.rooms["success"] + status.rooms["failed"]
            values = {
                "rooms": sum(status.rooms.values()) - over,
                "rooms_held": over,
                "oldest_room_seconds": oldest[0].age_s if oldest else 0.0,
                "unfenced_peers": status.n_unfenced,
            }
            for name, (counters, _) in TOTALS.items():
                grown = sum(status.counters[counter] - self._counted.get(counter, 0) for counter in counters)
                self._series[name].labels(**self._labels).inc(grown)
            self._counted = status.counters
        for name, value in values.items():
            self._series[name].labels(**self._labels).set(value)

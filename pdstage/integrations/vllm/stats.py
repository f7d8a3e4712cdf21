"""Counters for vLLM's log and its Prometheus endpoint.

`pdstage.watch` exports the nodes' own counters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# Names in `data`: lists of seconds, one entry per room and rank; and counts, as lists to sum up.
SECONDS = {
    "sent_s": "Seconds from a finished prefill until its KV was sent and its blocks free, by request and rank",
    "received_s": "Seconds from a request's announcement until all its KV was there, by request and rank",
}
COUNTS = {
    "not_sent": "Finished prefills whose KV no decode engine took, by request and rank",
    "not_received": "Requests whose KV did not come from prefill, by request and rank",
    "num_kv_expired_reqs": "Of those not sent, finished prefills that no decode engine asked for in time",
    "bytes_transferred": "Bytes of KV written to decode engines",
    "num_descriptors": "Descriptors of the writes that moved them",
}
"""Counts to sum up; the last three have the names of vLLM's NixlConnector (`vllm:nixl_*`)."""
NOW = {
    "requests_sending": "Finished prefills whose blocks are held until a decode engine has them",
    "requests_receiving": "Requests that wait for their KV from prefill",
    "held_blocks": "Blocks that finished prefills hold, of all cache groups",
    "oldest_held_s": "Seconds since the oldest of those finished",
}
"""Gauges: the maximum over all ranks at this step."""


@dataclass
class PdStageStats(KVConnectorStats):  # type: ignore[misc]
    """`data` is a list of numbers by name: of what ended in one interval, and of what lasts at its end."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, list[float]] = {name: [] for name in (*SECONDS, *COUNTS, *NOW)}

    def add(self, name: str, value: float) -> None:
        """Adds one value to that name's list."""
        self.data[name].append(value)

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> PdStageStats:
        for name, values in other.data.items():
            self.data[name].extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        shown: dict[str, int | float] = {}
        for name in SECONDS:
            values, what = sorted(self.data[name]), name.removesuffix("_s")
            shown[f"rooms {what}"] = len(values)
            if values:
                shown[f"{what} p50 ms"] = round(1e3 * values[len(values) // 2], 2)
                shown[f"{what} max ms"] = round(1e3 * values[-1], 2)
        for name in COUNTS:
            shown[re.sub("^not", "rooms not", name).replace("_", " ")] = int(sum(self.data[name]))
        return shown


class PdStagePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:pdstage_*`: histograms of `SECONDS`, counters of `COUNTS`, gauges of `NOW`."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[str, dict[int, Any]] = {}
        kinds: list[tuple[dict[str, str], Any, dict[str, Any]]] = [
            (SECONDS, self._histogram_cls, {"buckets": _BUCKETS}),
            (COUNTS, self._counter_cls, {}),
            (NOW, self._gauge_cls, {"multiprocess_mode": "mostrecent"}),
        ]
        for texts, kind, more in kinds:
            for name, text in texts.items():
                shown = f"vllm:pdstage_{re.sub('_s$', '_seconds', name)}"
                metric = kind(name=shown, documentation=text, labelnames=labelnames, **more)
                self._series[name] = create_metric_per_engine(metric, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, values in transfer_stats_data.items():
            metric = self._series[name][engine_idx]
            if name in COUNTS:
                metric.inc(sum(values))
            elif name in SECONDS:
                for value in values:
                    metric.observe(value)
            elif values:
                metric.set(max(values))

"""The endpoint of the nodes in an engine's process: all that bare nodes export, so boards and alerts work unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdstage import environment
from pdstage.arguments import integer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdstage import DecodeNode, PrefillNode
    from pdstage.tools.watch.server import Endpoint

_LAST_PORT = 65535


class Metrics:
    """Serves them at `metrics_port` plus the rank, since each rank is a process; port 0 is any, which the log names.

    `given` is what the operator wrote at `where`, over PDSTAGE_NODE's: `metrics_port`, without which nothing is served,
    and `metrics_host`, by default loopback. `engine` labels every series. Raises `UsageError` if the port is taken.
    """

    def __init__(self, given: Mapping[str, Any], *, where: str, engine: str, rank: int) -> None:
        options = (environment.NODE.read() or {}) | dict(given)
        self.observers: list[Any] = []
        """For the nodes to be served: they time what happens."""
        self._engine = engine
        self._endpoint: Endpoint | None = None
        port = options.get("metrics_port")
        if port is None:
            return
        # SGLang sets prometheus_client's folder before it imports it.
        from prometheus_client import CollectorRegistry  # noqa: PLC0415

        from pdstage.tools.watch import Timings, expose  # noqa: PLC0415

        first = integer(f"metrics_port of {where}", port, high=_LAST_PORT - rank)
        self.observers.append(Timings())
        host = options.get("metrics_host", "127.0.0.1")
        self._endpoint = expose(port=first and first + rank, host=host, registry=CollectorRegistry())

    def add(self, node: PrefillNode | DecodeNode) -> None:
        """Serves the node's, until it closes."""
        if self._endpoint is not None:
            from pdstage.tools.watch import register  # noqa: PLC0415

            register(node, self._endpoint.registry, labels={"engine": self._engine})

    @property
    def address(self) -> str:
        """HOST:PORT, as `pdstage top` takes it; "" if nothing is served."""
        return "" if self._endpoint is None else self._endpoint.address

    def close(self) -> None:
        """Stops serving. May be repeated."""
        if self._endpoint is not None:
            self._endpoint.close()

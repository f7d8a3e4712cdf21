"""What an operator has of the nodes in an engine's process: the metrics of bare nodes, so that boards and alerts work
unchanged; and their place in a directory, for `pdstage instances`, `drain`, `fence` and `top`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdstage import DecodeNode, PrefillNode, environment
from pdstage.arguments import integer, text
from pdstage.control.address import Address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdstage.watch.server import Endpoint

_LAST_PORT = 65535


class Operated:
    """The nodes of one rank, which `add` is given.

    `given` is what the operator wrote at `where`, over PDSTAGE_NODE's. `metrics_port`, without which no metrics are
    served, is the first rank's, since each rank is a process; 0 is any, which the directory names. `metrics_host` is by
    default loopback. `directory` is the address of one that lists the nodes, as ranks of `instance`: by default
    PDSTAGE_POD, else `name`. `engine` is a label of every series. Raises `UsageError`, also if the port is taken.
    """

    def __init__(self, given: Mapping[str, Any], *, where: str, engine: str, name: str, rank: int) -> None:
        options = (environment.NODE.read() or {}) | dict(given)
        self.observers: list[Any] = []
        """For the nodes to be served: they time what happens."""
        self._engine = engine
        self._directory = options.get("directory")
        if self._directory is not None:
            text(f"directory of {where}", self._directory)
        self._instance = text(f"instance of {where}", options.get("instance") or environment.POD.read() or name)
        self._endpoint: Endpoint | None = None
        port = options.get("metrics_port")
        if port is None:
            return
        # SGLang sets prometheus_client's folder before it imports it.
        from prometheus_client import CollectorRegistry  # noqa: PLC0415

        from pdstage.watch import Timings, expose  # noqa: PLC0415

        first = integer(f"metrics_port of {where}", port, high=_LAST_PORT - rank)
        self.observers.append(Timings())
        host = options.get("metrics_host", "127.0.0.1")
        self._endpoint = expose(port=first and first + rank, host=host, registry=CollectorRegistry())

    def add(self, node: PrefillNode | DecodeNode) -> None:
        """Serves and lists the node, until it closes."""
        if self._endpoint is not None:
            from pdstage.watch import register  # noqa: PLC0415

            register(node, self._endpoint.registry, labels={"engine": self._engine})
        if self._directory is not None:
            metrics = str(Address.parse(self.address, "", listening=True).reachable()) if self.address else ""
            node.list_in(self._directory, instance=self._instance, engine=self._engine, metrics=metrics)

    @property
    def address(self) -> str:
        """HOST:PORT, as `pdstage top` takes it; "" if nothing is served."""
        return "" if self._endpoint is None else self._endpoint.address

    def close(self) -> None:
        """Stops serving. May be repeated."""
        if self._endpoint is not None:
            self._endpoint.close()

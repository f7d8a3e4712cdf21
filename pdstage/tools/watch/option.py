"""The option `--metrics-port PORT` of commands whose ranks are separate processes.

Imports what metrics need only when a port is given.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from pdstage import environment
from pdstage.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdstage.manager.node import AnyNode
    from pdstage.manager.observer import Observer
    from pdstage.tools.watch.server import Endpoint

VARIABLE = environment.METRICS_PORT.name
"""How a command passes the port to its benches' ranks."""
N_PORTS = 64
"""Each process takes the first free port from the given one on, and tries this many."""


class Watching:
    """One process's metrics, if a port was given: give its nodes `observers`, then pass them to `expose`.

    With None nothing is observed or served. Close it after the nodes.
    """

    def __init__(self, port: int | None) -> None:
        self.observers: tuple[Observer, ...] = ()
        self.endpoint: Endpoint | None = None
        self._port = port
        self._held = ExitStack()
        if port is not None:
            from pdstage.tools.watch.timings import Timings  # noqa: PLC0415

            self.observers = (Timings(),)

    def expose(self, node: AnyNode, labels: Mapping[str, str] | None = None) -> None:
        """The first call opens the endpoint; `labels` distinguish several nodes of one process."""
        if self._port is None:
            return
        from prometheus_client import CollectorRegistry  # noqa: PLC0415

        from pdstage.tools.watch.exporter import register  # noqa: PLC0415
        from pdstage.tools.watch.server import expose  # noqa: PLC0415

        if self.endpoint is None:
            registry = CollectorRegistry()
            self.endpoint = self._held.enter_context(expose(port=self._port, n_ports=N_PORTS, registry=registry))
        register(node, self.endpoint.registry, labels=labels)

    def close(self) -> None:
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def checked(port: int | None) -> int | None:
    """A port from the command line. Raises `UsageError`, also if a package for metrics is missing."""
    if port is None:
        return None
    if not 0 <= port <= 65535:
        raise UsageError(f"--metrics-port is {port}", remedy="give 0 to 65535", field="metrics-port")
    import pdstage.tools.watch.exporter  # noqa: F401, PLC0415

    return port


def asked_by_environment() -> int | None:
    """The port that the parent process asked for."""
    return checked(environment.METRICS_PORT.read())

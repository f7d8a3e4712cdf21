"""The option `--metrics-port PORT` of commands whose ranks are separate processes.

Imports what metrics need only when a port is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pdstage import environment
from pdstage.errors import UsageError

if TYPE_CHECKING:
    from pdstage.manager.node import AnyNode
    from pdstage.manager.observer import Observer
    from pdstage.tools.watch.server import Endpoint

VARIABLE = environment.METRICS_PORT.name
"""How a command passes the port to its benches' ranks."""
N_PORTS = 64
"""Each process takes the first free port from the given one on, and tries this many."""


class Watching:
    """One process's metrics, if a port was given: give its nodes `observers`, then pass them to `expose`.

    With None nothing is observed or served. A context manager, around the nodes.
    """

    def __init__(self, port: int | None) -> None:
        self.observers: tuple[Observer, ...] = ()
        self.endpoint: Endpoint | None = None
        if port is not None:
            from prometheus_client import CollectorRegistry  # noqa: PLC0415

            from pdstage.tools.watch import Timings, expose  # noqa: PLC0415

            self.observers = (Timings(),)
            self.endpoint = expose(port=port, n_ports=N_PORTS, registry=CollectorRegistry())

    def expose(self, node: AnyNode) -> None:
        if self.endpoint is not None:
            from pdstage.tools.watch import register  # noqa: PLC0415

            register(node, self.endpoint.registry)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.endpoint is not None:
            self.endpoint.close()


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

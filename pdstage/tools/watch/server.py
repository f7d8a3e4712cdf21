"""The HTTP endpoint: /metrics for Prometheus, /rooms for `pdstage top`, /healthz.

One thread per request, and none waits for ever; nothing here is on a room's path.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import socket
import threading
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from pdstage.control.address import Address
from pdstage.errors import UsageError
from pdstage.tools.watch.exporter import collector_of, register

from prometheus_client import REGISTRY, make_wsgi_app  # isort: skip  (after the check that says how to install it)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from wsgiref.types import StartResponse, WSGIEnvironment

    from prometheus_client import CollectorRegistry

    from pdstage.manager.node import AnyNode

log = logging.getLogger(__name__)

MAX_ROOMS = 100
_STALLED_S = 10.0


class Endpoint:
    """A running endpoint of one registry, for any number of nodes registered there.

    Close it, or use it as a context manager.
    """

    def __init__(self, port: int, registry: CollectorRegistry, host: str, *, n_ports: int, rooms: bool | None) -> None:
        local = is_loopback(host)
        self.registry = registry
        self._collector = collector_of(registry)
        self._metrics = make_wsgi_app(registry)
        self._tells_rooms = local if rooms is None else rooms
        self._server = _bind(host, port, n_ports)
        self._server.set_app(self._answer)
        bound = self._server.server_address[1]
        self.address = str(Address(host, int(bound)))
        """HOST:PORT, as `pdstage top` takes it."""
        self.port = int(bound)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="pdstage-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops serving. May be repeated."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            return self._metrics(environ, start)  # type: ignore[no-any-return]
        if path == "/healthz":
            return _say(start, "200 OK", "ok\n")
        if path == "/rooms" and self._tells_rooms:
            asked = parse_qs(environ.get("QUERY_STRING", "")).get("n", ["10"])[0]
            n = min(int(asked), MAX_ROOMS) if asked.isascii() and asked.isdigit() else 10
            return _say(start, "200 OK", json.dumps(self._rooms(n)), "application/json")
        if path == "/rooms":
            return _say(start, "403 Forbidden", "rooms are served on loopback only, or with rooms=True\n")
        return _say(start, "404 Not Found", "there are /metrics, /rooms and /healthz\n")

    def _rooms(self, n: int) -> list[dict[str, Any]]:
        return [
            {"labels": labels, "rooms": [room._asdict() for room in node.oldest_rooms(n)]}
            for node, labels in self._collector.nodes()
        ]


def expose(
    *nodes: AnyNode,
    port: int,
    host: str = "127.0.0.1",
    registry: CollectorRegistry = REGISTRY,
    labels: Mapping[str, str] | None = None,
    rooms: bool | None = None,
    n_ports: int = 1,
) -> Endpoint:
    """Serves the metrics of `nodes`, and of everything else in `registry`, at http://host:port/metrics; port 0: a free
    one.

    With `n_ports` it takes the first free one of that many ports, so that equal processes need no different options.

    `rooms`: whether /rooms names the rooms that are open longest. None: on loopback only, since a router's names of
    requests may be confidential. Nothing is encrypted: whoever reaches the host reads the metrics. Raises `UsageError`.
    """
    endpoint = Endpoint(port, registry, host, n_ports=n_ports, rooms=rooms)
    try:
        for node in nodes:
            register(node, registry, labels=labels)
    except UsageError:
        endpoint.close()
        raise
    log.info("metrics at http://%s/metrics", endpoint.address)
    return endpoint


def _bind(host: str, port: int, n_ports: int) -> _Server:
    family = type("_Server", (_Server,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET})
    for one in range(port, port + n_ports):
        try:
            return family((host, one), _Handler)  # type: ignore[no-any-return]
        except (OSError, OverflowError) as error:
            if one + 1 == port + n_ports or getattr(error, "errno", None) != errno.EADDRINUSE:
                what = f"no metrics endpoint at {Address(host, one)}: {error}"
                raise UsageError(what, remedy="choose another port, or 0", field="port") from error
    raise UsageError(f"{n_ports} ports", remedy="give at least 1", field="n_ports")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _say(start: Callable[..., object], status: str, text: str, kind: str = "text/plain; charset=utf-8") -> list[bytes]:
    body = text.encode()
    start(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
    return [body]


class _Handler(WSGIRequestHandler):
    timeout = _STALLED_S  # a silent client keeps no thread

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        # The stdlib's method resolves the host's name, which may take seconds.
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a request from %s failed", client_address, exc_info=True)

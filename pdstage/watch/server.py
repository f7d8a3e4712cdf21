"""The HTTP endpoint: /metrics for Prometheus, /rooms for `pdstage top`; /healthz for who sends requests, /livez for who
starts the process again.

One thread per request, and none waits for ever; nothing here is on a room's path.
"""

from __future__ import annotations

import json
import logging
import threading
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from pdstage.closing import Closing
from pdstage.control.address import Address
from pdstage.control.directory_http import Answering, Listening
from pdstage.errors import UsageError
from pdstage.watch.exporter import collector_of, register

from prometheus_client import CollectorRegistry, REGISTRY  # isort: skip  (after the check that says how to install it)
from prometheus_client.exposition import choose_encoder  # isort: skip

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdstage.manager.node import AnyNode

log = logging.getLogger(__name__)
MAX_ROOMS = 100


class Endpoint(Closing):
    """A running endpoint of one registry, for any number of nodes registered there.

    Close it, or use it as a context manager.
    """

    def __init__(self, port: int, registry: CollectorRegistry, host: str, *, rooms: bool | None) -> None:
        self.registry = registry
        at = Address(host, port)
        try:
            self._server = _Server(at, _Handler)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"no metrics endpoint at {at}: {error}", remedy="choose another port, or 0", field="port"
            ) from error
        self._server.registry = registry
        self._server.tells_rooms = at.is_loopback if rooms is None else rooms
        self.port = int(self._server.server_address[1])
        self.address = str(Address(host, self.port))
        """HOST:PORT, as `pdstage top` takes it."""
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="pdstage-metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops serving. May be repeated."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


def expose(
    *nodes: AnyNode,
    port: int,
    host: str = "127.0.0.1",
    registry: CollectorRegistry = REGISTRY,
    labels: Mapping[str, str] | None = None,
    rooms: bool | None = None,
) -> Endpoint:
    """Serves the metrics of `nodes`, and of everything else in `registry`, at http://host:port/metrics; port 0: a free
    one.

    `rooms`: whether /rooms names the rooms that are open longest. None: on loopback only, since a router's names of
    requests may be confidential. Nothing is encrypted: whoever reaches the host reads the metrics. Raises `UsageError`.
    """
    endpoint = Endpoint(port, registry, host, rooms=rooms)
    try:
        for node in nodes:
            register(node, registry, labels=labels)
    except UsageError:
        endpoint.close()
        raise
    log.info("metrics at http://%s/metrics", endpoint.address)
    return endpoint


class _Handler(Answering):
    server: _Server

    def do_GET(self) -> None:  # noqa: N802  (http.server's name)
        url, registry = urlsplit(self.path), self.server.registry
        if url.path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self.say(200, encode(registry), kind)
        elif url.path in {"/healthz", "/livez"}:
            nodes = [node.status() for node, _ in collector_of(registry).nodes()]
            if any(node.failed for node in nodes):
                self.say(503, b"a node has failed\n")
            elif url.path == "/healthz" and any(node.draining for node in nodes):
                self.say(503, b"a node takes no new rooms: it drains, or closes\n")
            else:
                self.say(200, b"ok\n")
        elif url.path == "/rooms" and self.server.tells_rooms:
            asked = parse_qs(url.query).get("n", ["10"])[0]
            n = min(int(asked), MAX_ROOMS) if asked.isascii() and asked.isdigit() else 10
            rooms = [
                {"labels": labels, "rooms": [room._asdict() for room in node.oldest_rooms(n)]}
                for node, labels in collector_of(registry).nodes()
            ]
            self.say(200, json.dumps(rooms).encode(), "application/json")
        elif url.path == "/rooms":
            self.say(403, b"rooms are served on loopback only, or with rooms=True\n")
        else:
            self.say(404, b"there are /metrics, /rooms, /healthz and /livez\n")


class _Server(Listening):
    registry: CollectorRegistry
    tells_rooms: bool

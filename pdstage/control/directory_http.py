"""The directory over HTTP/1.1, so that an operator can use curl. It is neither encrypted nor authenticated.

`directory_api` lists the requests.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from pdstage.control import directory_api as api
from pdstage.errors import PdstageError
from pdstage.log_limit import LogLimit

if TYPE_CHECKING:
    from pdstage.control.address import Address
    from pdstage.control.directory import Directory

log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 64
_REQUEST_S = 5.0
"""A connection without a complete request in this time is dropped."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "pdstage"
    sys_version = ""
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        self._answer(b"")

    def do_DELETE(self) -> None:
        self._answer(b"")

    def do_PUT(self) -> None:
        try:
            nbytes = api.parse_number(self.headers.get("Content-Length", ""), "Content-Length")
            api.check_body(nbytes)
        except PdstageError as error:
            self._send(*api.refusal(error))
        else:
            self._answer(self.rfile.read(nbytes))

    def _answer(self, body: bytes) -> None:
        self._send(*api.answer(self.server.directory, self.command, self.path, body))

    def _send(self, status: int, body: bytes) -> None:
        self.close_connection = True  # one request per connection, so that no thread idles for a peer
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug("%s %s", self.address_string(), format % args)


class Server(ThreadingHTTPServer):
    """One thread per connection, a cap on connections, and a close that does not wait for them."""

    daemon_threads = False  # so that closing joins them
    request_queue_size = 256

    def __init__(self, address: Address, directory: Directory) -> None:
        self.directory = directory
        self._open: dict[socket.socket, float] = {}
        self._open_lock = threading.Lock()
        self._log_limit = LogLimit()
        self.address_family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
        super().__init__(("" if address.is_wildcard and not address.is_ipv6 else address.host, address.port), Handler)

    def serve_forever(self, poll_interval: float = 0.1) -> None:
        """As the base class, with a shorter poll interval, so that it ends sooner."""
        super().serve_forever(poll_interval)

    def server_bind(self) -> None:
        """As the base class, without its name look-up, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        host, port = self.socket.getsockname()[:2]
        self.server_address = self.server_name, self.server_port = str(host), int(port)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ANN401  (the base's signature)
        """Accepts every connection. Beyond the cap, the connection that has waited longest is dropped."""
        with self._open_lock:
            if len(self._open) >= _MAX_CONNECTIONS:
                self._warn_of_many()
                self._drop(next(iter(self._open)))
            self._open[request] = time.monotonic()
        return True

    def _warn_of_many(self) -> None:
        where = f"{self.server_name}:{self.server_port}"
        what = f"bootstrap at {where}: {_MAX_CONNECTIONS} connections are open; each new one replaces the oldest"
        if text := self._log_limit.due(where, what, time.monotonic()):
            log.warning("%s", text)

    def service_actions(self) -> None:
        """Drops connections without a complete request in time; the handler's own timeout restarts with each byte."""
        overdue_at = time.monotonic() - _REQUEST_S
        with self._open_lock:
            for request in [request for request, opened_at in self._open.items() if opened_at < overdue_at]:
                self._drop(request)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401
        with self._open_lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        log.debug("bootstrap: the connection from %s broke", client_address, exc_info=True)

    def close(self) -> None:
        self.drop_connections()
        self.server_close()

    def drop_connections(self) -> None:
        with self._open_lock:
            for request in list(self._open):
                self._drop(request)

    def _drop(self, request: socket.socket) -> None:
        """Shuts a connection down while its handler uses it; the handler then closes it."""
        del self._open[request]
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("bootstrap: a connection was gone already")

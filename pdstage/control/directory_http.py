"""The directory over HTTP, so that an operator can use curl. It is neither encrypted nor authenticated.

`directory_api` lists the requests.
"""

from __future__ import annotations

import logging
import socket
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING

from pdstage.control import directory_api as api
from pdstage.errors import TransportError

if TYPE_CHECKING:
    from pdstage.control.address import Address
    from pdstage.control.directory import Directory

log = logging.getLogger(__name__)

_REQUEST_S = 5.0
"""A connection that is silent for so long, or whose request has another gap of that length, is dropped."""


class Answering(BaseHTTPRequestHandler):
    """Answers one request a connection, as of HTTP/1.0, so that no thread idles for a peer."""

    server_version = "pdstage"
    sys_version = ""
    timeout = _REQUEST_S

    def say(self, status: int, answer: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        log.debug("%s %s", self.address_string(), format % args)


class Listening(ThreadingTCPServer):
    """A thread for each connection. It is for loopback and networks that are trusted, so it limits only how long a
    connection may be silent. Raises `OSError` if the address cannot be had.
    """

    allow_reuse_address = daemon_threads = True
    """Its end waits for none: one may be sent a byte now and then, for days."""
    request_queue_size = 1024
    """All ranks of a rack may come at once."""

    def __init__(self, address: Address, answering: type[Answering]) -> None:
        self.address_family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
        host = "" if address.is_wildcard and not address.is_ipv6 else address.host
        super().__init__((host, address.port), answering)

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("the connection from %s broke", client_address, exc_info=True)


class Handler(Answering):
    server: Server

    def do_GET(self) -> None:
        self._answer(b"")

    def do_PUT(self) -> None:
        given = self.headers.get("Content-Length", "")
        nbytes = int(given[:20]) if given.isdecimal() else 0
        self._answer(self.rfile.read(min(nbytes, api.MAX_BODY_NBYTES + 1)))

    def _answer(self, body: bytes) -> None:
        self.say(*api.answer(self.server.directory, self.command, self.path, body), "application/json")


class Server(Listening):
    def __init__(self, address: Address, directory: Directory, advertise: str | None) -> None:
        self.directory = directory
        try:
            super().__init__(address, Handler)
        except OSError as error:
            raise TransportError(
                f"the bootstrap server cannot listen on {address} ({error.strerror})",
                remedy="name an address of this machine and a free port, or port 0",
                address=str(address),
            ) from error
        self.address = str(address._replace(port=self.server_address[1]).reachable(advertise))

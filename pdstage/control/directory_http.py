"""The directory's requests and answers: HTTP/1.1 and JSON, so that an operator can ask with curl.

Layer 4. Must not know rooms, sessions or what a layout digest means.

    PUT    /v1/adverts                                      {"advert": {...}, "ttl_s": 15}
    DELETE /v1/adverts/{instance}/{unique_rank}/{incarnation}
    GET    /v1/lookup?instance=NAME&dp_rank=N               both optional where there is one choice
    GET    /v1/instances                                    everything live, for people
    GET    /health

Refusals carry {"error": kind, "what": ..., "remedy": ..., "missing": [...]}; the client raises the same typed error.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

import msgspec
from msgspec import Meta

from pdstage.control.directory import Advert, Conflict, Directory, Incomplete
from pdstage.errors import PdstageError, PeerError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdstage.control.address import Address

log = logging.getLogger(__name__)

MAX_BODY_NBYTES = 64 << 10
_MAX_CONNECTIONS = 64
_REQUEST_S = 5.0
"""A connection that sends no complete request in this time is dropped."""


UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding JSON from a stranger may raise: of text that is no UTF-8, of a value without end, of all else."""


class Put(msgspec.Struct, frozen=True):
    advert: Advert
    ttl_s: float


class Adverts(msgspec.Struct, frozen=True):
    adverts: list[Advert]


class Refusal(msgspec.Struct, frozen=True, omit_defaults=True):
    error: str
    what: Annotated[str, Meta(min_length=1, max_length=4096)]
    remedy: Annotated[str, Meta(max_length=4096)] = ""
    missing: Annotated[tuple[int, ...], Meta(max_length=1 << 20)] = ()


# Kind on the wire, HTTP status and class; the first that an error is an instance of.
KINDS: tuple[tuple[str, int, type[PdstageError]], ...] = (
    ("incomplete", 404, Incomplete),
    ("conflict", 409, Conflict),
    ("usage", 400, UsageError),
    ("peer", 503, PeerError),
)


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "pdstage"
    sys_version = ""
    timeout = _REQUEST_S

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def _get(self, path: str, query: dict[str, list[str]]) -> object:
        if path == "/health":
            return {"status": "ok"}
        if path == "/v1/instances":
            return {
                name: [{"expires_in_s": round(left_s, 3), "advert": advert} for advert, left_s in held]
                for name, held in self.server.directory.instances().items()
            }
        if path == "/v1/lookup":
            dp_rank = query.get("dp_rank", [None])[0]
            return Adverts(
                self.server.directory.lookup(
                    query.get("instance", [None])[0], None if dp_rank is None else _number(dp_rank, "dp_rank")
                )
            )
        raise _nothing_at(path)

    def _put(self, path: str, _: dict[str, list[str]]) -> object:
        if path != "/v1/adverts":
            raise _nothing_at(path)
        nbytes = _number(self.headers.get("Content-Length", ""), "Content-Length")
        if not 0 <= nbytes <= MAX_BODY_NBYTES:
            raise UsageError(f"an advert of {nbytes} bytes", remedy=f"send at most {MAX_BODY_NBYTES}")
        try:
            put = msgspec.json.decode(self.rfile.read(nbytes), type=Put)
        except UNREADABLE as error:
            raise UsageError(f"the advert does not decode ({error})", remedy="check the peer's version") from error
        self.server.directory.publish(put.advert, put.ttl_s)
        return {"ttl_s": put.ttl_s}

    def _delete(self, path: str, _: dict[str, list[str]]) -> object:
        parts = path.split("/")
        if path.startswith("/v1/adverts/") and len(parts) == 6:
            rank, incarnation = _number(parts[4], "unique_rank"), _number(parts[5], "incarnation")
            return {"withdrawn": self.server.directory.withdraw(unquote(parts[3]), rank, incarnation)}
        raise _nothing_at(path)

    def _answer(self, call: Callable[[str, dict[str, list[str]]], object]) -> None:
        self.close_connection = True  # one request a connection, so that no idle thread is kept for a peer
        try:
            url = _url(self.path)
            status, body = 200, msgspec.json.encode(call(url.path, parse_qs(url.query)))
        except PdstageError as error:
            kind, status = next((k, s) for k, s, cls in KINDS if isinstance(error, cls))
            missing = error.missing if isinstance(error, Incomplete) else ()
            body = msgspec.json.encode(Refusal(kind, error.what, error.remedy, missing))
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug("%s %s", self.address_string(), format % args)


class Server(ThreadingHTTPServer):
    """A thread a connection, a cap on connections, and a close that waits for none of them."""

    daemon_threads = False  # so that closing joins them
    request_queue_size = 256

    def __init__(self, address: Address, directory: Directory) -> None:
        self.directory = directory
        self._open: dict[socket.socket, float] = {}
        self._open_lock = threading.Lock()
        self.address_family = socket.AF_INET6 if address.is_ipv6 else socket.AF_INET
        super().__init__(("" if address.is_wildcard and not address.is_ipv6 else address.host, address.port), Handler)

    def server_bind(self) -> None:
        """As the base, without its name look-up, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        host, port = self.socket.getsockname()[:2]
        self.server_address = self.server_name, self.server_port = str(host), int(port)

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ANN401  (the base's signature)
        """Takes every connection; where there are too many, the one that has waited longest makes room."""
        with self._open_lock:
            if len(self._open) >= _MAX_CONNECTIONS:
                log.warning("bootstrap: %d connections are open, dropped the oldest", len(self._open))
                self._drop(next(iter(self._open)))
            self._open[request] = time.monotonic()
        return True

    def service_actions(self) -> None:
        """Drops who has sent no request in its time: the handler's own timeout begins anew with each byte."""
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

    def drop_connections(self) -> None:
        with self._open_lock:
            for request in list(self._open):
                self._drop(request)

    def _drop(self, request: socket.socket) -> None:
        """Ends a connection under its handler, which then closes it."""
        del self._open[request]
        try:
            request.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("bootstrap: a connection was gone already")


def _number(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        raise UsageError(f"{name} is {text[:32]!r}, not a number", remedy="send digits")
    return int(text)


def _url(path: str) -> SplitResult:
    try:
        return urlsplit(path)
    except ValueError as error:
        raise UsageError(f"{path[:64]!r} is no path ({error})", remedy="check the request") from error


def _nothing_at(path: str) -> UsageError:
    return UsageError(f"there is nothing at {path[:64]!r}", remedy="see the paths in pdstage.control.directory_http")

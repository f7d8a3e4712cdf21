"""The directory's server, to embed in a prefill node or to run alone, and its client. `client_of` finds the client for
an address, which may also be etcd's.

`directory_api` lists the requests.
"""

from __future__ import annotations

import http.client
import os
import threading
import time
from typing import Self, TypeAlias

import msgspec

from pdstage import arguments
from pdstage.closing import Closing
from pdstage.control import directory_curve, directory_http, etcd
from pdstage.control.address import Address
from pdstage.control.directory import Advert, Conflict, Directory, Incomplete
from pdstage.control.directory_api import (
    KINDS,
    MAX_ANSWER_NBYTES,
    UNREADABLE,
    Asked,
    Lookup,
    Publish,
    Withdraw,
    adverts_of,
    refusal_of,
)
from pdstage.control.keys import GivenKeys, Keys, keys_of
from pdstage.errors import PdstageError, PeerError, TransportError, UsageError

__all__ = ["Advert", "BootstrapClient", "BootstrapServer", "Conflict", "DirectoryClient", "Incomplete", "client_of"]


PLAIN = "plain://"
_POLL_S = 0.1
"""A server that is closed ends within so long."""
_MAYBE_KEYS = "; if it has keys, pass keys="


class BootstrapServer(Closing):
    """The directory's server. `bind` is `host:port` or `http://host:port`; with port 0 the system chooses.

    It listens from construction on. `start()` answers in its own thread until `close()`. `address` is the address for
    peers; with a wildcard host `advertise` names the host. With `keys`, a key file's path or `Keys`, it is encrypted
    and answers only nodes that its keys allow; `address` is then `key@host:port`. Without keys it speaks plain HTTP.
    Raises `UsageError` for a bad address or key file, `TransportError` if it cannot bind.
    """

    def __init__(
        self,
        bind: str = "127.0.0.1:0",
        *,
        advertise: str | None = None,
        insecure: bool = False,
        keys: GivenKeys = None,
    ) -> None:
        address, held = Address.parse(bind, "http", listening=True), keys_of(keys)
        advertise = None if advertise is None else arguments.text("advertise", advertise)
        insecure = arguments.flag("insecure", insecure)
        address.check_exposure(insecure, held)
        self.directory = Directory(time.monotonic)
        self._server = (
            directory_curve.Server(address, self.directory, held, advertise)
            if held is not None
            else directory_http.Server(address, self.directory, advertise)
        )
        self.address = self._server.address
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        return self.start()

    def start(self) -> Self:
        """Starts to answer in a thread."""
        if self._thread is not None or self._closed:
            raise UsageError("this bootstrap server was started or closed before", remedy="make a new one")
        serve = self._server.serve_forever
        thread = threading.Thread(target=serve, args=(_POLL_S,), name="pdstage-bootstrap", daemon=True)
        thread.start()
        self._thread = thread
        return self

    def close(self) -> None:
        """Stops answering. Idempotent. In a forked child it does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class BootstrapClient:
    """The client of the directory at `address` (`host:port` or `http://host:port`; with `keys` also `key@host:port`).

    `plain://host:port` is a directory in another server, over plain HTTP even with `keys`. Its answers are not
    authenticated, but a node with keys still talks only to nodes that its keys allow.

    Every call is one request and waits for its answer, up to `timeout_s` per step. Call it from a worker thread, never
    from a driver's loop. It holds no connection, and several threads may use it. A lease is renewed by publishing
    again, best every third of its `ttl_s`.

    Every call raises `TransportError` if nothing answers, and `PeerError` for an invalid answer or for keys that do not
    match. The constructor raises `UsageError` for a bad address or key file, and for an address whose key is not
    allowed here.
    """

    def __init__(self, address: str, timeout_s: float = 2.0, *, keys: GivenKeys = None) -> None:
        self.given = address = arguments.text("a bootstrap address", address)
        plain = address.startswith(PLAIN)
        self.address = Address.parse(address.removeprefix(PLAIN), "http")
        self._keys = None if plain else keys_of(keys)
        self._timeout_s = arguments.number("timeout_s", timeout_s, above=0.0)
        self.address.key_of_peer(self._keys)

    def publish(self, advert: Advert, ttl_s: float = 15.0, after: int = 0) -> None:
        """As `Directory.publish`."""
        self._ask(Publish(advert, ttl_s, after))

    def withdraw(self, advert: Advert) -> None:
        """Removes the rank, if this incarnation still holds its place."""
        self._ask(Withdraw(advert))

    def lookup(self, dp_rank: int | None = None, *, instance: str | None = None) -> list[Advert]:
        """All ranks of one dp replica, by group rank. Raises as `Directory.lookup`; after `Incomplete`, ask again."""
        answer = self._ask(Lookup(dp_rank, instance))
        try:
            return adverts_of.decode(answer).adverts
        except UNREADABLE as error:
            raise self._not_ours(f"its adverts do not decode: {error}") from error

    def instances(self) -> bytes:
        """All live adverts as JSON, for people: by instance, each advert and the seconds left of its lease."""
        return self._request("GET", "/v1/instances")

    def _ask(self, asked: Asked) -> bytes:
        return self._request("PUT", "/v1/ask", msgspec.json.encode(asked))

    def _request(self, method: str, path: str, body: bytes = b"") -> bytes:
        if self._keys is not None:
            status, answer = self._ask_curve(self._keys, (method, path, body))
        else:
            status, answer = self._ask_http(method, path, body)
        if status != http.client.OK:
            raise self._refusal(status, answer)
        return answer

    def _ask_curve(self, keys: Keys, request: tuple[str, str, bytes]) -> tuple[int, bytes]:
        refused = None
        for key in keys.candidates(self.address.key):
            try:
                return directory_curve.ask(self.address._replace(key=key), keys, request, self._timeout_s)
            except PeerError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _ask_http(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.address.host, self.address.port, timeout=self._timeout_s)
        try:
            connection.request(method, path, body, {"Connection": "close"})
            response = connection.getresponse()
            return response.status, response.read(MAX_ANSWER_NBYTES)
        except OSError as error:
            raise TransportError(
                f"no bootstrap server answers at {self.address} ({error})",
                remedy="start one with `pdstage bootstrap`, or check the prefill node's address and the network"
                + _MAYBE_KEYS,
                address=str(self.address),
            ) from error
        except http.client.HTTPException as error:
            raise self._not_ours(f"{error!r}{_MAYBE_KEYS}") from error
        finally:
            connection.close()

    def _refusal(self, status: int, answer: bytes) -> PdstageError:
        """The error in an answer."""
        try:
            refusal = refusal_of.decode(answer)
        except UNREADABLE:
            return self._not_ours(f"HTTP status {status}")
        if refusal.error == "incomplete":
            return Incomplete(refusal.what, refusal.missing, address=str(self.address))
        cls = next((cls for kind, _, cls in KINDS if kind == refusal.error), PeerError)
        return cls(refusal.what, remedy=refusal.remedy, address=str(self.address), holder=refusal.holder)

    def _not_ours(self, why: str) -> PeerError:
        return PeerError(
            f"what answers at {self.address} is not a bootstrap server ({why})",
            remedy="check the address, and that there is no proxy in between",
            address=str(self.address),
        )


DirectoryClient: TypeAlias = BootstrapClient | etcd.EtcdClient


def client_of(address: str, timeout_s: float = 2.0, *, keys: GivenKeys = None) -> DirectoryClient:
    """The client for a directory's address: `etcd://...`, or any that `BootstrapClient` takes. Raises as they do."""
    address = arguments.text("a directory's address", address)
    if address.startswith(etcd.SCHEME):
        return etcd.EtcdClient(address, timeout_s)
    return BootstrapClient(address, timeout_s, keys=keys)

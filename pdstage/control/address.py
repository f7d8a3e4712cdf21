"""Addresses of the control plane: `[scheme://][key@]host:port`, who can reach them, and what peers connect to."""

from __future__ import annotations

import ipaddress
import re
import socket
from functools import lru_cache
from typing import NamedTuple

from pdstage import arguments
from pdstage.control.keys import Keys, parse_key
from pdstage.errors import UsageError

_MAX_CHARACTERS = 512
_WILDCARDS = {"", "*", "0.0.0.0", "::"}
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
"""A label of a host name: RFC 1123, section 2.1, and the underscore, which container networks use."""


class Address(NamedTuple):
    """A host (IPv6 without brackets, "" and "*" for any), a port (0: the system chooses), and a key.

    `key` is the public key that the listener must prove to hold; empty if the address does not give it.
    """

    host: str
    port: int
    key: bytes = b""

    @staticmethod
    def joined(host: str, port: int) -> str:
        """`host:port` of what an engine or a router gave apart: `host` with or without brackets, maybe `KEY@host`."""
        key, at, bare = host.rpartition("@")
        return f"{key}{at}{Address(bare.strip('[]'), port)}"

    @classmethod
    def parse(cls, text: str, scheme: str, *, listening: bool = False) -> Address:
        """Reads `scheme://key@host:port`; scheme and key are optional.

        `listening` allows wildcards and port 0, and forbids a key.

        Raises `UsageError` that quotes `text`.
        """
        return cls._read(arguments.text("an address", text), scheme, listening)

    @classmethod
    @lru_cache(maxsize=1024)
    def _read(cls, text: str, scheme: str, listening: bool) -> Address:
        """`parse`, cached: an engine names the same few addresses with every room."""
        how = f"write it as {scheme}://host:port, an IPv6 host in brackets"

        def wrong(what: str, remedy: str = how) -> UsageError:
            return UsageError(f"address {text!r} {what}", remedy=remedy, address=text)

        if len(text) > _MAX_CHARACTERS:
            raise UsageError(f"address {text[:64]!r}... of {len(text)} characters", remedy=how)
        found, separator, rest = text.partition("://")
        if separator and found != scheme:
            raise wrong(f"has scheme {found!r}")
        written, at, rest = (rest if separator else text).rstrip("/").rpartition("@")
        key = parse_key(written) if at and not listening else b""
        if key is None or (at and listening):
            raise wrong("has no public key before its @", "give it as its node printed it")
        host, colon, port = rest.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host or "/" in host:
            raise wrong("has no unambiguous host")
        number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else -1
        if not colon or not (0 if listening else 1) <= number <= 65535:
            raise wrong("has no valid port")
        if host in _WILDCARDS:
            if not listening:
                raise wrong("names no host to connect to")
        elif not _is_host(host):
            raise wrong(
                "has no valid host name",
                "give an IP address, or a name of ASCII letters, digits, - and _, at most 63 between dots "
                "(another name as xn--...)",
            )
        return cls(host, number, key)

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host

    @property
    def is_wildcard(self) -> bool:
        return self.host in _WILDCARDS

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A name other than "localhost" counts as reachable from outside."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def ip(self) -> str:
        """The host as an IP address; empty for a wildcard, and for a name that has none, such as an interface."""
        if self.is_wildcard:
            return ""
        try:
            return str(socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError:
            return ""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"

    @property
    def keyed(self) -> str:
        """The address with its key, as given to peers."""
        return f"{self.key.hex()}@{self}" if self.key else str(self)

    def reachable(self, advertise: str | None = None, keys: Keys | None = None) -> Address:
        """The address for peers: `advertise` if given, else with this machine's own address instead of a wildcard."""
        key = keys.public if keys is not None else b""
        if advertise is not None:
            return Address(advertise.strip("[]"), self.port, key)
        return Address(_own_host(ipv6=self.is_ipv6) if self.is_wildcard else self.host, self.port, key)

    def check_exposure(self, insecure: bool, keys: Keys | None) -> None:
        """Raises `UsageError` for an unencrypted listener that other machines can reach, unless `insecure`."""
        if not (insecure or self.is_loopback or keys is not None):
            raise UsageError(
                f"{self} can be reached from other machines, and without keys this channel is neither encrypted nor "
                "authenticated",
                remedy="make keys with `pdstage keys FILE` and pass keys=FILE, bind to loopback, or say insecure=True "
                "if the network itself is trusted",
                address=str(self),
            )

    def key_of_peer(self, keys: Keys | None) -> bytes:
        """The public key that the listener at this address must prove to hold; empty without `keys`.

        An address without a key means our own key: one key file for the whole cluster. Raises `UsageError` if only one
        side has keys, or if the key is not in our allow list.
        """
        if keys is None:
            if self.key:
                raise UsageError(
                    f"what listens at {self} is encrypted, and this node has no keys",
                    remedy="pass keys= with a key file of its cluster",
                    address=str(self),
                )
            return b""
        key = self.key or keys.public
        if not keys.allows(key):
            raise UsageError(
                f"the key {key.hex()} of {self} is not let in here",
                remedy="add it to this node's allow list, or give both sides the same key file",
                address=str(self),
                key=key.hex(),
            )
        return key


def is_at(endpoint: str, where: str) -> bool:
    """Whether `where`, an endpoint or a host, is that of `endpoint`, a control socket's."""
    if where == endpoint:
        return True
    try:
        return Address.parse(endpoint, "tcp").host == where.strip("[]")
    except UsageError:  # an endpoint without a host
        return False


def _is_host(text: str) -> bool:
    """Whether the system's resolver accepts it: `getaddrinfo` raises `UnicodeError` for an invalid name."""
    if ":" in text:
        try:
            ipaddress.IPv6Address(text)
        except ValueError:
            return False
        return True
    return len(text) <= 253 and all(_LABEL.fullmatch(label) for label in text.removesuffix(".").split("."))


def _own_host(*, ipv6: bool) -> str:
    """The address from which this machine would send. Connecting a datagram socket sends nothing."""
    family, probe = (socket.AF_INET6, "2001:db8::1") if ipv6 else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((probe, 9))
        except OSError:  # no route out: only this machine can connect anyway
            return "::1" if ipv6 else "127.0.0.1"
        return str(sock.getsockname()[0])

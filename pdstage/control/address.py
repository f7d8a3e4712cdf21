"""Addresses of the control plane: `[scheme://]host:port`, how far they reach, and how a peer reaches them.

Layer 4. Must not know what listens there.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import NamedTuple

from pdstage.errors import UsageError

_MOST_CHARACTERS = 512
_WILDCARDS = {"", "*", "0.0.0.0", "::"}


class Address(NamedTuple):
    """A host (IPv6 without brackets, "" and "*" for any) and a port (0: the system's choice)."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, scheme: str, *, listening: bool = False) -> Address:
        """Reads `scheme://host:port` or `host:port`; `listening` allows wildcards and port 0.

        Raises `UsageError` that quotes `text`.
        """
        remedy = f"write it as {scheme}://host:port, an IPv6 host in brackets"
        if len(text) > _MOST_CHARACTERS:
            raise UsageError(f"address {text[:64]!r}... of {len(text)} characters", remedy=remedy)
        found, separator, rest = text.partition("://")
        if separator and found != scheme:
            raise UsageError(f"address {text!r} is of scheme {found!r}", remedy=remedy, address=text)
        host, colon, port = (rest if separator else text).rstrip("/").rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host or "/" in host:
            raise UsageError(f"address {text!r} has no clear host", remedy=remedy, address=text)
        number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else -1
        if port == "*" and listening:
            number = 0
        if not colon or not (0 if listening else 1) <= number <= 65535:
            raise UsageError(f"address {text!r} has no valid port", remedy=remedy, address=text)
        if host in _WILDCARDS and not listening:
            raise UsageError(f"address {text!r} names no host to connect to", remedy=remedy, address=text)
        return cls(host, number)

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

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"

    def reachable(self, advertise: str | None = None) -> Address:
        """What a peer connects to: `advertise` if given, else this machine's own address in place of a wildcard."""
        if advertise is not None:
            return Address(advertise.strip("[]"), self.port)
        return Address(_own_host(ipv6=self.is_ipv6), self.port) if self.is_wildcard else self

    def check_exposure(self, insecure: bool) -> None:
        """Raises `UsageError` for an unencrypted listener that others than this machine can reach, unless asked for."""
        if not (insecure or self.is_loopback):
            raise UsageError(
                f"{self} can be reached from other machines, and this channel is neither encrypted nor authenticated",
                remedy="bind to loopback, or say insecure=True where the network itself is trusted",
                address=str(self),
            )


def _own_host(*, ipv6: bool) -> str:
    """The address this machine would send from. Connecting a datagram socket sends nothing."""
    family, probe = (socket.AF_INET6, "2001:db8::1") if ipv6 else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((probe, 9))
        except OSError:  # no route out: nobody but this machine can connect anyway
            return "::1" if ipv6 else "127.0.0.1"
        return str(sock.getsockname()[0])

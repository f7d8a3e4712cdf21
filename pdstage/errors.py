"""The library's errors: who is at fault, what failed, and the remedy.

Every error is a `PdstageError`. Its text is one sentence that names the culprit and one that names the remedy; its
`fields` carry the same facts for programs. The split by blame follows h11's LocalProtocolError/RemoteProtocolError.
"""

from __future__ import annotations


class PdstageError(Exception):
    """Base of every error this library raises.

    `what` names the culprit, `remedy` the way to fix it; `fields` are the same facts by name.
    """

    def __init__(self, what: str, *, remedy: str = "", **fields: object) -> None:
        super().__init__(f"{what}; {remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy
        self.fields = fields


class UsageError(PdstageError, ValueError):
    """The caller's mistake. The refused call changed nothing."""


class PeerError(PdstageError):
    """The peer broke the protocol, or cannot be reached."""


class TransportError(PdstageError):
    """The fabric failed: a write, a registration or a connection."""


class Aborted(PdstageError):
    """The room was aborted on purpose, here or at the peer."""


class DeadlineExceeded(PdstageError, TimeoutError):
    """A room or a peer did not answer within one of the configured deadlines."""

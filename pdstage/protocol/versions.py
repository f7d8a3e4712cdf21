"""Which wire versions talk with each other. docs/wire.md says what may change under which."""

from __future__ import annotations

from pdstage.errors import PeerError

VERSION = 1
"""Rises with every change of any message's or tag's bytes."""
OLDEST = 1
"""The oldest version this one talks with; rises when an older one could no longer read or be read."""


def talks_with(version: int, oldest: int) -> bool:
    """Whether this node and one of `version`, which talks with `oldest` and later, understand each other."""
    return version >= OLDEST and 1 <= oldest <= VERSION


class OtherVersion(PeerError):
    """A frame of a version that this node does not talk with. `greets`: it is a Hello, whose `session` to answer."""

    def __init__(self, version: int, oldest: int, session_id: tuple[int, int], *, greets: bool) -> None:
        super().__init__(
            f"wire version {version} from the peer, {VERSION} here; the peer talks with {oldest} and later, "
            f"this node with {OLDEST} and later",
            remedy="run releases on both sides whose wire versions talk with each other",
            version=version,
        )
        self.session, self.greets = session_id, greets

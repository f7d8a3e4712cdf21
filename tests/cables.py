"""Two network namespaces with two cables between them, in place of two hosts with two network cards."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from pathlib import Path

import pytest


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def two_hosts() -> object:
    """Two network namespaces with two cables between them: devices a0 and a1 there, b0 and b1 here."""
    with hosts(2) as spaces:
        yield spaces


@contextlib.contextmanager
def hosts(n_cables: int) -> object:
    """Two network namespaces with that many cables: devices a0, a1, ... in the first, b0, b1, ... in the second."""
    spaces = [f"pdstage-{side}-{secrets.token_hex(3)}" for side in "ab"]
    try:
        try:
            for space in spaces:
                ip("netns", "add", space)
            for i in range(n_cables):
                ip("link", "add", f"a{i}", "netns", spaces[0], "type", "veth", "peer", f"b{i}", "netns", spaces[1])
                for side, space in zip("ab", spaces, strict=True):
                    ip("-n", space, "addr", "add", f"10.77.{i}.{'_ab'.index(side)}/24", "dev", f"{side}{i}")
                    ip("-n", space, "link", "set", f"{side}{i}", "up")
            for space in spaces:
                ip("-n", space, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
        yield spaces
    finally:
        for space in spaces:
            if Path("/run/netns", space).exists():
                ip("netns", "del", space)

"""A process's open descriptors, as tests count them that look for leaks.

Threads of libraries open and close descriptors when they like: so each is known by its kind, and what is left is looked
for until a library had time to close it. A leak stays.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

_LATE_S = 5.0
_OTHERS = re.compile(r"/sys/fs/cgroup/.*|/proc/\d+/fd")
"""Go's runtime, within Mooncake's wheel, opens the processor limits at a moment of its own and keeps them for ever
(release notes of Go 1.25, "Container-aware GOMAXPROCS"); the other is the listing's own.
"""


def kinds() -> Counter[str]:
    """What the open descriptors are, without the numbers in their names."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        try:
            kind = re.sub(r"\[\d+\]", "", str(link.readlink()))
        except FileNotFoundError:  # closed since it was listed
            continue
        if not _OTHERS.fullmatch(kind):
            found[kind] += 1
    return found


def count(part: str = "") -> int:
    """How many descriptors are of kinds with this in their names; of all kinds without."""
    return sum(n for kind, n in kinds().items() if part in kind)


def left(before: Counter[str]) -> Counter[str]:
    """What is open beyond `before`, and stays so for some seconds."""
    until = time.monotonic() + _LATE_S
    while (more := kinds() - before) and time.monotonic() < until:
        time.sleep(0.01)
    return more

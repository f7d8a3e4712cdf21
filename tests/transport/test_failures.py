"""What a transport says when its library or a registration fails, and that the page about failures is whole.

A test names its row of docs/transports.md in its docstring, as the ones here do; many are in test_contract.py, those
about rooms in tests/manager/test_failures.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transport.conftest import VARIANTS

from pdstage.errors import PeerError, TransportError
from pdstage.transport import Done, PostFailed, available

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = {"nixl": "nixl", "mooncake": "mooncake"}
"""The package whose absence a transport must explain; the others need none."""
BROKEN = {  # what makes a transport's library fail at its start, and what its error names
    "nixl": (
        {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "nowhere"},
        r"NIXL does not start: nixlBackendError\(NIXL_ERR_",
    ),
}


def run(code: str, **environment: str) -> str:
    """What a fresh Python prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout


REFUSED = """
from pdstage.errors import {error}
from pdstage.transport import open_transport
try:
    open_transport({name!r})
except {error} as error:
    print("SAID", error)
"""


@pytest.mark.parametrize("name", [name for name in LIBRARY if name in available()])
def test_a_missing_library(name):
    """Row: library missing."""
    said = run(f"import sys; sys.modules[{LIBRARY[name]!r}] = None\n" + REFUSED.format(name=name, error="UsageError"))
    assert re.search(rf'SAID transport {name!r} does not import here: .*; pip install "pdstage\[{name}\]"', said), said


@pytest.mark.parametrize("name", [name for name in BROKEN if not available().get(name, "unknown")])
def test_a_library_that_fails(name):
    """Row: library error."""
    environment, names = BROKEN[name]
    assert re.search(f"SAID {names}", run(REFUSED.format(name=name, error="TransportError"), **environment))


def test_a_region_that_the_peer_deregistered(linked):
    """Row: region deregistered. Nobody stops a write to memory that is still mapped, except within one process."""
    linked.deliver(b"before")
    linked.b.unregister([linked.b.region()])
    linked.a.fill(0, b"behind")
    try:
        linked.post([(0, 0, 6)], b"")
    except TransportError as error:
        assert "unregistered" in str(error)
        assert linked.variant == VARIANTS["local-same"]
    else:
        n = len(linked.log.ended(linked.a))
        linked.log.until(lambda: len(linked.log.ended(linked.a)) > n)
        refused = linked.variant.transport in ("mooncake", "postbox")  # the peer looks at what comes
        assert isinstance(linked.log.ended(linked.a)[-1], PostFailed if refused else Done)
        assert linked.b.read(0, 6) == (b"before" if refused else b"behind")
    linked.a.disconnect("b")
    linked.a.connect("b", linked.b.describe())
    with pytest.raises(PeerError, match="not registered"):
        linked.a.prepare("b", [linked.b.region()])


TABLE = re.compile(r"^\| row \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)


def rows() -> set[tuple[str, str]]:
    """Of every table of failures on the page: whose it is, "" for all transports, and the row's name."""
    found = set()
    for section in (ROOT / "docs/transports.md").read_text().split("\n## ")[1:]:
        title = section.partition("\n")[0].strip()
        whose = "" if title == "When something fails" else title
        for table in TABLE.findall(section):
            found |= {(whose, line.split("|")[1].strip()) for line in table.splitlines()}
    return found


def test_every_row_is_tested_and_every_cited_row_is_there():
    cited = {
        (whose, row)
        for path in (ROOT / "tests").rglob("test_*.py")
        for whose, row in re.findall(r"Row(?: of ([a-z]+))?: ([a-z ]+)[.;]", path.read_text())
    }
    assert {whose for whose, _ in rows()} == {"", "local", "mooncake", "mori"}
    assert rows() == cited

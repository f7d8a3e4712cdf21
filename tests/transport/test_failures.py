"""What a transport says when its library or a registration fails, and that the page about failures is whole.

A test names its row of docs/transports.md in its docstring, as the ones here do; many are in test_contract.py, those
about rooms in tests/manager/test_failures.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transport.conftest import VARIANTS

from pdstage import PeerError, TransportError
from pdstage.transport import Done, PostFailed

ROOT = Path(__file__).resolve().parents[2]


def test_a_region_that_the_peer_deregistered(linked):
    """Row: region deregistered. Row of local: region unregistered and mapped. Row of mooncake: region deregistered.

    Nobody stops a write to memory that is still mapped, except within one process."""
    linked.deliver(b"before")
    linked.b.unregister([linked.b.region()])
    linked.a.fill(0, b"behind")
    try:
        linked.post([(0, 0, 6)], b"")
    except TransportError as error:
        assert "unregistered" in str(error)
        assert linked.variant in (VARIANTS["local-same"], VARIANTS["local-cuda-same"])
    else:
        n = len(linked.ended())
        linked.until(lambda: len(linked.ended()) > n)
        refused = linked.variant.transport in ("mooncake", "postbox")  # the peer looks at what comes
        assert isinstance(linked.ended()[-1], PostFailed if refused else Done)
        assert linked.b.read(0, 6) == (b"before" if refused else b"behind")
    linked.a.disconnect("b")
    linked.a.connect("b", linked.b.describe())
    with pytest.raises(PeerError, match="not registered"):
        linked.a.prepare("b", [linked.b.region()])


TABLE = re.compile(r"^\| row \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)


def rows():
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

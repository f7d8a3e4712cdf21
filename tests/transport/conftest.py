"""Pairs of endpoints: every transport that imports, in one process and in two."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import pytest
from transport.endpoint import Endpoint, Log, Remote, Saying, meet

from pdstage import environment
from pdstage.transport import available

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdstage.transport import Done, PostFailed

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user, or make namespaces")


class Variant(NamedTuple):
    """`where`: "same" process, "two" processes, or "apart": both of them spawned with `environment`."""

    transport: str
    where: str
    environment: Mapping[str, str] = MappingProxyType({})


# Over tcp a write is asynchronous, as on a real network; over shared memory NIXL copies within the call.
VARIANTS = {
    "local-same": Variant("local", "same"),
    "local-two": Variant("local+shared", "two"),
    "local-numpy": Variant("local", "apart", {"PDSTAGE_NATIVE": "no"}),
    "local-cuda-same": Variant("local+cuda", "same"),
    "local-cuda-two": Variant("local+cuda", "two"),
    "local-segments-two": Variant("local+segments", "two"),
    "auto-two": Variant("auto", "two"),
    "nixl-same": Variant("nixl", "same"),
    "nixl-two": Variant("nixl", "two"),
    "nixl-tcp": Variant("nixl", "apart", {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}),
    "mooncake": Variant("mooncake", "two"),
    "mori-double": Variant("mori-double", "same"),
    "postbox-same": Variant("postbox", "same"),
    "postbox-two": Variant("postbox", "two"),
}

FULL = {"local-numpy", "auto-two", "nixl-same", "nixl-tcp", "postbox-two"}
"""Whose code other variants run too: numpy copies, a choice of transport, UCX over another of its own transports, one
that is for tests between processes.
"""

for name in environment.TEST_TRANSPORTS.read() or ():  # of whoever wrote one: see docs/transports.md
    VARIANTS |= {f"{name}-{where}": Variant(name, where) for where in ("same", "two")}

# What pip would write for a distribution with transports of its own; a spawned process inherits sys.path.
sys.path.append(str(Path(__file__).parent / "installed"))


def _params(*, processes=False) -> list[object]:
    reasons = available()
    params = []
    for name, variant in VARIANTS.items():
        if processes and variant.where == "same":
            continue
        why_not = reasons.get(variant.transport.partition("+")[0], "")
        marks = [pytest.mark.skip(reason=why_not)] if why_not else [pytest.mark.full] if name in FULL else []
        params.append(pytest.param(variant, id=name, marks=marks))
    return params


class Pair:
    """`a` writes to `b`, which it knows as "b"."""

    def __init__(self, variant: Variant, a, b):
        if not a.notifies():
            a, b = Saying(a), Saying(b)
        self.variant, self.a, self.b = variant, a, b
        self.log = Log(a, b)

    def connect(self) -> Pair:
        meet(self.a, self.b)
        return self

    def until(self, holds):
        self.log.until(holds)

    def tags(self) -> list[bytes]:
        """Of what arrived at b."""
        return self.log.tags(self.b)

    def ended(self) -> list[Done | PostFailed]:
        """What a said of its posts."""
        return self.log.ended(self.a)

    def done(self) -> list[int]:
        return self.log.done(self.a)

    def post(self, spans, tag):
        """`spans`: rows of (offset at a, offset at b, nbytes)."""
        return self.a.post("b", [(src, self.b.base + dst, nbytes) for src, dst, nbytes in spans], tag)

    def deliver(self, data, offset=0, tag=b"tag"):
        """Writes `data` from a to b and waits until both sides know it."""
        n = len(self.tags())
        self.a.fill(offset, data)
        ticket = self.post([(offset, offset, len(data))], tag)
        self.until(lambda: ticket in self.done() and len(self.tags()) > n)
        assert self.b.read(offset, len(data)) == data


class _Stock:
    """Processes kept from test to test, since starting one costs a second or two; each test gets a new transport."""

    def __init__(self):
        self._kept = {}

    def remote(self, variant: Variant, name) -> Remote:
        key = (str(variant), name)
        if key in self._kept:
            self._kept[key].renew()
        else:
            self._kept[key] = Remote(variant.transport, variant.environment)
        return self._kept[key]

    def shut(self):
        for remote in self._kept.values():
            remote.shut()


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    stock = _Stock()
    os.environ["POSTBOX_DIR"] = str(tmp_path_factory.mktemp("postboxes"))  # those of killed processes stay there
    yield stock
    stock.shut()


def _writer(variant: Variant, stock: _Stock):
    return stock.remote(variant, "a") if variant.where == "apart" else Endpoint(variant.transport)


@pytest.fixture(params=_params())
def pair(request, stock):
    """Two endpoints not connected yet."""
    variant = request.param
    a = _writer(variant, stock)
    b = Endpoint(variant.transport) if variant.where == "same" else stock.remote(variant, "b")
    yield Pair(variant, a, b)
    a.close()
    b.close()


@pytest.fixture
def linked(pair):
    return pair.connect()


@pytest.fixture(params=_params(processes=True))
def mortal(request, stock):
    """A connected pair whose b is a process of its own, which the test may stop or kill."""
    variant = request.param
    a = _writer(variant, stock)
    b = Remote(variant.transport, variant.environment)
    yield Pair(variant, a, b).connect()
    b.kill()
    a.close()

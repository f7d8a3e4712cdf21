"""Nodes that are watched: real ones, with rooms between them, and an endpoint of a registry of their own."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry

from pdstage.watch import Timings, expose
from tests.manager.conftest import Site, site
from tests.manager.engine import Pair
from tests.watch.samples import Samples, get

__all__ = ["Samples", "Watched", "site"]


class Watched(Pair):
    """A prefill and a decode node, both timed, and an endpoint."""

    def __init__(self, stack: ExitStack, **options) -> None:
        self.site = Site(stack)
        made = self.site.pair(**{"path": "staged", "observers": [Timings()]} | options)
        super().__init__(made.p, made.src, made.d, made.dst)
        self.endpoint = stack.enter_context(expose(self.p, self.d, port=0, registry=CollectorRegistry()))

    def scrape(self) -> Samples:
        return Samples(get(self.endpoint.address))


@pytest.fixture
def make_watched():
    """Makes a `Watched` with the options given to both of its nodes."""
    with ExitStack() as stack:
        yield lambda **options: Watched(stack, **options)


@pytest.fixture
def watched(make_watched):
    return make_watched()

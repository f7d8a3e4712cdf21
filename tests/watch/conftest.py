"""Nodes that are watched: real ones, with rooms between them, and an endpoint of a registry of their own."""

from __future__ import annotations

import urllib.error
import urllib.request
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from pdstage.tools.watch import Timings, expose
from tests.manager.conftest import Site, site
from tests.manager.engine import Pair

__all__ = ["Samples", "Watched", "site"]


def get(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=240) as answer:
        return answer.read().decode()


def status_of(address: str, path: str) -> int:
    try:
        get(address, path)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


class Samples:
    """One exposition, as Prometheus's own parser reads it."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        held = [sample for family in self.families.values() for sample in family.samples]
        self.names = {sample.name for sample in held}
        self.of = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in held}
        assert len(self.of) == len(held), "a series is there once"

    def __call__(self, name: str, **labels: str) -> float:
        """The one sample of `name` that carries `labels`."""
        found = [
            value for (held, own), value in self.of.items() if held == name and labels.items() <= dict(own).items()
        ]
        assert len(found) == 1, (name, labels, found)
        return found[0]


class Watched(Pair):
    """A prefill and a decode node, both timed, and an endpoint."""

    def __init__(self, stack: ExitStack, **options) -> None:
        made = Site(stack).pair(**{"path": "staged", "observers": [Timings()]} | options)
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

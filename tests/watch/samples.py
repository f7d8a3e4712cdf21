"""What an endpoint answers, as Prometheus's own parser reads it."""

from __future__ import annotations

import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families


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

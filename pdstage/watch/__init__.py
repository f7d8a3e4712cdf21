"""Watching nodes in production: Prometheus metrics, and `pdstage top`.

Read `catalogue` (the metrics), `timings` (histograms, by observing a node), `exporter` and `server` (the export), then
`scrape` and `top` (what `pdstage top` reads and draws). Other commands use `terminal`.

    from pdstage.watch import Timings, expose, register

    node = PrefillNode(..., observers=[Timings()])  # without it: everything but times
    expose(node, port=9470)                         # http://127.0.0.1:9470/metrics, and /rooms for `pdstage top`
    register(node, labels={"engine": "a"})          # or into the registry that an engine exports already
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdstage.watch.exporter import Registration, register
    from pdstage.watch.server import Endpoint, expose
    from pdstage.watch.timings import Timings

__all__ = ["Endpoint", "Registration", "Timings", "expose", "register"]


def __getattr__(name: str) -> object:
    """Imports late: other commands import `progress`, where prometheus_client may be absent."""
    if name not in __all__:
        raise AttributeError(f"module 'pdstage.watch' has no attribute {name!r}")
    home = {"Timings": "timings", "Endpoint": "server", "expose": "server"}.get(name, "exporter")
    return getattr(importlib.import_module(f"pdstage.watch.{home}"), name)

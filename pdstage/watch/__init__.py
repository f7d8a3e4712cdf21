"""Watching nodes in production: Prometheus metrics, and `pdstage top`.

Layer 6. Must not know engines. Read `catalogue` (what is exported), `timings` (histograms, by observing a node),
`exporter` and `server` (how), then `scrape` and `frame` (what `pdstage top` reads and draws).

    from pdstage.watch import Timings, expose, register

    node = PrefillNode(..., observers=[Timings()])  # without: everything but times
    expose(node, port=9470)                         # http://127.0.0.1:9470/metrics, and /rooms for `pdstage top`
    register(node, labels={"engine": "a"})          # or into the registry that an engine exports already
"""

from __future__ import annotations

from pdstage.watch.exporter import Registration, register
from pdstage.watch.server import Endpoint, expose
from pdstage.watch.timings import Timings

__all__ = ["Endpoint", "Registration", "Timings", "expose", "register"]

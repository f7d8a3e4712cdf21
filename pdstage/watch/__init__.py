"""Watching nodes in production: Prometheus metrics, and `pdstage top`.

Layer 6. Must not know engines. Read `catalogue` (what is exported), `exporter` (how), `server` (where), then `scrape`
and `frame` (what `pdstage top` reads and draws).

    from pdstage.watch import expose, register

    expose(node, port=9400)                 # http://127.0.0.1:9400/metrics, and /rooms for `pdstage top`
    register(node, labels={"engine": "a"})  # or into the registry that an engine exports already
"""

from __future__ import annotations

from pdstage.watch.exporter import Registration, register
from pdstage.watch.server import Endpoint, expose

__all__ = ["Endpoint", "Registration", "expose", "register"]

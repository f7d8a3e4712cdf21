"""`pdstage doctor`: what this node can do, line by line, and whether it can work with another.

`table` lists the checks; each area has a file: `gpu`, `kernels`, `transports`, `host`, `network`, `peer`. Probes that
may crash or hang run in another process (`child`, `probes`), under a deadline.
"""

AREAS = ("host", "gpu", "kernels", "transports", "network", "peer")

"""`pdstage doctor`: what this node can do, line by line, and whether it can work with another.

`table` lists the checks; there is a file for each area: `gpu`, `kernels`, `transports`, `host`, `network`, `peer`. What
may crash or hang is asked in a process of its own (`child`, `probes`), under a deadline.
"""

AREAS = ("host", "gpu", "kernels", "transports", "network", "peer")

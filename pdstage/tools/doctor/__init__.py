"""`pdstage doctor`: what this node can do, line by line, and whether it can work with another.

`table` lists the checks and runs them; each returns what `report` defines and prints. Checks are in `host` (releases,
limits, addresses, NICs), `gpu` (driver, kernels) and `transports` (each transport, and a peer). What may
crash or hang runs in another process, under a deadline (`probe`): those of `gpu`, and `talk`, two nodes' conversation.
"""

AREAS = ("host", "gpu", "kernels", "transports", "network", "peer")

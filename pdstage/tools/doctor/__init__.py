"""`pdstage doctor`: what this node can do, line by line, and whether it can work with another.

`table` lists the checks, which share a `site` and return what `found` defines; `show` prints them. Each area has a
file: `gpu`, `kernels`, `transports`, `host`, `network` with `rails`, `peer`. Probes that may crash or hang run in
another process, under a deadline (`child`, `probes`): `cuda_driver`, `try_kernels`, `pair` and `rails` with `ucx`,
`nixl_plugins`, `reach`, `caller`.
"""

AREAS = ("host", "gpu", "kernels", "transports", "network", "peer")

"""Fleets: real ranks in processes of their own, replaced and moved while rooms flow.

Read `rank` (one process), `member` (it as its supervisor sees it), `router` (engines, rooms and what came of them),
`cluster` (scaled up and down in network namespaces with etcd), `__main__` (the command).
"""

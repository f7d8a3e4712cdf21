"""Fleets: real ranks in processes of their own, of this release or an older one, replaced and moved while rooms flow.

Read `rank` (one process, run by any release's Python), `member` (it as its supervisor sees it), `router` (engines,
rooms and what came of them), `releases` (wheels of earlier releases, built from their commits), `upgrade` (releases
beside each other), `cluster` (scaled up and down in network namespaces with etcd), `__main__` (the commands).
"""

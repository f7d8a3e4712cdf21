"""The control plane: one ROUTER socket per node, and the directory of prefill ranks.

Read in this order: `address`; `keys` and `guard` (who may connect); `zmq` over `port` (frames between nodes);
`drain` (an operator's request); `directory` (the table), `directory_api` (its requests),
`directory_http` and `directory_curve` (their carriers), `bootstrap` (server and client); `etcd` (the same in a
cluster's etcd).
"""

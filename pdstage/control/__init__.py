"""The control plane: one ROUTER socket a node, and the directory that tells who is there.

To read: `address`; `keys` and `guard` (who is let in); `zmq` over `port` (frames between nodes); `directory` (who is
there), `directory_api` (how it is asked), `directory_http` and `directory_curve` (over what), `bootstrap` (both ends).
"""

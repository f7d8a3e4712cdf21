"""The control plane: one ROUTER socket a node, and the directory that tells who is there.

Layer 4. Must not know rooms, what its frames mean, transports or the stager.
"""

"""What the set-ups of pages have: a rank's pool of two NHD tensors in host memory, and its topology."""

import numpy as np

from pdstage import Pool, Topology
from pdstage.tensors import build, paged_nhd

_kept = []  # an engine's memory is the engine's to keep


def made() -> Pool:
    _kept.append(np.zeros((2, 1, 8, 16, 2, 64), np.float32))
    return Pool.of(build(paged_nhd(*_kept[-1], total_heads=2, tp=(1, 0))))


pool, topology = made(), Topology()

import numpy as np

from pdstage import DecodeNode, Pool, Topology
from pdstage.tensors import build, paged_nhd

k, v = np.zeros((2, 1, 8, 16, 2, 64), np.float32)
node = DecodeNode(Pool.of(build(paged_nhd(k, v, total_heads=2, tp=(1, 0)))), Topology(), transport="local")


def host_is_down(endpoint):
    return False
